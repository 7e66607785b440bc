"""What workers cannot decode of a route: decoded on the host for those tensors alone, against a mirror's weights."""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import ExitStack
from pathlib import Path

from weightcast.disk.durable import discard
from weightcast.disk.staged import Overlay, stage
from weightcast.format.digest import Fingerprint
from weightcast.format.joined import JoinedPatch, open_objects
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import FileSource, ReopenedSource
from weightcast.format.tensors import Weights
from weightcast.format.workers import ONE, Workers


def stage_left_over(
    weights: Weights,
    start: Fingerprint,
    versions: Sequence[Sequence[str]],
    names: Container[str],
    folder: Path,
    workers: Workers = ONE,
) -> tuple[str, ...]:
    """What a route from ``weights`` changes in some tensors, verified: `plain` patches in ``folder``, in its order.

    ``versions`` are the files of each edge's objects. What ``folder`` held before is deleted.
    """
    discard(folder)
    folder.mkdir(parents=True)
    paths: list[str] = []
    with ExitStack() as opened:
        layers: list[PatchReader] = []
        for number, files in enumerate(versions):
            whole = JoinedPatch(open_objects(ReopenedSource(Path(file)) for file in files))
            patch = whole.only(names, start)
            if not patch.rows:
                continue
            out = folder / f"{number:06d}.safetensors"
            start = stage(patch, Overlay(weights, layers), start, out, workers)
            layers.append(PatchReader(opened.enter_context(FileSource(out))))
            paths.append(str(out.absolute()))
    return tuple(paths)
