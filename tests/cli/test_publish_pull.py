"""`init`, `publish` and `pull`: from one folder to another, once."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from cli_world import CHANNEL, RECORD, VERSIONS, World, facts, holds, objects, run, text, tree
from commands import at_once


def test_init_publish_pull(shared: World, tmp_path: Path, cache: Path) -> None:
    url, folder = tmp_path / "channel", tmp_path / "replica"
    begun = facts("init", url, shared.checkpoints[0], "--step", 5)
    digest = facts("digest", shared.checkpoints[1])["digest"]
    published = facts("publish", url, shared.checkpoints[1], "--step", 6, "--codec", "gap")
    assert (begun["version"], begun["channel"]) == (0, str(url))
    assert (published["version"], published["digest"], published["new"], published["step"]) == (1, digest, True, 6)
    assert published["bytes"] == objects(url, "deltas")[0].stat().st_size
    assert published["ratio_to_full"] == shared.states[0].table.nbytes / published["bytes"]
    assert [path.name for path in (cache / "weightcast").iterdir()] == [begun["id"]]
    pulled = facts("pull", url, folder)
    assert (pulled["version"], pulled["digest"], pulled["step"], pulled["new"]) == (1, digest, 6, True)
    assert holds(folder, shared.states[1])
    assert (folder / "config.json").exists()


def test_publishing_the_newest_again_publishes_nothing(world: World) -> None:
    before = tree(world.url / "manifests")
    again = facts("publish", world.url, world.checkpoints[VERSIONS - 1])
    assert (again["version"], again["new"]) == (VERSIONS - 1, False)
    assert "has these weights already" in text("publish", world.url, world.checkpoints[VERSIONS - 1])
    assert tree(world.url / "manifests") == before


def test_publish_says_what_it_cost(world: World) -> None:
    line = text("publish", world.url, world.checkpoints[VERSIONS], "--mirror", world.url.parent / "mirror")
    assert re.fullmatch(rf"version {VERSIONS}  \d+\.\d+% changed  [\d.]+ kB  1 : [\d.]+  [\d.]+ s\n", line)


def test_pull_any_version_in_any_order(shared: World, tmp_path: Path) -> None:
    folder = tmp_path / "replica"
    for version in (3, 7, 0):
        assert facts("pull", shared.url, folder, "--version", version)["version"] == version
        assert holds(folder, shared.states[version])
    assert text("pull", shared.url, folder).startswith(f"version {VERSIONS - 1} ")
    assert text("pull", shared.url, folder) == f"version {VERSIONS - 1} is there already\n"
    assert facts("pull", shared.url, folder)["new"] is False


def test_pull_takes_over_a_checkpoint_of_a_version(shared: World, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(shared.checkpoints[8], tmp_path / "replica"))
    assert facts("pull", shared.url, folder)["bytes"] == objects(shared.url, "deltas")[8].stat().st_size
    assert holds(folder, shared.states[VERSIONS - 1])


def test_reference_uploads_no_weights(shared: World, tmp_path: Path) -> None:
    url = tmp_path / "channel"
    facts("init", url, shared.checkpoints[0], "--reference", "some/model@abc123")
    assert objects(url, "anchors") == []
    assert facts("show", url, 0)["reference"] == "some/model@abc123"
    assert facts("status", url)["references"] == {"0": "some/model@abc123"}
    done = run("pull", url, tmp_path / "replica")
    assert done.code == CHANNEL
    assert "Download some/model at abc123" in done.complaint
    shutil.copytree(shared.checkpoints[0], tmp_path / "replica", dirs_exist_ok=True)
    assert facts("pull", url, tmp_path / "replica")["version"] == 0


def test_exec_gets_the_version_in_its_environment(shared: World, tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "replica"
    command = RECORD.format(log=log)
    pulled = facts("pull", shared.url, folder, "--exec", command)
    assert log.read_text().split() == [str(VERSIONS - 1), "90", str(folder), pulled["digest"]]
    facts("pull", shared.url, folder, "--exec", command)
    assert log.read_text().count("\n") == 1, "nothing new, nothing run"


def test_exec_finds_the_files_at_the_version(shared: World, tmp_path: Path) -> None:
    folder = tmp_path / "replica"
    run("pull", shared.url, folder, "--version", 1)
    assert run("pull", shared.url, folder, "--exec", f"cp -r $WEIGHTCAST_FOLDER {tmp_path}/seen").code == 0
    assert holds(tmp_path / "seen", shared.states[VERSIONS - 1])


def test_failing_command_is_the_exit_code(shared: World, tmp_path: Path) -> None:
    done = run("pull", shared.url, tmp_path / "replica", "--exec", "exit 42")
    assert (done.code, done.err) == (42, "warning: the command ended with exit code 42\n")
    assert holds(tmp_path / "replica", shared.states[VERSIONS - 1])
    killed = run("pull", shared.url, tmp_path / "other", "--exec", "kill -9 $$")
    assert killed.code == 128 + 9


def test_output_of_the_command_does_not_mix_with_json(shared: World, tmp_path: Path) -> None:
    (done,) = at_once(("pull", shared.url, tmp_path / "replica", "--exec", "echo noise", "--json"))
    assert done.facts["version"] == VERSIONS - 1
    assert done.err == "noise\n"
