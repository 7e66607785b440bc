"""A tensor of which a worker holds parts, along a route: what is read of each version's rows, and what is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from weightcast.engine.casts import ROUNDED, cast_back
from weightcast.engine.held import Held, overlap_of
from weightcast.engine.layout import Part
from weightcast.engine.live import DENSE, LiveParameters
from weightcast.engine.prepared import Prepared, words_of
from weightcast.errors import BaseError, FormatError, about
from weightcast.format.boxes import Indices
from weightcast.format.codec import Coded, plain
from weightcast.format.codec.blocks import Window, raw_blocks, some_blocks
from weightcast.format.joined import in_order
from weightcast.format.kernels import cpu
from weightcast.format.patch import TensorPatch, compose_tensor
from weightcast.format.patchfile import PatchReader
from weightcast.format.spec import TensorSpec
from weightcast.format.table import Row
from weightcast.format.tensors import Bits

HasKernels = Callable[[torch.device], bool]
"""Whether blocks can be decoded on a device."""


class Overwrites(NamedTuple):
    """Flat indices of a tensor, the bits that they get and, if known, the bits that they had."""

    indices: Indices
    new: Bits
    old: Bits | None = None


@dataclass(frozen=True, eq=False)
class Job:
    """Blocks to decode."""

    tensor: TensorOnRoute
    reader: PatchReader
    row: Row
    coded: Coded
    window: Window | None
    """The old bits, on the host."""
    words: torch.Tensor | None = None
    """Those of all elements of the row, on a device that decodes."""

    def refuse_other_count(self, patch: TensorPatch) -> None:
        """`FormatError` unless as many elements change as the table says; it counts those that are not held, too."""
        if len(self.coded.row.blocks) == len(self.row.blocks) or patch.changed > self.row.changed:
            self.reader.refuse_other_count(self.row, patch)


class TensorOnRoute:
    """A tensor of which the worker holds parts, and what the versions so far change there."""

    def __init__(
        self,
        live: LiveParameters,
        spec: TensorSpec,
        rows: Sequence[Sequence[tuple[PatchReader, Row]]],
        has_kernels: HasKernels,
    ):
        self.spec = spec
        self.rows = rows
        self.parts = live.layout.locate(spec.name)
        self.is_lost = False
        """Whether a version could not be decoded."""
        self.decodes_in_place = all(has_kernels(live.view(part).device) for part in self.parts)
        """Whether what is held is on a device that decodes."""
        self._live = live
        self._distinct = list({part.box: part for part in self.parts}.values())
        self._is_exact = all((spec.dtype, part.dtype) not in ROUNDED for part in self.parts)
        self._patch = _nothing(spec)

    # -- decode ------------------------------------------------------------------------------------------------------

    def read(self, reader: PatchReader, row: Row) -> tuple[list[Overwrites], list[Job]]:
        """What a row overwrites, as far as that needs no blocks to be decoded, and the blocks that do."""
        overlaps = [overlap_of(part, row.place.box) for part in self._distinct]
        held = Held(row.place, [one for one in overlaps if one is not None])
        if not held.overlaps or self.is_lost:
            return [], []
        if reader.header.codec == "plain":
            return [self._read_plain(held, reader, row)], []
        return self._read_blocks(held, reader, row)

    def _read_plain(self, held: Held, reader: PatchReader, row: Row) -> Overwrites:
        coded = reader.coded(row)
        if "indices" in coded.streams:
            patch = plain.decode_tensor(coded, None)
            chosen = slice(None) if held.is_all else held.choose(patch.indices)
            indices, new = row.place.flat(patch.indices[chosen]), patch.new[chosen]
            old = self._bits_at(indices) if self._is_exact else None
            if old is not None and (old == new).any():
                raise FormatError("the patch lists an element that it does not change", tensor=self.spec.name)
            return Overwrites(indices, new, old)
        window = self._window(held) if held.is_all and self._is_exact else None
        if window is not None:
            patch = plain.decode_tensor(coded, window.bits)
            reader.refuse_other_count(row, patch)
            return Overwrites(row.place.flat(patch.indices), patch.new, patch.old)
        inside = held.between(0, row.elements)
        return Overwrites(row.place.flat(inside), coded.streams["values"][inside])

    def _read_blocks(self, held: Held, reader: PatchReader, row: Row) -> tuple[list[Overwrites], list[Job]]:
        whole, touched = held.blocks(np.array([ordinal for ordinal, _ in row.blocks], np.int64))
        if not touched.any():
            return [], []
        whole &= self._is_exact
        coded, overwrites = reader.coded(row), []
        partial = touched & ~whole
        raw = raw_blocks(coded, partial) if partial.any() else ()
        if raw is None:
            self.is_lost = True
            return [], []
        for first, values in raw:
            indices = held.between(first, first + values.size)
            overwrites.append(Overwrites(row.place.flat(indices), values[indices - first]))
        if not whole.any():
            return overwrites, []
        words = self._words(held)
        window = self._window(held) if words is None else None
        if words is None and window is None:
            self.is_lost = True
            return [], []
        return overwrites, [Job(self, reader, row, some_blocks(coded, whole), window, words)]

    def _window(self, held: Held) -> Window | None:
        """What is held of a place, after the versions so far."""
        window = held.window(self._live)
        if window is None or not self._patch.changed:
            return window
        chosen, places = held.place.within(self._patch.indices)
        bits = window.bits.copy()  # it may be the parameter itself
        is_there = (places >= window.first) & (places < window.end)
        cpu.scatter(bits, places[is_there] - window.first, self._patch.new[chosen[is_there]])
        return Window(window.first, bits)

    def _words(self, held: Held) -> torch.Tensor | None:
        """All elements of a place after the versions so far, on a device that decodes; None if they are not there."""
        words = held.words(self._live) if self.decodes_in_place else None
        if words is None or not self._patch.changed:
            return words
        chosen, places = held.place.within(self._patch.indices)
        new = words_of(self._patch.new[chosen]).to(words.device)
        return words.clone().index_copy_(0, torch.from_numpy(places).to(words.device), new)

    def _bits_at(self, indices: Indices) -> Bits | None:
        """The bits of elements that are held, after the versions so far; None if they are no cast of the dtype's."""
        found = np.empty(indices.size, self.spec.kind.word)
        for part in self._distinct:
            which, there = self._live.bits_at(part, indices)
            bits = cast_back(there, self.spec.dtype, part.dtype)
            if bits is None:
                return None
            found[which] = bits
        _, here, before = np.intersect1d(indices, self._patch.indices, assume_unique=True, return_indices=True)
        found[here] = self._patch.new[before]
        return found

    def take(self, overwrites: Sequence[Overwrites]) -> None:
        """Add what the next version overwrites; `FormatError` if it overwrites an element twice."""
        if not overwrites or self.is_lost:
            return
        is_known = all(one.old is not None for one in overwrites)
        parts = [[array for array in one[: 2 + is_known] if array is not None] for one in overwrites]
        indices, new, *old = in_order(self.spec, parts)
        patch = TensorPatch(self.spec, indices, new, old[0] if old else None, 0)
        self._patch = compose_tensor(self._patch, patch) if self._patch.changed else patch

    @contextmanager
    def blaming(self, reader: PatchReader) -> Iterator[None]:
        """Name the object in errors; `BaseError` instead of a `FormatError` if the parameters are others by now."""
        try:
            with about(file=reader.name):
                yield
        except FormatError as error:
            for part in self.parts:
                before, now = self._live.digests.get(part), self._live.digest_of_part(part, self.spec).digest
                if before is not None and before != now:
                    raise _changed_since(self.spec, before, now) from error
            raise

    # -- stage -------------------------------------------------------------------------------------------------------

    def stage(self, room: int | None) -> Prepared | None:
        """The writes, and the digests of all parts after them; None if it is lost, or they take more than ``room``."""
        patch, self._patch = self._patch, _nothing(self.spec)
        prepared = Prepared(room)
        if self.is_lost or not all(self._stage_part(part, patch, prepared) for part in self.parts):
            return None
        return prepared

    def _stage_part(self, part: Part, patch: TensorPatch, prepared: Prepared) -> bool:
        """Whether there is room for it."""
        live, digest = self._live, self._live.digests.get(part)
        if digest is None:
            digest = live.digest_of_part(part, self.spec).digest
        if part not in self._distinct:  # a copy of other bits, perhaps
            patch = replace(patch, old=None)
        change = live.change_of(part, patch, digest)
        prepared.boxes[part] = change.box
        prepared.changed += change.where.size
        left, whole = prepared.left, part.box.elements * change.values.itemsize
        if not change.where.size:
            return True
        is_sparse = DENSE * change.where.size <= part.box.elements
        if is_sparse and (left is None or change.nbytes <= left):
            prepared.scatters.append(live.scatter_of(part, change.where, change.values))
        elif left is None or whole <= left:
            prepared.wholes.append(live.whole_of(part, live.patched(part, change)))
        else:
            return False
        return True


def _nothing(spec: TensorSpec) -> TensorPatch:
    return TensorPatch(spec, np.empty(0, np.int64), np.empty(0, spec.kind.word), None, 0)


def _changed_since(spec: TensorSpec, before: int, now: int | None) -> BaseError:
    return BaseError(
        "the parameters are not what they were when they were digested",
        expected=f"{before:016x}",
        found="nothing" if now is None else f"{now:016x}",
        tensor=spec.name,
        hint="Something else changed the engine's memory: load the weights again.",
    )
