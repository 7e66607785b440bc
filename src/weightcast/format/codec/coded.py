"""What a codec makes of one tensor's patch, and what it needs to read it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from weightcast.format.codec.ranks import Ranks
from weightcast.format.patch import TensorPatch
from weightcast.format.spec import TensorSpec
from weightcast.format.tensors import Bits
from weightcast.format.workers import Workers


@dataclass(frozen=True)
class Coded:
    """Streams of one tensor, by the names SPEC gives them."""

    spec: TensorSpec
    changed: int
    digest: int
    streams: Mapping[str, npt.NDArray[Any]]
    blocks: tuple[tuple[int, int], ...] = field(default=())
    """(ordinal, bytes) of each block in the stream, where the codec works in blocks."""


@dataclass(frozen=True)
class Codec:
    """A pair of pure functions.

    ``old`` is the whole old tensor, None where the caller does not hold it; a writer may have its ranks instead.
    """

    name: str
    encode: Callable[[TensorPatch, Bits | Ranks | None, Workers], Coded]
    decode: Callable[[Coded, Bits | None, Workers], TensorPatch]
