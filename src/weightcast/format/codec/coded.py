"""What a codec makes of one tensor's patch, and what it needs to read it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

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


@dataclass(frozen=True)
class Codec:
    """A pair of pure functions.

    ``old`` is the whole old tensor, None if the caller does not hold it; a writer may have its ranks instead.
    """

    name: str
    encode: Callable[[TensorPatch, Bits | Ranks | None, Workers], Coded]
    decode: Callable[[Coded, Bits | None, Workers], TensorPatch]
