"""Digests that add up: of a tensor, of boxes of one, and of a whole model (SPEC 4)."""

from __future__ import annotations

import hashlib
import json
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from weightcast.errors import UsageError
from weightcast.format.kernels import cpu
from weightcast.format.spec import TensorSpec, TensorTable, elements_of
from weightcast.format.tensors import Bits, InSpans, Weights, bits_of
from weightcast.format.workers import ONE, Workers

MODULUS = 1 << 64
_SPAN = 1 << 20


def tensor_digest(bits: Bits, workers: Workers = ONE) -> int:
    """The sum of ``mix(index, bits)`` over all elements, modulo 2**64."""

    def part(first: int) -> int:
        return int(cpu.digest_runs(bits[first : first + _SPAN], np.array([first], np.int64)))

    return sum(workers.map(part, range(0, bits.size, _SPAN))) % MODULUS


def box_digest(box: npt.NDArray[Any], offset: Sequence[int], shape: Sequence[int]) -> int:
    """What a box of a tensor adds to the tensor's digest: disjoint boxes that cover the tensor add up to it.

    ``box`` holds the elements, ``offset`` is the place of the first one in the tensor of ``shape``.
    """
    if not len(offset) == box.ndim == len(shape) or any(
        o < 0 or o + n > full for o, n, full in zip(offset, box.shape, shape, strict=True)
    ):
        raise UsageError(f"a box of {list(box.shape)} at {list(offset)} is not inside a tensor of {list(shape)}")
    if box.size == 0:
        return 0
    starts = np.zeros((), np.int64)
    for axis, full in enumerate(shape):
        first = np.arange(box.shape[axis]) + offset[axis] if axis < box.ndim - 1 else np.array(offset[axis])
        starts = np.add.outer(starts * full, first)
    return int(cpu.digest_runs(bits_of(np.ascontiguousarray(box)), starts.reshape(-1)))


def table_json(table: TensorTable) -> str:
    """The table as canonical JSON: what the position digest covers."""
    tensors = [[spec.name, spec.dtype, list(spec.shape)] for spec in table]
    return json.dumps({"aliases": dict(table.aliases), "tensors": tensors}, separators=(",", ":"), sort_keys=True)


@dataclass(frozen=True)
class Fingerprint:
    """The digest of every tensor of a table: enough to verify a patch without reading the weights again."""

    table: TensorTable
    digests: tuple[int, ...]

    @cached_property
    def digest(self) -> str:
        """Of the whole state: SHA-256 over table and tensor digests, in hexadecimal."""
        text = f"weightcast position 1\n{table_json(self.table)}\n".encode()
        return hashlib.sha256(text + struct.pack(f"<{len(self.digests)}Q", *self.digests)).hexdigest()

    def __getitem__(self, name: str) -> int:
        return self.digests[self.table.ordinal(name)]

    def differing(self, other: Fingerprint) -> frozenset[str]:
        """Tensors that have another digest in ``other``, which is of the same table."""
        pairs = zip(self.table, self.digests, other.digests, strict=True)
        return frozenset(spec.name for spec, mine, theirs in pairs if mine != theirs)

    def with_digests(self, changed: Mapping[str, int]) -> Fingerprint:
        """The fingerprint after some tensors got new digests."""
        digests = list(self.digests)
        for name, digest in changed.items():
            digests[self.table.ordinal(name)] = digest
        return Fingerprint(self.table, tuple(digests))


@runtime_checkable
class Digested(Protocol):
    """Weights that are digested in place, for example on a GPU."""

    def digests(self) -> Sequence[int]:
        """The digests of all tensors, in the order of the table."""
        ...


def tensor_digests(weights: Weights, workers: Workers = ONE) -> Iterator[int]:
    """The digests of all tensors in order; a few tensors are read ahead."""
    if isinstance(weights, Digested):
        return iter(weights.digests())

    def one(spec: TensorSpec) -> int:
        if isinstance(weights, InSpans):
            return _digest_in_spans(weights, spec, workers)
        return tensor_digest(weights.read(spec.name), workers)

    return workers.stream(one, weights.table, elements_of)


_room = threading.local()


def _digest_in_spans(weights: InSpans, spec: TensorSpec, workers: Workers) -> int:
    word = spec.kind.word

    def part(first: int) -> int:
        if not hasattr(_room, "bytes"):
            _room.bytes = np.empty(_SPAN * 8, np.uint8)
        out = _room.bytes[: min(_SPAN, spec.elements - first) * word.itemsize].view(word)
        weights.read_span(spec.name, first, out)
        return int(cpu.digest_runs(out, np.array([first], np.int64)))

    return sum(workers.map(part, range(0, spec.elements, _SPAN))) % MODULUS


def fingerprint(weights: Weights, workers: Workers = ONE) -> Fingerprint:
    """Read all of ``weights`` once and digest every tensor."""
    return Fingerprint(weights.table, tuple(tensor_digests(weights, workers)))
