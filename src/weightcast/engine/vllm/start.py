"""What vLLM loads when it starts: it takes no lock, and a mirror's files may change while it reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import weightcast_vllm
from weightcast.disk.checkpoint import Checkpoint
from weightcast.follow.mirror_folder import MirrorFolder

_SLACK = 0.1
"""Seconds by which a change may be dated too early: the clock of files goes by the kernel's ticks."""


@contextmanager
def settled(folder: Path, barrier: Callable[[], None], began: float | None = None) -> Iterator[bool]:
    """Whether the engine has to load the folder once more: it is a mirror, and was written since this process began.

    Its files do not change meanwhile: a fold is waited for, and a next one waits. ``barrier`` is where all workers wait
    for each other, so that they end at one version. `InterruptedApplyError` if a process was killed while it wrote.
    """
    place, since = MirrorFolder(folder), (weightcast_vllm.BEGAN if began is None else began) - _SLACK
    if not place.inner.is_dir():
        yield False
        return
    with place.shared(), Checkpoint(folder):
        yield any(_changed(path) > since for path in folder.glob("*.safetensors"))
        barrier()


def _changed(path: Path) -> float:
    """When it was written, or moved here."""
    status = path.stat()
    return max(status.st_mtime, status.st_ctime)
