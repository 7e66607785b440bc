"""Elements of a tensor that are in memory in another order: between others, transposed, in part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul

import numpy as np
import numpy.typing as npt
import torch

Loops = npt.NDArray[np.int64]
"""Nested loops, outermost first: the count, the step in the tensor, the step in memory."""


@dataclass(frozen=True, eq=False)
class Strided:
    """Elements of a tensor in memory, numbered in the order of the loops that visit them."""

    words: torch.Tensor
    """The memory, as integers of an element's size."""
    source: int
    """The flat index of the first one in the tensor."""
    target: int
    """Its place in memory."""
    loops: Loops

    @cached_property
    def elements(self) -> int:
        return int(self.loops[:, 0].prod())

    @property
    def address(self) -> int:
        return self.words.data_ptr() + self.target * self.words.element_size()

    @cached_property
    def is_run(self) -> bool:
        """Whether they are without gaps on both sides."""
        return len(self.loops) == 1 and (self.elements == 1 or bool((self.loops[0, 1:] == 1).all()))

    @cached_property
    def is_whole(self) -> bool:
        """Whether their numbers are their flat indices in the tensor."""
        counts, there, _ = self.loops.T.tolist()
        natural = [*accumulate(reversed(counts[1:]), mul, initial=1)][::-1]
        return not self.source and all(c == 1 or a == b for c, a, b in zip(counts, there, natural, strict=True))
