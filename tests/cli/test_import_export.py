"""`weightcast import` and `weightcast export`."""

from __future__ import annotations

from pathlib import Path

from cli_world import USAGE, facts, run, text, tree
from foreign import content, read_history, read_slime, read_trl, states, write_history, write_slime, write_trl


def test_history_goes_in_and_every_step_comes_out(tmp_path: Path) -> None:
    made = dict(zip((10, 20, 30), states(3), strict=True))
    folder = write_history(tmp_path / "run", made)
    told = run("import", tmp_path / "channel", folder, "--json").facts
    assert (told["layout"], told["steps"], told["new"]) == ("history", 3, 3)
    assert told["versions"] == {"10": 0, "20": 1, "30": 2}
    assert told["left_out"] == ["optimizer.pt", "trainer_state.json"]
    assert facts("export", tmp_path / "channel", tmp_path / "out")["versions"][1]["name"] == "checkpoint-20"
    assert read_history(tmp_path / "out") == {step: content(state) for step, state in made.items()}


def test_second_import_says_what_was_there(tmp_path: Path) -> None:
    made = dict(enumerate(states(3), 1))
    folder = write_history(tmp_path / "run", {1: made[1], 2: made[2]})
    assert run("import", tmp_path / "channel", folder).code == 0
    write_history(folder, {3: made[3]})
    (folder / "checkpoint-3/config.json").write_text("{}")
    done = run("import", tmp_path / "channel", folder)
    assert "version 2      step 3" in done.out
    assert "3 steps, 2 of them there already" in done.out
    assert "1 step had other small files than the first, whose are kept: config.json" in done.err


def test_one_step_comes_out_alone(tmp_path: Path) -> None:
    made = dict(enumerate(states(3), 1))
    assert run("import", tmp_path / "channel", write_history(tmp_path / "run", made)).code == 0
    assert "1 step in" in text("export", tmp_path / "channel", tmp_path / "out", "--step", 2)
    assert read_history(tmp_path / "out") == {2: content(made[2])}


def test_history_goes_into_a_signed_channel_and_comes_out_for_who_trusts_its_root(tmp_path: Path) -> None:
    made = dict(zip((10, 20), states(2), strict=True))
    folder, channel = write_history(tmp_path / "run", made), tmp_path / "channel"
    root, writer = tmp_path / "root.key", tmp_path / "writer.key"
    trusted = [facts("key", "new", path)["public"] for path in (root, writer)]
    begun = ("--step", 10, "--sign", root)
    assert run("init", channel, folder / "checkpoint-10", *begun).code == 0
    assert run("key", "add", channel, trusted[1], "--role", "writer", "--sign", root).code == 0
    signed = ("--sign", writer, "--trust", trusted[0], "--mirror", tmp_path / "mirror")
    assert run("import", channel, folder).code != 0, "an unsigned version would be one that nobody takes"
    assert facts("import", channel, folder, *signed)["new"] == 1
    assert run("export", channel, tmp_path / "out", "--trust", trusted[0]).code == 0
    assert read_history(tmp_path / "out") == {step: content(state) for step, state in made.items()}
    assert run("export", channel, tmp_path / "other", "--trust", trusted[1]).code != 0


def test_layouts_of_other_systems_go_in_and_out(tmp_path: Path) -> None:
    made = states(4)
    slime = write_slime(tmp_path / "slime", made)
    assert facts("import", tmp_path / "a", slime, "--base", tmp_path / "slime-base")["layout"] == "slime"
    assert facts("export", tmp_path / "a", tmp_path / "trl", "--to", "trl")["layout"] == "trl"
    assert list(read_trl(tmp_path / "trl").values()) == [content(state) for state in made]
    assert facts("import", tmp_path / "b", tmp_path / "trl", "--from", "trl")["layout"] == "trl"
    options = ("--to", "slime", "--encoding", "overwrite", "--checksum", "adler32")
    assert run("export", tmp_path / "b", tmp_path / "out", *options).code == 0
    assert list(read_slime(tmp_path / "out").values()) == [content(state) for state in made]


def test_refusals_name_the_remedy_and_write_nothing(tmp_path: Path) -> None:
    folder = write_trl(tmp_path / "run", states(2))
    (folder / "anchors/step_000001.safetensors").unlink()
    before = tree(tmp_path)
    complaints = [
        run("import", tmp_path / "channel", folder).complaint,
        run("import", tmp_path / "channel", folder, "--from", "slime").complaint,
        run("import", tmp_path / "channel", tmp_path / "nothing").complaint,
        run("export", tmp_path / "channel", tmp_path / "out").complaint,
    ]
    assert "there is no anchor before it" in complaints[0]
    assert "no steps of slime in the folder" in complaints[1]
    assert "there is no such folder" in complaints[2]
    assert "no channel here" in complaints[3]
    assert run("import", tmp_path / "channel", folder, "--from", "nemo").code == USAGE
    assert tree(tmp_path) == before
