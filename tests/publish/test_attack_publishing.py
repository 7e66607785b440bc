"""Publishing under attack by chance: files that change underfoot, twins of a writer, uploads that a collector meets."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scripted_store import ScriptedStore

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import ANCHORS, CHANNEL, CHANNEL_COPY, MANIFESTS, RECORD, anchor_folder
from weightcast.disk.checkpoint import SINGLE, Checkpoint, save
from weightcast.errors import ChannelError, CheckpointError, ConflictError, FormatError, UsageError
from weightcast.follow.mirror import Mirror
from weightcast.follow.mirror_folder import cache_folder, default_mirror
from weightcast.publish import from_checkpoint as folders
from weightcast.store import open_store
from weightcast.store.download import mark_of
from weightcast.store.memory import MemoryStore
from weightcast.upkeep.repair import repair


def weights(step: float) -> wc.Arrays:
    return wc.Arrays({name: np.full(1000, step, np.float32) for name in ("a", "b")})


def saved(folder: Path, step: float) -> Path:
    folder.mkdir()
    save(weights(step), folder)
    (folder / "config.json").write_text(f'{{"step": {step}}}')
    return folder


def written_over(folder: Path, step: float) -> None:
    """The next save into the same file: same inode, same size."""
    with (folder / SINGLE).open("r+b") as file:
        file.write(_bytes_of(folder, step))


def replaced(folder: Path, step: float) -> None:
    """The next save by rename: another inode, same size."""
    (folder / "new").write_bytes(_bytes_of(folder, step))
    (folder / "new").rename(folder / SINGLE)


def reconfigured(folder: Path, step: float) -> None:
    """The next save begins with the configuration."""
    (folder / "config.json").write_text(f'{{"step": {step}}}')


def _bytes_of(folder: Path, step: float) -> bytes:
    other = folder.with_name("other")
    shutil.rmtree(other, ignore_errors=True)
    return (saved(other, step) / SINGLE).read_bytes()


def once(stage: str, act: Callable[[], None]) -> Callable[[str, int, int], None]:
    """A report that acts the first time a stage is reported."""
    done: list[bool] = []

    def report(now: str, at: int, total: int) -> None:
        if now == stage and not done:
            done.append(True)
            act()

    return report


# -- a checkpoint that is saved again while it is published ------------------------------------------------------------


@pytest.mark.parametrize("save_again", [written_over, replaced])
def test_checkpoint_saved_again_during_publish_is_not_committed(
    save_again: Callable[[Path, float], None], tmp_path: Path
) -> None:
    folder, bucket = saved(tmp_path / "checkpoint", 0), str(tmp_path / "bucket")
    wc.init(bucket, folder)
    written_over(folder, 1)
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        folders.publish(bucket, folder, tmp_path / "mirror", report=once("diff", lambda: save_again(folder, 2)))
    assert list(Chain.open(open_store(bucket)).versions()) == [0]
    assert folders.publish(bucket, folder, tmp_path / "mirror").manifest.position.version == 1
    state = weights(-1)
    with wc.Subscriber(bucket, state, threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
    assert {float(state.read(name).view(np.float32)[0]) for name in "ab"} == {2.0}


@pytest.mark.parametrize("save_again", [written_over, replaced, reconfigured])
@pytest.mark.parametrize("stage", ["verify", "upload"])
def test_checkpoint_saved_again_during_init_begins_no_channel(
    stage: str, save_again: Callable[[Path, float], None], tmp_path: Path
) -> None:
    folder, bucket = saved(tmp_path / "checkpoint", 0), str(tmp_path / "bucket")
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        wc.init(bucket, folder, report=once(stage, lambda: save_again(folder, 7)))
    assert Chain.open(open_store(bucket)).head() is None
    assert wc.init(bucket, folder).position.version == 0


@pytest.mark.parametrize("save_again", [written_over, replaced, reconfigured])
def test_checkpoint_saved_again_during_publish_of_an_anchor_is_not_committed(
    save_again: Callable[[Path, float], None], tmp_path: Path
) -> None:
    folder, bucket = saved(tmp_path / "checkpoint", 0), str(tmp_path / "bucket")
    wc.init(bucket, folder)
    written_over(folder, 1)
    report = once("verify", lambda: save_again(folder, 2))
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        folders.publish(bucket, folder, tmp_path / "mirror", anchor=True, report=report)
    chain = Chain.open(open_store(bucket))
    assert list(chain.versions()) == [0]
    assert [edge.result for edge in chain.anchor_edges()] == [0]


def test_file_deleted_during_a_read_is_reported(tmp_path: Path) -> None:
    with Checkpoint(saved(tmp_path / "checkpoint", 0)) as checkpoint:
        checkpoint.refuse_changed()
        (tmp_path / "checkpoint" / SINGLE).unlink()
        with pytest.raises(CheckpointError):
            checkpoint.refuse_changed()


# -- two processes that write under one name ---------------------------------------------------------------------------


@pytest.mark.parametrize("overwrites", [True, False])
def test_second_process_with_the_same_writer_name_gets_a_conflict(overwrites: bool) -> None:
    store = ScriptedStore()
    if overwrites:
        store.overwrite()
    wc.init(store, weights(0))
    one, two = weights(0), weights(0)
    with wc.Publisher(store, one, writer="run-42") as first:
        second = wc.Publisher(store, two, writer="run-42")
        one.read("a")[:] = weights(1).read("a")
        committed = first.publish(step=1).result(30)
        two.read("a")[:] = weights(2).read("a")
        with pytest.raises(ConflictError):
            second.publish(step=1).result(30)
        second.close()
    assert Chain.open(store).manifest(1) == committed
    assert len(list(store.list(MANIFESTS))) == 2


# -- an anchor upload that a collector meets ---------------------------------------------------------------------------


def test_resumed_upload_sends_files_again_that_a_collector_may_take(tmp_path: Path) -> None:
    folder, bucket = saved(tmp_path / "checkpoint", 0), tmp_path / "bucket"
    position = wc.init(str(bucket), folder).position
    chain, files = Chain.open(open_store(bucket)), {path.name: path for path in folder.iterdir()}
    place = anchor_folder(position, mark_of(files))
    (bucket / place / RECORD).unlink()  # as after a kill before the record
    old, young = time.time() - 3 * 86400, time.time() - 600
    os.utime(bucket / place / SINGLE, (old, old))
    os.utime(bucket / place / "config.json", (young, young))
    chain.put_anchor(position, files)
    assert (bucket / place / SINGLE).stat().st_mtime > old + 86400
    assert (bucket / place / "config.json").stat().st_mtime == pytest.approx(young, abs=1)


# -- the channel's own record ------------------------------------------------------------------------------------------


def test_any_flipped_bit_of_the_channels_record_is_found_and_can_be_repaired() -> None:
    store = MemoryStore("flipped")
    wc.init(store, weights(0))
    whole = store.get(CHANNEL)
    for at in range(0, 8 * len(whole), 5):
        flipped = bytearray(whole)
        flipped[at // 8] ^= 1 << at % 8
        store.put(CHANNEL, bytes(flipped))
        with pytest.raises(FormatError):
            Chain.open(store)
    assert repair(store) is not None
    assert store.get(CHANNEL) == whole
    assert repair(store) is None


@pytest.mark.parametrize("damage", [lambda whole: None, lambda whole: b"", lambda whole: whole[:100]])
def test_missing_or_truncated_record_is_repaired(damage: Callable[[bytes], bytes | None]) -> None:
    store = MemoryStore("truncated")
    wc.init(store, weights(0))
    whole = store.get(CHANNEL)
    store.delete(CHANNEL)
    if (left := damage(whole)) is not None:
        store.put(CHANNEL, left)
    with pytest.raises(FormatError, match="weightcast repair URL"):
        Chain.open(store)
    with pytest.raises(FormatError):
        wc.init(store, weights(0))  # it does not begin another channel over the versions of this one
    repair(store)
    assert store.get(CHANNEL) == whole


def test_record_of_another_channel_is_repaired_too() -> None:
    store, other = MemoryStore("ours"), MemoryStore("other")
    for one in (store, other):
        wc.init(one, weights(0))
    whole = store.get(CHANNEL)
    store.put(CHANNEL, other.get(CHANNEL))
    assert repair(store) is not None
    assert store.get(CHANNEL) == whole


def test_repair_takes_only_the_right_copy() -> None:
    store, other = MemoryStore("ours"), MemoryStore("other")
    for one in (store, other):
        wc.init(one, weights(0))
    copy = next(listed.key for listed in store.list(ANCHORS) if listed.key.endswith(CHANNEL_COPY))
    store.put(CHANNEL, b"")
    store.put(copy, other.get(CHANNEL))
    with pytest.raises(ChannelError, match="no anchor holds an intact copy"):
        repair(store)
    assert store.get(CHANNEL) == b""


def test_repair_without_a_channel_says_so() -> None:
    with pytest.raises(ChannelError, match="no channel to repair"):
        repair(MemoryStore("empty"))


@pytest.mark.parametrize("name", ["../../.ssh", "", "/etc", "a" * 31, "A" * 32, "0" * 32 + "\n", "0" * 33])
def test_default_mirror_stays_in_the_cache(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UsageError):
        default_mirror(name)
    assert default_mirror("0" * 32).parent == cache_folder() == tmp_path / "weightcast"


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_unknown_codec_is_refused_before_anything_is_published(tmp_path: Path) -> None:
    store = MemoryStore("codec")
    wc.init(store, weights(0))
    with pytest.raises(UsageError, match="no codec 'bandd'"):
        folders.publish(store, saved(tmp_path / "checkpoint", 1), tmp_path / "mirror", codec="bandd")


def test_cut_of_an_anchor_from_a_mirror_that_changes_is_refused(tmp_path: Path) -> None:
    folder, bucket = saved(tmp_path / "checkpoint", 0), str(tmp_path / "bucket")
    wc.init(bucket, folder)
    with wc.Subscriber(bucket, tmp_path / "mirror", threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        mirror = subscriber.mirror
        assert isinstance(mirror, Mirror)
        report = once("verify", lambda: written_over(tmp_path / "mirror", 9))
        with pytest.raises(wc.WeightcastError):
            folders.cut_anchor(subscriber.chain, mirror, report)
    assert len(Chain.open(open_store(bucket)).anchor_edges()) == 1
