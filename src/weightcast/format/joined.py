"""Several objects of one version as one patch: boxes are decoded where they are, and put together tensor by tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from weightcast.errors import FormatError
from weightcast.format.codec import CODECS
from weightcast.format.digest import Fingerprint
from weightcast.format.kernels import cpu
from weightcast.format.patch import Patch, TensorPatch, refuse_other_tensor
from weightcast.format.patch_layout import PatchHeader
from weightcast.format.patchfile import AT_ONCE, PatchReader
from weightcast.format.safetensors import BytesSource, Source
from weightcast.format.spec import TensorSpec
from weightcast.format.table import Row, refuse_other_boxes
from weightcast.format.tensors import Bits, Weights, read_all, refuse_other_bits
from weightcast.format.workers import ONE, Workers

MAX_ROWS_TOGETHER = 1 << 20
"""Of all objects of a version: each is a small file that may list many boxes."""

Part = tuple[PatchReader, Row]
"""A box of a tensor in an object; or all of it."""


class JoinedPatch:
    """What all objects of a version change together, as rows of whole tensors."""

    def __init__(self, readers: Sequence[PatchReader]):
        """`FormatError` if the objects are not of one version, or two of them hold the same elements."""
        self.header = _header_of(readers)
        parts: dict[str, list[Part]] = defaultdict(list)
        for reader in readers:
            for row in reader.rows:
                parts[row.spec.name].append((reader, row))
        self._parts: Mapping[str, list[Part]] = {}
        for name in sorted(parts, key=str.encode):
            self._parts[name] = sorted(parts[name], key=lambda part: part[1].place.box.offset)
            rows = [row for _, row in self._parts[name]]
            refuse_other_boxes(name, rows)
            if self.header.base is None and sum(row.elements for row in rows) < rows[0].spec.elements:
                raise FormatError("a patch without a base does not change all of a tensor", tensor=name)
        self.rows = tuple(_whole_row(parts) for parts in self._parts.values())

    @property
    def parts(self) -> Mapping[str, Sequence[Part]]:
        """The boxes of each tensor, in order of their offsets."""
        return self._parts

    def only(self, names: Container[str], start: Fingerprint) -> JoinedPatch:
        """What it changes in some tensors, as a patch that begins at weights with the fingerprint ``start``."""
        found = copy(self)
        found._parts = {name: parts for name, parts in self._parts.items() if name in names}
        found.rows = tuple(row for row in self.rows if row.spec.name in names)
        for row in found.rows:
            refuse_other_tensor(start.table, row.spec)
        result = start.with_digests({row.spec.name: row.digest for row in found.rows})
        found.header = replace(self.header, base=start.digest, result=result.digest)
        return found

    def tensors(self, old: Weights | None, workers: Workers = ONE) -> Iterator[TensorPatch]:
        """Decode all tensors in order, a few at a time: the next ones while the caller uses those before."""

        def decoded(rows: Sequence[Row]) -> list[TensorPatch]:
            olds: Sequence[Bits | None] = [None] * len(rows)
            if old is not None and self.header.base is not None:
                for row in rows:
                    refuse_other_tensor(old.table, row.spec)
                olds = read_all(old, [row.spec.name for row in rows], workers)
            return self._decode(rows, olds, workers)

        batches = workers.batches(self.rows, lambda row: row.spec.elements, AT_ONCE)
        yield from chain.from_iterable(workers.ahead(decoded, batches))

    def _decode(self, rows: Sequence[Row], olds: Sequence[Bits | None], workers: Workers) -> list[TensorPatch]:
        """Decode the boxes of some tensors, those of all objects together: an object has few blocks of each."""
        parts: dict[str, list[Part]] = defaultdict(list)
        bits: dict[str, list[Bits | None]] = defaultdict(list)
        for whole, tensor in zip(rows, olds, strict=True):
            if tensor is not None:
                refuse_other_bits(whole.spec, tensor)
            for reader, row in self._parts[whole.spec.name]:
                parts[reader.header.codec].append((reader, row))
                bits[reader.header.codec].append(None if tensor is None else row.place.read(tensor))
        found: dict[str, list[tuple[Row, TensorPatch]]] = defaultdict(list)
        for codec, some in parts.items():
            for (_, row), patch in zip(some, _decode_together(codec, some, bits[codec], workers), strict=True):
                found[row.spec.name].append((row, patch))
        together = zip(rows, olds, strict=True)
        return workers.map(lambda one: _put_together(one[0], found[one[0].spec.name], one[1]), list(together))


def _decode_together(
    codec: str, parts: Sequence[Part], olds: Sequence[Bits | None], workers: Workers
) -> list[TensorPatch]:
    """The patches of rows of several objects, in one call of their codec."""
    coded = [reader.coded(row) for reader, row in parts]
    try:
        patches = CODECS[codec].decode(list(zip(coded, olds, strict=True)), workers)
    except FormatError:
        for (reader, row), old in zip(parts, olds, strict=True):
            reader.decode([row], [old])  # raises the same, with the name of the object
        raise
    for (reader, row), patch in zip(parts, patches, strict=True):
        reader.refuse_other_count(row, patch)
    return patches


def open_objects(sources: Iterable[Source], most: int = MAX_ROWS_TOGETHER) -> list[PatchReader]:
    """Open the objects of one version; `FormatError` if they have more than ``most`` rows together."""
    readers, rows = [], 0
    for source in sources:
        readers.append(PatchReader(source))
        rows += len(readers[-1].rows)
        if rows > most:
            raise FormatError(f"the objects of a version have more than {most} rows together")
    return readers


def joined(readers: Sequence[PatchReader]) -> PatchReader | JoinedPatch:
    """The objects of one version as one patch."""
    if len(readers) == 1 and all(row.box is None for row in readers[0].rows):
        return readers[0]
    return JoinedPatch(readers)


def parts_by_tensor(patch: PatchReader | JoinedPatch) -> Mapping[str, Sequence[Part]]:
    """The boxes of each tensor that a version changes, with the objects that they are in."""
    if isinstance(patch, JoinedPatch):
        return patch.parts
    return {row.spec.name: [(patch, row)] for row in patch.rows}


def decode(data: bytes | memoryview, old: Weights | None = None, workers: Workers = ONE) -> Patch:
    """Read a patch from the bytes that `encode` made; `FormatError` for any others.

    ``old`` is the base; "plain" needs none. Decoding checks only the format: `Patch.apply` verifies that the patch
    leads from its base to its result.

    >>> old, new = (wc.Arrays({"w": np.full(1000, value, np.float32)}) for value in (0, 1))
    >>> wc.decode(wc.encode(wc.diff(old, new), old=old), old).changed
    1000
    >>> wc.decode(b"something else")
    Traceback (most recent call last):
    weightcast.errors.FormatError: not a safetensors file (file patch). Name a .safetensors file. ...
    """
    patch = joined([PatchReader(BytesSource(data))])
    header = patch.header
    return Patch(header.base, header.result, header.model, tuple(patch.tensors(old, workers)))


def _header_of(readers: Sequence[PatchReader]) -> PatchHeader:
    if not readers:
        raise FormatError("a version has no objects")
    first = readers[0].header
    for reader in readers:
        if (reader.header.base, reader.header.result) != (first.base, first.result):
            raise FormatError("two objects of a version lead from or to other weights")
    return first


def _whole_row(parts: Sequence[Part]) -> Row:
    """The row of a tensor. It counts all elements where a box is stored whole: then the old bits decide."""
    _, first = parts[0]
    whole = any(reader.counts_all(row) for reader, row in parts)
    return Row(first.spec, first.spec.elements if whole else sum(row.changed for _, row in parts), first.digest)


def in_order(spec: TensorSpec, parts: Sequence[Sequence[npt.NDArray[Any]]]) -> list[npt.NDArray[Any]]:
    """What changes in a tensor's boxes, of each its flat indices in the tensor and any bits there, in one order.

    `FormatError` if an element changes twice.
    """
    if len(parts) == 1:
        return list(parts[0])
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    if not cpu.are_places(columns[0], spec.elements):
        order = np.argsort(columns[0], kind="stable")
        columns = [column[order] for column in columns]
        if not cpu.are_places(columns[0], spec.elements):
            raise FormatError("boxes of a tensor overlap", tensor=spec.name)
    return columns


def _put_together(whole: Row, parts: Sequence[tuple[Row, TensorPatch]], old: Bits | None) -> TensorPatch:
    """The changes of a tensor's boxes in the order of the tensor; `FormatError` if an element changes twice."""
    parts = sorted(parts, key=lambda part: part[0].place.box.offset)
    indices, new = in_order(whole.spec, [(row.place.flat(patch.indices), patch.new) for row, patch in parts])
    was = None
    if old is not None:
        was = np.empty(indices.size, old.dtype)
        cpu.gather(old, indices, 0, was)
    return TensorPatch(whole.spec, indices, new, was, whole.digest)
