"""Cuts: the parts of tensors that readers hold, in which a writer may code them (SPEC 5.2)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache

from weightcast.errors import UsageError
from weightcast.format.spec import TensorSpec

MAX_PARTS = 256
"""Of one dimension."""

MAX_CUTS = 64
"""That are followed: a model has about ten kinds of tensors that an engine splits."""

MAX_PATTERN = 1000
"""Characters of the name in a cut."""


@dataclass(frozen=True)
class Cut:
    """Tensors that readers hold in equal parts, each of them one: a worker of a tensor-parallel engine decodes its own.

    ``tensors`` is the name of a tensor, in which `*` stands for anything. The parts are those of `torch.chunk`: all of
    one size, only the last may be smaller.

    >>> wc.Cut("model.layers.*.mlp.down_proj.weight", axis=1, parts=8)
    Cut(tensors='model.layers.*.mlp.down_proj.weight', axis=1, parts=8)
    """

    tensors: str
    axis: int
    parts: int

    def __post_init__(self) -> None:
        if self.axis < 0 or not 1 <= self.parts <= MAX_PARTS or len(self.tensors) > MAX_PATTERN:
            problem = f"a tensor cannot be cut into {self.parts} parts along dimension {self.axis}"
            raise UsageError(problem, tensor=self.tensors, hint=f"Pass an axis from 0 on, and 1 to {MAX_PARTS} parts.")

    def applies_to(self, spec: TensorSpec) -> bool:
        return self.axis < len(spec.shape) and _pattern(self.tensors).match(spec.name) is not None

    def edges(self, size: int) -> set[int]:
        """Where a dimension of this size is cut."""
        return set(range(0, size, -(-size // self.parts))) - {0} if size else set()


@lru_cache(maxsize=1024)
def _pattern(tensors: str) -> re.Pattern[str]:
    return re.compile(translate(tensors))


def merged_cuts(wanted: Iterable[Sequence[Cut]]) -> tuple[Cut, ...]:
    """The cuts that several readers want: first what most of them want."""
    counts: dict[Cut, int] = {}
    for cuts in wanted:
        for cut in cuts:
            counts[cut] = counts.get(cut, 0) + 1
    return tuple(sorted(counts, key=lambda cut: (-counts[cut], cut.tensors, cut.axis, cut.parts))[:MAX_CUTS])
