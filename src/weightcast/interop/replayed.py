"""The weights that a chain of another system's files leads to: one copy on disk, changed a step at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weightcast.disk.checkpoint import SINGLE, save
from weightcast.disk.durable import disk_errors, require_space
from weightcast.errors import FormatError
from weightcast.format.digest import MODULUS, tensor_digest
from weightcast.format.kernels import cpu
from weightcast.format.patch import Indices
from weightcast.format.safetensors import FileSource, open_container
from weightcast.format.spec import TensorSpec, TensorTable
from weightcast.format.tensors import Bits, Weights


class Replayed:
    """Weights in a file of their own, mapped into memory: the system may write them out where memory is short.

    Their digests are kept up to date with each change, so that a step that is known already costs no reading.
    """

    def __init__(self, room: Path, first: Weights, aliases: Mapping[str, str] | None = None):
        self.path = room / SINGLE
        require_space(room, first.table.nbytes)
        self.table = TensorTable.of(first.table, aliases)
        with disk_errors(room):
            self.path.unlink(missing_ok=True)
            save(first, room)
            with FileSource(self.path) as source:
                container = open_container(source)
            mapped = np.memmap(self.path, np.uint8, "r+").view(np.ndarray)
        data = mapped[container.data_start :]
        self._bits: dict[str, Bits] = {
            spec.name: data[entry.begin : entry.end].view(spec.kind.word)
            for spec in self.table
            for entry in [container.entries[spec.name]]
        }
        self._digests = {spec.name: tensor_digest(self._bits[spec.name]) for spec in self.table}

    def read(self, name: str) -> Bits:
        return self._bits[name]

    def digests(self) -> Sequence[int]:
        return [self._digests[spec.name] for spec in self.table]

    def overwrite(self, name: str, indices: npt.NDArray[np.int64], new: Bits) -> None:
        bits = self._bits[name]
        gain = int(cpu.digest_change(indices, bits[indices], new))
        cpu.scatter(bits, indices, new)
        self._digests[name] = (self._digests[name] + gain) % MODULUS

    def write(self, name: str, bits: Bits) -> None:
        self._bits[name][:] = bits
        self._digests[name] = tensor_digest(bits)

    def replace(self, weights: Weights) -> None:
        """Take whole weights of the same table."""
        for spec in self.table:
            self.write(spec.name, weights.read(spec.name))

    def files(self, small: Mapping[str, Path]) -> Callable[[], dict[str, Path]]:
        """What an anchor of these weights holds: the weights, and small files beside them."""
        return lambda: {SINGLE: self.path, **small}


def refuse_other_places(spec: TensorSpec, indices: Indices, values: int) -> None:
    """`FormatError` unless these are places of ``values`` elements of a tensor, in order and none of them twice."""
    if indices.size != values:
        raise FormatError(f"{indices.size} indices for {values} values")
    if indices.size and not cpu.are_places(indices, spec.elements):
        within = int(indices.min()) >= 0 and int(indices.max()) < spec.elements
        what = "out of order, or twice" if within else f"outside of its {spec.elements} elements"
        raise FormatError(f"an index is {what}")
