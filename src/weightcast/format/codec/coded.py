"""What a codec makes of one tensor's patch, and what it needs to read it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from weightcast.errors import UsageError
from weightcast.format.boxes import Box
from weightcast.format.codec.ranks import Ranks
from weightcast.format.patch import TensorPatch
from weightcast.format.table import Row
from weightcast.format.tensors import Bits
from weightcast.format.workers import Workers


@dataclass(frozen=True)
class Coded:
    """A tensor's row in the table, and its streams by the names that SPEC gives them."""

    row: Row
    streams: Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Blocks:
    """A tensor's changes as a device coded them: its blocks as (ordinal, bytes), one after the other in ``stream``."""

    sizes: tuple[tuple[int, int], ...]
    stream: npt.NDArray[np.uint8]


Prepared = Ranks | Blocks
"""What was made of a change while the old tensor was there: what a codec needs of it, or the result."""


def other_base(tensor: str) -> UsageError:
    """What is raised if the weights that were given as the base of a patch are others."""
    hint = "It may have been updated in place. Pass the weights as they were before the change."
    return UsageError("`old` is not the base of this patch", tensor=tensor, hint=hint)


@dataclass(frozen=True, eq=False)
class Parts:
    """A change that is coded in boxes of its tensor: each box in which something changed, with its old bits or what was
    prepared from them. The boxes are in order of their offsets.
    """

    boxes: tuple[tuple[Box, Bits | Prepared | None], ...]


BlockDecoder = Callable[[Sequence[Coded]], list[TensorPatch]]


@runtime_checkable
class DecodesBlocks(Protocol):
    """Weights that can decode the blocks of `gap` and `banded` where they are, for example on a GPU."""

    def block_decoder(self, names: Sequence[str]) -> BlockDecoder | None:
        """What decodes patches of these tensors; None if they must be read, to decode on the host."""
        ...


@dataclass(frozen=True)
class Codec:
    """A pair of pure functions on any number of tensors.

    With each goes the whole old tensor, or None if the caller does not hold it; a writer may have what was prepared
    from it instead.
    """

    name: str
    encode: Callable[[Sequence[tuple[TensorPatch, Bits | Prepared | None]], Workers], list[Coded]]
    decode: Callable[[Sequence[tuple[Coded, Bits | None]], Workers], list[TensorPatch]]
