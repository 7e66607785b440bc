"""Shards of any framework: the boxes that one rank has, as `Publisher` takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weightcast.errors import UsageError
from weightcast.format.boxes import Box, Held, Place
from weightcast.format.spec import TensorTable
from weightcast.format.tensors import Arrays, Bits
from weightcast.publish.agreement import places_in

if TYPE_CHECKING:
    import torch


class Shards:
    """What one rank of a sharded training has: ``(name, box, array)`` for each box of a tensor of the checkpoint.

    Every rank passes its own to a `Publisher`. The arrays are watched in place: numpy arrays, or torch tensors on any
    device. What the whole table is, is agreed on once: every element of a tensor must be on exactly one rank, and a
    tensor reaches as far as its boxes do. A rank may have several boxes of a tensor, or none.

    >>> rows = np.zeros((2, 3), np.float32)                                  # the upper half of `w`
    >>> shards = wc.Shards([("w", wc.Box.of((0, 0), (2, 3)), rows), ("b", wc.Box.of((0,), (3,)), rows[0].copy())])
    >>> [spec.name for spec in shards.table]
    ['b[0]', 'w[0,0]']
    """

    def __init__(
        self,
        shards: Iterable[tuple[str, Box, npt.NDArray[Any] | torch.Tensor]],
        dtypes: Mapping[str, str] | None = None,
    ):
        """``dtypes`` names what numpy has no dtype for, by tensor: pass bfloat16 as uint16 and name it "BF16"."""
        self._boxes: dict[str, Held] = {}
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, box, array in shards:
            label = f"{name}[{','.join(map(str, box.offset))}]"
            if label in self._boxes:
                raise UsageError("two boxes begin at the same place", tensor=label)
            if tuple(array.shape) != box.shape:
                problem = f"the box is {list(box.shape)}, its tensor {list(array.shape)}"
                raise UsageError(problem, tensor=label, hint="Pass the box that the tensor holds.")
            if not isinstance(array, np.ndarray):
                array, dtype = _as_array(label, array)
                dtypes = {**(dtypes or {}), name: dtype}
            arrays[label] = array
            self._boxes[label] = Held(name, "", box)
        named = {label: dtypes[one.name] for label, one in self._boxes.items() if dtypes and one.name in dtypes}
        self._arrays = Arrays(arrays, named)
        self.table: TensorTable = self._arrays.table
        """The boxes as tensors of their own."""
        self._boxes = {label: Held(one.name, self.table[label].dtype, one.box) for label, one in self._boxes.items()}
        self.places: Mapping[str, Place] = {}
        self.whole: TensorTable = TensorTable(())

    def declare(self) -> tuple[Sequence[tuple[str, str, Box]], TensorTable | None]:
        """What this rank has; it does not know the whole table."""
        return list(self._boxes.values()), None

    def place(self, whole: TensorTable) -> None:
        """Take up the agreed table."""
        self.whole, self.places = whole, places_in(whole, self._boxes)

    def read(self, name: str) -> Bits:
        return self._arrays.read(name)


def _as_array(label: str, tensor: torch.Tensor) -> tuple[npt.NDArray[Any], str]:
    """A torch tensor on the host as an array over the same memory."""
    from weightcast.torch.batch import WORDS, unsigned
    from weightcast.torch.coordinates import DTYPES

    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.dtype not in DTYPES:
        raise UsageError("expected a contiguous tensor in the memory of the host", tensor=label)
    words = tensor.detach().view(WORDS[tensor.element_size()]) if tensor.dim() else tensor.detach().reshape(1)
    return unsigned(words.view(WORDS[tensor.element_size()])).reshape(tuple(tensor.shape)), DTYPES[tensor.dtype]
