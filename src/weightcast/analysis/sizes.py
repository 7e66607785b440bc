"""What the steps take in bytes: each measured with the encoder that publishes them, none of it kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

    def add(self, histories: Sequence[History]) -> list[int]:
        """Encode what each step, and each window of steps, changes in the next tensors; how much all steps change."""
        totals = [0] * len(histories)
        for step, (olds, news) in enumerate(pairwise(_states(histories, 1))):
            patches = self._encode(histories, olds, news, [outlines[step] for outlines in self._codecs.values()])
            totals = [total + patch.changed for total, patch in zip(totals, patches, strict=True)]
        for each, outlines in self._windows.items():
            for outline, (olds, news) in zip(outlines, pairwise(_states(histories, each)), strict=True):
                self._encode(histories, olds, news, [outline])
        return totals

    def _encode(
        self, histories: Sequence[History], olds: Sequence[Bits], news: Sequence[Bits], outlines: Sequence[PatchOutline]
    ) -> list[TensorPatch]:
        specs = [history.spec for history in histories]
        patches = diff_tensors(specs, olds, news, [0] * len(specs), self._workers)
        changed = [(patch, old) for patch, old in zip(patches, olds, strict=True) if patch.changed]
        for outline in outlines:
            for coded in outline.codec.encode(changed, self._workers):
                outline.add(coded)
        return patches

    def finish(self) -> Sizes:
        codecs = {codec: self._sizes(outlines) for codec, outlines in self._codecs.items()}
        windows = {each: self._sizes(outlines) for each, outlines in self._windows.items()}
        return Sizes(codecs, {1: codecs[SQUASHED], **windows})

    def _sizes(self, outlines: Sequence[PatchOutline]) -> tuple[int, ...]:
        return tuple(outline.finish(_DIGEST, _DIGEST, self._model)[1].nbytes for outline in outlines)


def _states(histories: Sequence[History], each: int) -> Iterator[tuple[Bits, ...]]:
    return zip(*(history.states(each) for history in histories), strict=True)


CODECS_IN_ORDER: tuple[CodecName, ...] = ("plain", "gap", "banded")
assert set(CODECS_IN_ORDER) == set(CODECS)
