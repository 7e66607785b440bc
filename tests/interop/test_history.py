"""A folder of checkpoints as a channel: every step recreated, what is there compared, what is missing added."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from foreign import content, read_history, states, write_history
from importing import bring, holds, manifests, refuses, write_out
from safetensors.numpy import save_file
from simple_channel import Channel

import weightcast as wc
from weightcast.errors import CheckpointError, ConflictError, FormatError, ResultError, UsageError
from weightcast.interop.importing import import_steps
from weightcast.interop.layouts import opened
from weightcast.publish.from_checkpoint import publish
from weightcast.store import open_store


def test_every_step_becomes_a_version_with_its_digest(tmp_path: Path) -> None:
    made = dict(zip((10, 20, 100), states(3), strict=True))
    done = bring(tmp_path / "channel", write_history(tmp_path / "run", made))
    assert [(one.step, one.new) for one in done] == [(10, True), (20, True), (100, True)]
    assert holds(tmp_path / "channel", made)


def test_every_step_is_exported_with_the_bytes_of_its_file(tmp_path: Path) -> None:
    made = dict(zip((10, 20, 30, 40), states(4), strict=True))
    folder = write_history(tmp_path / "run", made)
    bring(tmp_path / "channel", folder)
    write_out(tmp_path / "channel", tmp_path / "out", "history")
    assert read_history(tmp_path / "out") == {step: content(state) for step, state in made.items()}
    for step in made:
        there, here = (root / f"checkpoint-{step}/model.safetensors" for root in (folder, tmp_path / "out"))
        assert there.read_bytes() == here.read_bytes()
        assert sorted(path.name for path in here.parent.iterdir()) == ["config.json", "model.safetensors"]


def test_one_step_is_exported_alone(tmp_path: Path) -> None:
    made = dict(zip((10, 20, 30), states(3), strict=True))
    bring(tmp_path / "channel", write_history(tmp_path / "run", made))
    write_out(tmp_path / "channel", tmp_path / "out", "history", step=20)
    assert read_history(tmp_path / "out") == {20: content(made[20])}
    with pytest.raises(UsageError, match="no version of step 25"):
        write_out(tmp_path / "channel", tmp_path / "other", "history", step=25)


def test_any_version_is_pulled_as_ever(tmp_path: Path) -> None:
    made = states(3)
    bring(tmp_path / "channel", write_history(tmp_path / "run", dict(enumerate(made))))
    with wc.Subscriber(tmp_path / "channel", tmp_path / "replica", wc.Pinned(1)) as subscriber:
        subscriber.sync()
    assert read_history_of(tmp_path / "replica") == content(made[1])


def read_history_of(folder: Path) -> dict[str, bytes]:
    shutil.copytree(folder, folder.with_name("alone") / "checkpoint-0")
    return read_history(folder.with_name("alone"))[0]


def test_second_import_adds_what_is_new_and_nothing_else(tmp_path: Path) -> None:
    made = dict(enumerate(states(5), 1))
    folder = write_history(tmp_path / "run", {step: made[step] for step in (1, 2, 3)})
    bring(tmp_path / "channel", folder)
    assert not any(one.new for one in bring(tmp_path / "channel", folder))
    write_history(folder, {step: made[step] for step in (4, 5)})
    shutil.rmtree(tmp_path / "channel-mirror")  # of another machine, or a cache that was emptied
    assert [one.step for one in bring(tmp_path / "channel", folder) if one.new] == [4, 5]
    assert holds(tmp_path / "channel", made)


def test_step_without_a_change_is_a_version_of_its_own(tmp_path: Path) -> None:
    first, second = states(2)
    made = {1: first, 2: first, 3: second, 4: first}
    folder = write_history(tmp_path / "run", made)
    bring(tmp_path / "channel", folder)
    assert holds(tmp_path / "channel", made)
    assert not any(one.new for one in bring(tmp_path / "channel", folder))
    write_out(tmp_path / "channel", tmp_path / "out", "history")
    assert read_history(tmp_path / "out") == {step: content(state) for step, state in made.items()}


def test_reader_written_from_the_spec_follows_an_imported_channel(tmp_path: Path) -> None:
    made = states(2)
    bring(tmp_path / "channel", write_history(tmp_path / "run", {1: made[0], 2: made[0], 3: made[1]}))
    channel = Channel(tmp_path / "channel")
    weights = channel.anchor(0)
    for version in (0, 1):
        weights = channel.step(weights, version)
    assert channel.head() == 2


@pytest.mark.parametrize("density", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("size", [20, 5000, 300_000])
def test_version_is_never_larger_than_its_checkpoint(density: float, size: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(size)
    old = rng.integers(0, 1 << 16, size).astype("<u2")
    new = np.where(rng.random(size) < density, rng.integers(0, 1 << 16, size), old).astype("<u2")
    folder = write_history(tmp_path / "run", {1: {"w": old}, 2: {"w": new}})
    done = bring(tmp_path / "channel", folder)
    files = [folder / "checkpoint-2" / name for name in ("model.safetensors", "config.json")]
    assert done[1].nbytes <= sum(path.stat().st_size for path in files)
    write_out(tmp_path / "channel", tmp_path / "out", "history")
    assert read_history(tmp_path / "out")[2] == {"w": new.tobytes()}


def test_files_that_differ_from_the_first_steps_are_named(tmp_path: Path) -> None:
    folder = write_history(tmp_path / "run", dict(enumerate(states(3), 1)))
    (folder / "checkpoint-2/config.json").write_text('{"model_type": "other"}')
    (folder / "checkpoint-3/tokenizer.json").write_text("{}")
    done = bring(tmp_path / "channel", folder)
    assert [one.other_files for one in done] == [(), ("config.json",), ("tokenizer.json",)]


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_step_that_is_there_with_other_bits_is_refused_by_name(tmp_path: Path) -> None:
    made = states(4)
    folder = write_history(tmp_path / "run", dict(enumerate(made[:3], 1)))
    bring(tmp_path / "channel", folder)
    save_file(made[3], folder / "checkpoint-2/model.safetensors")
    refuses(tmp_path / "channel", ResultError, "step 2 is in the channel with other weights, as version 1", folder)


def test_step_between_others_is_refused(tmp_path: Path) -> None:
    made = states(3)
    folder = write_history(tmp_path / "run", {10: made[0], 30: made[2]})
    bring(tmp_path / "channel", folder)
    write_history(folder, {20: made[1]})
    refuses(tmp_path / "channel", UsageError, "step 20 is not in the channel, which is at step 30", folder)


def test_channel_whose_head_has_no_step_is_refused(tmp_path: Path) -> None:
    made = states(2)
    folder = write_history(tmp_path / "run", {1: made[0]})
    wc.init(tmp_path / "channel", folder / "checkpoint-1")
    refuses(tmp_path / "channel", UsageError, "newest version, 0, has no step", folder)


def test_checkpoint_of_another_model_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = write_history(tmp_path / "run", dict(enumerate(states(3), 1)))
    (folder / "checkpoint-3/model.safetensors").unlink()
    save_file({"other": np.zeros(3, np.float32)}, folder / "checkpoint-3/model.safetensors")
    refuses(tmp_path / "channel", UsageError, r"checkpoint-3.*tensor model.embed|is on one side only", folder)


def test_checkpoint_that_ends_too_early_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = write_history(tmp_path / "run", dict(enumerate(states(3), 1)))
    path = folder / "checkpoint-3/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refuses(tmp_path / "channel", FormatError, "bytes of data.*checkpoint-3", folder)


def test_checkpoint_without_safetensors_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_history(tmp_path / "run", dict(enumerate(states(2), 1)))
    (folder / "checkpoint-2/model.safetensors").rename(folder / "checkpoint-2/pytorch_model.bin")
    refuses(tmp_path / "channel", CheckpointError, "no safetensors files.*checkpoint-2", folder)


def test_two_folders_of_one_step_are_refused(tmp_path: Path) -> None:
    folder = write_history(tmp_path / "run", dict(enumerate(states(2), 1)))
    shutil.copytree(folder / "checkpoint-2", folder / "checkpoint-02")
    refuses(tmp_path / "channel", UsageError, "is of the same step", folder)


def test_folder_of_no_layout_or_of_two_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    refuses(tmp_path / "channel", UsageError, "no steps in the folder.*checkpoint-10/", tmp_path / "run")
    folder = write_history(tmp_path / "run", dict(enumerate(states(2), 1)))
    (folder / "weight_v000001").mkdir()
    refuses(tmp_path / "channel", UsageError, "several layouts: history, slime", folder)


def test_export_into_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    bring(tmp_path / "channel", write_history(tmp_path / "run", dict(enumerate(states(2), 1))))
    with pytest.raises(UsageError, match="not empty"):
        write_out(tmp_path / "channel", tmp_path / "run", "history")
    assert len(manifests(tmp_path / "channel")) == 2


def test_collected_steps_are_passed_over(tmp_path: Path) -> None:
    """After `gc` the oldest versions are gone, and the folder still has their steps."""
    made = dict(enumerate(states(4), 1))
    folder = write_history(tmp_path / "run", {step: made[step] for step in (1, 2, 3)})
    bring(tmp_path / "channel", folder)
    (tmp_path / "channel/manifests/000000000000.json").unlink()
    write_history(folder, {4: made[4]})
    done = bring(tmp_path / "channel", folder)
    assert (done[0].step, done[0].manifest, done[0].new) == (1, None, False)
    assert [one.step for one in done if one.new] == [4]


def test_sharded_checkpoints_are_recreated_in_their_shards(tmp_path: Path) -> None:
    made = states(2)
    for step, state in enumerate(made, 1):
        folder = tmp_path / f"run/checkpoint-{step}"
        folder.mkdir(parents=True)
        files = {name: f"model-{i:05d}-of-00003.safetensors" for i, name in enumerate(state, 1)}
        for name, file in files.items():
            save_file({name: state[name]}, folder / file)
        index = {"metadata": {}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    bring(tmp_path / "channel", tmp_path / "run")
    write_out(tmp_path / "channel", tmp_path / "out", "history")
    for step in (1, 2):
        there, here = (tmp_path / root / f"checkpoint-{step}" for root in ("run", "out"))
        assert {p.name: p.read_bytes() for p in there.iterdir()} == {p.name: p.read_bytes() for p in here.iterdir()}


def test_history_of_adapters_is_recreated_with_their_configuration(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    name = "base_model.model.layers.0.q_proj.lora_A.weight"
    for step in (1, 2, 3):
        folder = tmp_path / f"run/checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({name: rng.standard_normal((8, 64)).astype(np.float32)}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    bring(tmp_path / "channel", tmp_path / "run")
    write_out(tmp_path / "channel", tmp_path / "out", "history")
    for step in (1, 2, 3):
        there, here = (tmp_path / root / f"checkpoint-{step}" for root in ("run", "out"))
        assert {p.name: p.read_bytes() for p in there.iterdir()} == {p.name: p.read_bytes() for p in here.iterdir()}


def test_another_writer_in_the_middle_ends_the_import(tmp_path: Path) -> None:
    made = dict(enumerate(states(5), 1))
    folder = write_history(tmp_path / "run", {step: made[step] for step in (1, 2, 3)})
    other = write_history(tmp_path / "other", {9: made[5]}) / "checkpoint-9"
    source, url = opened(folder), tmp_path / "channel"
    (tmp_path / "room").mkdir()
    steps = import_steps(open_store(url), source, tmp_path / "room", tmp_path / "mirror")
    assert [next(steps).step, next(steps).step] == [1, 2]
    publish(url, other, tmp_path / "of-the-other", step=9)
    with pytest.raises(ConflictError, match="another writer committed version 2"):
        next(steps)
    assert list(manifests(url)) == [1, 2, 9]
