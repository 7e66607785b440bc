"""`diff`, `apply`, `inspect` and `digest` when something is wrong: the exit code, one line, nothing changed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from cli_world import refused, run
from commands import at_once, weightcast
from offline_pairs import Pair, contents, read, same, states, write_sharded, write_single

from weightcast.cli.outputs import replaced
from weightcast.disk.checkpoint import INDEX, redo_path

HEXADECIMAL = re.compile("[0-9a-f]{64}")
USAGE, MISMATCH, FORMAT, CHECKPOINT, INTERRUPTED = 2, 3, 4, 5, 6


def test_wrong_base(single: Pair, target: Path) -> None:
    weights = states()[0]
    weights["model.norm.weight"][0] = 2
    write_single(target, weights)
    before = contents(target.parent)
    apply = ("apply", single.patch, target)
    done, copied, stands = at_once(apply, (*apply, "-o", target.parent / "out"), ("digest", target, "--json"))
    told = weightcast(*apply, "--json")
    assert (done.code, told.code, copied.code) == (MISMATCH, MISMATCH, MISMATCH)
    assert "the patch begins at" in done.complaint
    assert "use a patch that was made from these weights" in done.complaint
    assert copied.complaint == done.complaint
    assert told.error["kind"] == "BaseError"
    assert (told.error["expected"], told.error["found"]) == (single.made.facts["base"], stands.facts["digest"])
    assert told.error["hint"] in told.error["text"]
    assert contents(target.parent) == before


def test_truncated_patch(single: Pair, target: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.patch"
    cut.write_bytes(single.patch.read_bytes()[:-1])
    before = contents(target.parent)
    told = weightcast("apply", cut, target, "--json")
    runs = at_once(("apply", cut, target), ("apply", cut, target, "-o", target.parent / "out"), ("inspect", cut))
    assert [done.code for done in (told, *runs)] == [FORMAT] * 4
    assert all(str(cut) in done.complaint for done in runs)
    assert (told.error["kind"], told.error["file"]) == ("FormatError", str(cut))
    assert contents(target.parent) == before


def test_patch_of_a_later_format(single: Pair, target: Path, tmp_path: Path) -> None:
    later = tmp_path / "later.patch"
    later.write_bytes(single.patch.read_bytes().replace(b'\\"format\\":1', b'\\"format\\":2'))
    told = weightcast("apply", later, target, "--json")
    assert (told.code, told.error["kind"]) == (FORMAT, "VersionError")
    assert "newer" in told.error["hint"]


def test_missing_file(single: Pair, target: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    told, *runs = at_once(
        ("digest", gone, "--json"),
        ("diff", gone, single.new, "-o", tmp_path / "x"),
        ("diff", single.old, gone, "-o", tmp_path / "x"),
        ("apply", gone, target),
        ("apply", single.patch, gone),
        ("inspect", gone),
    )
    assert [done.code for done in (told, *runs)] == [CHECKPOINT] * 6
    assert all(str(gone) in done.complaint for done in runs)
    assert (told.error["kind"], told.error["file"]) == ("CheckpointError", str(gone))
    assert not (tmp_path / "x").exists()


def test_existing_output_stays_unless_forced(single: Pair, sharded: Pair, tmp_path: Path) -> None:
    """`diff -o` and `apply -o` alike."""
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    before = contents(tmp_path)
    outs = tmp_path / "file", tmp_path / "folder"
    commands = [("apply", pair.patch, pair.old, "-o", out) for pair in (single, sharded) for out in outs]
    commands += [("diff", single.old, single.new, "-o", out) for out in outs]
    for command, done in zip(commands, at_once(*commands), strict=True):
        assert done.code == USAGE
        assert "exists already" in done.complaint
        assert "--force" in done.complaint
        assert str(command[-1]) in done.complaint
    assert contents(tmp_path) == before


def test_forced_output_replaces_a_file(single: Pair, tmp_path: Path) -> None:
    patch, out = tmp_path / "patch", tmp_path / "out.safetensors"
    for path in (patch, out):
        path.write_text("old")
    commands = (
        ("diff", single.old, single.new, "-o", patch, "--force"),
        ("apply", single.patch, single.old, "-o", out),
    )
    made, copied = at_once(commands[0], (*commands[1], "--force"))
    assert (made.code, copied.code) == (0, 0)
    assert patch.read_bytes() == single.patch.read_bytes()
    assert same(read(out), states()[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "patch"]


def test_forced_output_replaces_a_checkpoint_folder_and_no_other(sharded: Pair, tmp_path: Path) -> None:
    write_sharded(tmp_path / "out", states()[0])
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("train")
    apply = ("apply", sharded.patch, sharded.old, "--force", "-o")
    done, kept = at_once((*apply, tmp_path / "out"), (*apply, tmp_path / "notes"))
    assert done.code == 0
    assert same(read(tmp_path / "out"), states()[1])
    assert kept.code == USAGE
    assert "not a file or a checkpoint folder" in kept.complaint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "out"]


def test_force_replaces_its_own_earlier_output(sharded: Pair, tmp_path: Path) -> None:
    target = Path(shutil.copytree(sharded.old, tmp_path / "target"))
    (target / "modeling.py").write_text("code")
    for _ in range(2):
        assert run("apply", sharded.patch, target, "-o", tmp_path / "out", "--force").code == 0
    assert same(read(tmp_path / "out"), states()[1])


@pytest.mark.parametrize("name", ["thesis.tex", ".git/HEAD", "runs/log.txt", "optimizer.pt", "step.safetensors"])
def test_force_does_not_replace_a_folder_that_holds_more_than_a_checkpoint(
    single: Pair, tmp_path: Path, name: str
) -> None:
    out = tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    write_single(out / "model.safetensors", states()[0])
    (out / name).write_text("precious")
    line = refused(tmp_path, USAGE, "apply", single.patch, single.old, "-o", out, "--force")
    assert f"(file {out / name})" in line


def test_force_does_not_replace_a_folder_of_patches(single: Pair, tmp_path: Path) -> None:
    shutil.copy(single.patch, tmp_path / "step.safetensors")
    line = refused(tmp_path, USAGE, "apply", single.patch, single.old, "-o", tmp_path, "--force")
    assert "not a file or a checkpoint folder" in line


@pytest.mark.parametrize("inside", ["patch", "target"])
def test_force_does_not_replace_a_folder_that_holds_an_input(single: Pair, tmp_path: Path, inside: str) -> None:
    write_single(tmp_path / "model.safetensors", states()[1])
    inputs = {"patch": single.patch, "target": single.old}
    inputs[inside] = Path(shutil.copy(inputs[inside], tmp_path / "input.txt"))
    line = refused(tmp_path, USAGE, "apply", inputs["patch"], inputs["target"], "-o", tmp_path, "--force")
    assert "what it is made from" in line


def test_failed_apply_leaves_what_force_would_replace(single: Pair, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    out.write_text("precious")
    done = weightcast("apply", single.patch, single.new, "-o", out, "--force")
    again = weightcast("apply", single.patch, tmp_path / "gone", "-o", out, "--force")
    assert (done.code, again.code) == (0, CHECKPOINT)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    assert same(read(out), states()[1])


def test_interrupt_between_the_renames_leaves_what_force_would_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rename = tmp_path / "out", Path.rename

    def write(folder: Path, text: str) -> None:
        folder.mkdir()
        (folder / "file").write_text(text)

    def interrupted(self: Path, to: Path) -> Path:
        if to == out and self.name.endswith(".new"):
            raise KeyboardInterrupt
        return rename(self, to)

    write(out, "old")
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replaced(out, lambda new: write(new, "new"))
    assert contents(tmp_path) == {"out/file": b"old"}


def test_force_does_not_replace_the_inputs(single: Pair, target: Path) -> None:
    before = contents(target.parent)
    done = weightcast("apply", single.patch, target, "-o", target, "--force")
    assert done.code == USAGE
    assert "what it is made from" in done.complaint
    assert contents(target.parent) == before


def test_diff_does_not_write_over_what_it_reads(single: Pair, tmp_path: Path) -> None:
    old, new = (Path(shutil.copy(path, tmp_path)) for path in (single.old, single.new))
    before = contents(tmp_path)
    assert [weightcast("diff", old, new, "-o", out).code for out in (old, new)] == [USAGE, USAGE]
    assert contents(tmp_path) == before


def test_output_in_a_missing_folder_is_an_error(single: Pair, tmp_path: Path) -> None:
    done = weightcast("diff", single.old, single.new, "-o", tmp_path / "gone" / "patch")
    assert done.code != 0
    assert "gone" in done.complaint


UNWRITABLE = Path("/sys")
"""Where not even root may make files."""


@pytest.mark.skipif(not UNWRITABLE.is_dir(), reason="no such folder on this system")
def test_place_without_write_permission_is_an_error(single: Pair) -> None:
    """The error names the place the user gave, not a temporary file, and the remedy."""
    out = UNWRITABLE / "weightcast-out"
    commands = (("diff", single.old, single.new, "-o", out), ("apply", single.patch, single.old, "-o", out))
    for done in at_once(*commands):
        assert done.code == USAGE
        assert "nothing can be written there: " in done.complaint
        assert f"(file {out})" in done.complaint
        assert "name another place" in done.complaint or "Name a place" in done.complaint
    (told,) = at_once((*commands[0], "--json"))
    assert (told.code, told.error["file"]) == (USAGE, str(out))
    assert told.error["hint"] in told.error["text"]


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    done = weightcast("inspect", tmp_path / "config.json")
    assert done.code == FORMAT
    assert "not a safetensors file" in done.complaint


def test_unknown_codec(single: Pair, tmp_path: Path) -> None:
    done = weightcast("diff", single.old, single.new, "-o", tmp_path / "patch", "--codec", "zstd")
    assert (done.code, done.out) == (USAGE, "")
    assert all(codec in done.err for codec in ("zstd", "plain", "gap", "banded"))
    assert not (tmp_path / "patch").exists()


def test_checkpoint_where_a_patch_should_be(single: Pair, target: Path) -> None:
    before = contents(target.parent)
    for done in at_once(("apply", single.new, target), ("inspect", single.new)):
        assert done.code == FORMAT
        assert "not a weightcast patch" in done.complaint
        assert "checkpoint" in done.complaint
    assert contents(target.parent) == before


def test_patch_where_a_checkpoint_should_be(single: Pair, tmp_path: Path) -> None:
    done = weightcast("diff", single.old, single.patch, "-o", tmp_path / "x")
    assert done.code == USAGE
    assert "on one side only" in done.complaint


def test_tables_that_differ(single: Pair, tmp_path: Path) -> None:
    missing, reshaped = states()[1], states()[1]
    del missing["model.norm.weight"]
    reshaped["lm_head.weight"] = reshaped["lm_head.weight"].reshape(32, 64)
    cases = {"model.norm.weight": missing, "lm_head.weight": reshaped}
    for tensor, weights in cases.items():
        write_single(tmp_path / tensor, weights)
    commands = [("diff", single.old, tmp_path / tensor, "-o", tmp_path / "x", "--json") for tensor in cases]
    for tensor, told in zip(cases, at_once(*commands), strict=True):
        assert (told.code, told.error["kind"], told.error["tensor"]) == (USAGE, "UsageError", tensor)
        assert told.error["hint"] in told.error["text"]
    assert not (tmp_path / "x").exists()


def test_broken_checkpoint_folder(single: Pair, tmp_path: Path) -> None:
    write_sharded(tmp_path / "folder", states()[0])
    index = json.loads((tmp_path / "folder" / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "../x.safetensors"
    (tmp_path / "folder" / INDEX).write_text(json.dumps(index))
    told = weightcast("apply", single.patch, tmp_path / "folder", "--json")
    assert told.code == CHECKPOINT
    assert told.error["tensor"] == "lm_head.weight"
    assert told.error["file"] == str(tmp_path / "folder" / INDEX)


def test_wrong_arguments() -> None:
    for done in at_once(("nonsense",), ("diff",), ("diff", "a", "b"), ("apply", "a"), ("digest", "--frob", "a")):
        assert (done.code, done.out) == (USAGE, "")
        assert done.err


def test_interrupted_apply(single: Pair, target: Path) -> None:
    """What a kill leaves behind is a plain patch beside the weights."""
    weightcast("diff", single.old, single.new, "-o", redo_path(target), "--codec", "plain")
    done = weightcast("digest", target)
    assert done.code == INTERRUPTED
    assert f"weightcast apply --resume {target}" in done.complaint
    facts = weightcast("apply", "--resume", target, "--json").facts
    assert facts["digest"] == single.made.facts["result"]
    assert same(read(target), states()[1])
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    assert weightcast("apply", "--resume", target, "--json").facts == {
        "target": str(target),
        "digest": None,
        "changed": False,
    }
