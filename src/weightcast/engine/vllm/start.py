"""What vLLM loads when it starts: it takes no lock, and a mirror's files may change while it reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from weightcast.disk.checkpoint import Checkpoint
from weightcast.follow.mirror_folder import MirrorFolder
from weightcast_vllm import BEGAN

_SLACK = 2.0
"""Seconds by which a file system may date a change too early."""


@contextmanager
def settled(folder: Path, barrier: Callable[[], None], began: float = BEGAN) -> Iterator[bool]:
    """Whether the engine has to load the folder once more: it is a mirror, and was written since this process began.

    Its files do not change meanwhile: a fold is waited for, and a next one waits. ``barrier`` is where all workers wait
    for each other, so that they end at one version. `InterruptedApplyError` if a process was killed while it wrote.
    """
    place = MirrorFolder(folder)
    if not place.inner.is_dir():
        yield False
        return
    with place.shared(), Checkpoint(folder):
        yield any(_changed(path) > began - _SLACK for path in folder.glob("*.safetensors"))
        barrier()


def _changed(path: Path) -> float:
    """When it was written, or moved here."""
    status = path.stat()
    return max(status.st_mtime, status.st_ctime)
