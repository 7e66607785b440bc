"""What the steps take in bytes: each measured with the encoder that publishes them, none of it kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from weightcast.analysis.flips import intervals
from weightcast.analysis.steps import History
from weightcast.format.codec import CODECS, CodecName
from weightcast.format.diff import diff_tensors
from weightcast.format.patch import ModelSize, TensorPatch
from weightcast.format.patch_outline import PatchOutline
from weightcast.format.spec import TensorTable
from weightcast.format.tensors import Bits
from weightcast.format.workers import ONE, Workers

SQUASHED: CodecName = "banded"
"""The codec of squashes."""

_DIGEST = "0" * 64
"""In place of positions: they take as many bytes whatever they are."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of patches, in the order of the steps."""

    codecs: Mapping[CodecName, tuple[int, ...]]
    """Of each step, with each codec."""
    windows: Mapping[int, tuple[int, ...]]
    """Of one patch for so many successive steps, as squashes are coded."""


class Measuring:
    """Takes tensors in the order of the table; at the end it knows the size of every patch."""

    def __init__(self, table: TensorTable, steps: int, workers: Workers = ONE):
        self._model, self._workers = ModelSize.of(table), workers
        self._codecs: dict[CodecName, list[PatchOutline]] = {
            codec: [PatchOutline(codec) for _ in range(steps)] for codec in CODECS_IN_ORDER
        }
        self._windows = {
            each: [PatchOutline(SQUASHED) for _ in range(steps // each)] for each in intervals(steps) if each > 1
        }

    def add(self, history: History) -> None:
        """Encode what each step, and each window of steps, changes in the next tensor."""
        for step, (old, new) in enumerate(pairwise(history.states())):
            self._encode(history, old, new, [outlines[step] for outlines in self._codecs.values()])
        for each, outlines in self._windows.items():
            for outline, (old, new) in zip(outlines, pairwise(history.states(each)), strict=True):
                self._encode(history, old, new, [outline])

    def _encode(self, history: History, old: Bits, new: Bits, outlines: Sequence[PatchOutline]) -> None:
        (patch,) = diff_tensors([history.spec], [old], [new], [0], self._workers)
        if patch.changed:
            for outline in outlines:
                self._add(outline, patch, old)

    def _add(self, outline: PatchOutline, patch: TensorPatch, old: Bits) -> None:
        (coded,) = outline.codec.encode([(patch, old)], self._workers)
        outline.add(coded)

    def finish(self) -> Sizes:
        codecs = {codec: self._sizes(outlines) for codec, outlines in self._codecs.items()}
        windows = {each: self._sizes(outlines) for each, outlines in self._windows.items()}
        return Sizes(codecs, {1: codecs[SQUASHED], **windows})

    def _sizes(self, outlines: Sequence[PatchOutline]) -> tuple[int, ...]:
        return tuple(outline.finish(_DIGEST, _DIGEST, self._model)[1].nbytes for outline in outlines)


CODECS_IN_ORDER: tuple[CodecName, ...] = ("plain", "gap", "banded")
assert set(CODECS_IN_ORDER) == set(CODECS)
