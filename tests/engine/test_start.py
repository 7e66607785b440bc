"""A mirror that vLLM starts from: what changed while it was read is read again, and then nothing changes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from local_engine import Training, saved  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.engine.vllm.start import settled  # noqa: E402
from weightcast.errors import BusyError, InterruptedApplyError  # noqa: E402
from weightcast.follow.mirror_folder import MirrorFolder  # noqa: E402


@pytest.fixture
def mirror(training: Training, tmp_path: Path) -> Path:
    """Its files were written long ago."""
    with wc.Subscriber(training.url, tmp_path / "mirror") as following:
        following.sync()
    return tmp_path / "mirror"


def nothing() -> None:
    """There is one worker."""


def test_mirror_that_was_written_since_the_process_began_is_read_again(mirror: Path, tmp_path: Path) -> None:
    with settled(mirror, nothing) as has_changed:
        assert has_changed


def test_mirror_that_nobody_wrote_is_not_read_again(mirror: Path) -> None:
    with settled(mirror, nothing, began=time.time() + 60) as has_changed:
        assert not has_changed


def test_process_that_was_forked_begins_anew() -> None:
    """One that starts an engine may come from one that has lived for long."""
    code = (
        "import os, sys, weightcast_vllm as plugin\n"
        "before = plugin.BEGAN\n"
        "child = os.fork()\n"
        "if not child: os._exit(plugin.BEGAN <= before)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or plugin.BEGAN != before)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_files_that_are_moved_in_count_as_written(mirror: Path) -> None:
    """As those of an anchor, which were downloaded before."""
    for path in mirror.glob("*.safetensors"):
        os.utime(path, (0, 0))
    with settled(mirror, nothing) as has_changed:
        assert has_changed


def test_files_do_not_change_before_all_workers_have_read_them(mirror: Path) -> None:
    place, refused = MirrorFolder(mirror), []

    def barrier() -> None:
        with pytest.raises(BusyError), place.shut(patience=0):
            pass
        refused.append(True)

    with settled(mirror, barrier), pytest.raises(BusyError), place.shut(patience=0):
        pass
    assert refused
    with place.shut(patience=0):
        pass


def test_mirror_that_a_killed_process_has_half_changed_is_not_loaded(mirror: Path) -> None:
    MirrorFolder(mirror).mark()
    with pytest.raises(InterruptedApplyError, match="half changed"), settled(mirror, nothing):
        pass


def test_folder_that_is_no_mirror_is_left_alone(training: Training, tmp_path: Path) -> None:
    for folder in (saved(training.weights, tmp_path / "checkpoint"), tmp_path / "a model of the Hub"):
        with settled(folder, nothing) as has_changed:
            assert not has_changed
