"""Reading a mirror that another process keeps: which version it is, with the log and without."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cases import same_bits
from mirrors import logged
from worlds import World, opened

import weightcast as wc
from weightcast.disk.checkpoint import MIRROR
from weightcast.errors import BusyError, CheckpointError, FormatError, UsageError
from weightcast.follow.mirror_reader import mirror_status, reading, reading_held


def log_of(world: World) -> list[Path]:
    return sorted((world.mirror / MIRROR / "log").iterdir())


def test_log_is_read_on_top_of_the_files(world: World) -> None:
    logged(world)
    channel = world.chain.channel
    with reading_held(world.mirror, channel.table, channel.id) as held:
        assert same_bits(held.files, world.states[2])
        assert same_bits(held.weights, world.states[4])
        assert held.files_at == world.chain.manifest(2).position
        assert held.log_at == held.position == world.chain.manifest(4).position
        assert held.fingerprint == wc.fingerprint(world.states[4])
        with opened(world, patience=0.01) as mirror, pytest.raises(BusyError):
            mirror.fold()
    status = mirror_status(world.mirror)
    assert status is not None
    assert (status.files_at.version, status.log_at, status.is_changing) == (2, 4, False)


def test_files_alone_are_read_without_the_log(world: World) -> None:
    logged(world)
    with reading(world.mirror) as files:
        assert same_bits(files, world.states[2])


def test_damaged_log_is_an_error_and_is_left_as_it_is(world: World) -> None:
    logged(world)
    last = log_of(world)[-1]
    last.write_bytes(last.read_bytes()[:20])
    before = log_of(world)
    with pytest.raises(FormatError), reading_held(world.mirror, world.chain.channel.table):
        pass
    assert log_of(world) == before


def test_patch_that_does_not_lead_on_is_ignored(world: World) -> None:
    logged(world)
    first, *_ = log_of(world)
    shutil.copy(first, first.with_name(first.name.replace("000000000-", "000000009-")))
    with reading_held(world.mirror, world.chain.channel.table) as held:
        assert held.position == world.chain.manifest(4).position


def test_mirror_of_another_channel_is_read_as_a_checkpoint(world: World) -> None:
    logged(world)
    with reading_held(world.mirror, world.chain.channel.table, "0" * 32) as held:
        assert (held.position, held.fingerprint) == (None, None)
        assert same_bits(held.weights, world.states[2])


def test_folder_that_is_not_a_mirror_is_a_checkpoint_to_one_reader_and_an_error_to_the_other(world: World) -> None:
    folder = world.checkpoint(3)
    with reading_held(folder, world.chain.channel.table) as held:
        assert held.position is None
        assert same_bits(held.weights, world.states[3])
    assert not (folder / MIRROR).exists()
    assert mirror_status(folder) is None
    with pytest.raises(CheckpointError, match="not a mirror"), reading(folder):
        pass


def test_folder_of_another_model_is_refused(world: World) -> None:
    table = wc.TensorTable.of([wc.TensorSpec("other", "BF16", (4,))], {})
    with (
        pytest.raises(UsageError, match=r"on one side only.*holds another model than the channel"),
        reading_held(world.checkpoint(3), table),
    ):
        pass
