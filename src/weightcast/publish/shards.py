"""Shards of any framework: the boxes that one rank has, as `Publisher` takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weightcast.errors import UsageError
from weightcast.format.boxes import Box, Held, Place, place_of
from weightcast.format.spec import TensorTable
from weightcast.format.tensors import Arrays, Bits

if TYPE_CHECKING:
    import torch


class Shards:
    """What one rank of a sharded training has: ``(name, box, array)`` for each box of a tensor of the checkpoint.

    Every rank passes its own to a `Publisher`. The arrays are watched in place: all of them torch tensors on any device
    (then ``optimizer``, ``detect`` and ``dtype`` are as for a model), or all numpy arrays. What the whole table is, is
    agreed on once: every element of a tensor must be on exactly one rank, and a tensor reaches as far as its boxes do.
    A rank may have several boxes of a tensor, or none.

    >>> rows = np.zeros((2, 3), np.float32)                                  # the upper half of `w`
    >>> shards = wc.Shards([("w", wc.Box.of((0, 0), (2, 3)), rows), ("b", wc.Box.of((0,), (3,)), rows[0].copy())])
    >>> shards.labels
    ('w[0,0]', 'b[0]')
    """

    def __init__(
        self,
        shards: Iterable[tuple[str, Box, npt.NDArray[Any] | torch.Tensor]],
        dtypes: Mapping[str, str] | None = None,
    ):
        """``dtypes`` names what numpy has no dtype for, by tensor: pass bfloat16 as uint16 and name it "BF16"."""
        self._given: dict[str, tuple[str, Box, Any]] = {}
        self._dtypes = dict(dtypes or {})
        for name, box, array in shards:
            label = f"{name}[{','.join(map(str, box.offset))}]"
            if label in self._given:
                raise UsageError("two boxes begin at the same place", tensor=label)
            if tuple(array.shape) != box.shape:
                problem = f"the box is {list(box.shape)}, its tensor {list(array.shape)}"
                raise UsageError(problem, tensor=label, hint="Pass the box that the tensor holds.")
            self._given[label] = name, box, array
        kinds = {isinstance(array, np.ndarray) for _, _, array in self._given.values()}
        if len(kinds) > 1:
            raise UsageError("some shards are numpy arrays, others are not", hint="Pass all of one kind.")
        self.is_numpy = kinds != {False}

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the boxes: each tensor's, with the offset."""
        return tuple(self._given)

    @property
    def tensors(self) -> Mapping[str, tuple[str, Box, Any]]:
        """Name, box and array of each, by its label."""
        return self._given

    @property
    def dtypes(self) -> Mapping[str, str]:
        """What was given as dtypes."""
        return self._dtypes


class ShardArrays:
    """Numpy arrays that one rank has, as weights whose tensors are the boxes."""

    def __init__(self, shards: Mapping[str, tuple[str, Box, npt.NDArray[Any]]], dtypes: Mapping[str, str]):
        named = {label: dtypes[name] for label, (name, _, _) in shards.items() if name in dtypes}
        self._arrays = Arrays({label: array for label, (_, _, array) in shards.items()}, named)
        self.table = self._arrays.table
        self._boxes = {label: Held(name, self.table[label].dtype, box) for label, (name, box, _) in shards.items()}
        self.places: dict[str, Place] = {}
        self.whole = TensorTable(())

    def declare(self) -> tuple[Sequence[tuple[str, str, Box]], TensorTable | None]:
        """What this rank has; it does not know the whole table."""
        return list(self._boxes.values()), None

    def place(self, whole: TensorTable) -> None:
        """Take up the whole table that was agreed on."""
        self.whole = whole
        self.places = {label: place_of(whole[held.name], held.box) for label, held in self._boxes.items()}

    def read(self, name: str) -> Bits:
        return self._arrays.read(name)


def arrays_of(shards: Shards) -> ShardArrays:
    """Numpy shards as weights to watch."""
    return ShardArrays(shards.tensors, shards.dtypes)
