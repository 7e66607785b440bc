"""An engine's live parameters in checkpoint coordinates: digested, compared and patched where they are.

Nothing is written until `LiveParameters.apply`: what has to be written is translated, cast, brought to the device and
proven beforehand, while the engine serves.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from weightcast.engine.layout import ROUNDED, Box, Held, Layout, Part, Steps, cast, cast_back
from weightcast.errors import UsageError
from weightcast.format.codec import CODECS, Coded
from weightcast.format.digest import MODULUS
from weightcast.format.kernels import cpu, places
from weightcast.format.patch import refuse_other_tensor
from weightcast.format.patchfile import PatchReader
from weightcast.format.spec import TensorSpec, dtype_named
from weightcast.format.table import Row
from weightcast.format.tensors import Bits, Weights, refuse_other_bits
from weightcast.format.workers import ONE
from weightcast.torch.batch import WORDS
from weightcast.torch.kernels.operations import mix

_CHUNK = 1 << 22
"""Elements that are worked on at a time where that needs memory."""

_DENSE = 3
"""A part of which more than a third changes is written whole: places would weigh more than elements."""

Places = npt.NDArray[np.int64]
Pause = Callable[[], None]


@dataclass(frozen=True, eq=False)
class Scatter:
    """Elements of one storage, on its device."""

    words: torch.Tensor
    where: torch.Tensor
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.where.nbytes + self.values.nbytes

    def apply(self) -> None:
        if self.words.device.type == "cpu":
            cpu.scatter(unsigned(self.words), self.where.numpy(), unsigned(self.values))
        else:
            self.words.index_copy_(0, self.where, self.values)


@dataclass
class Prepared:
    """Writes that bring an engine's parameters to other weights, and the digests that every touched box has then."""

    room: int | None = None
    """Bytes that may be held for it."""
    scatters: list[Scatter] = field(default_factory=list)
    wholes: dict[str, list[Part]] = field(default_factory=dict)
    """Parts that are written whole, from the weights themselves: so much of them changes, or there was no room."""
    held: dict[str, list[Held]] = field(default_factory=dict)
    changed: int = 0
    fingerprint: dict[Part, int | None] = field(default_factory=dict)
    """The same digests by part."""

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.scatters)


class LiveParameters:
    """The parameters and buffers of a worker's model, addressed by a layout."""

    def __init__(self, model: torch.nn.Module, layout: Layout):
        self.layout = layout
        self._model = model
        self._words: dict[str, torch.Tensor] = {}
        self._storages: dict[str, tuple[int, int]] = {}
        tensors = _tensors(model)
        for name, parts in layout.by_parameter.items():
            if name not in tensors:
                raise UsageError(f"the model has no parameter {name}", tensor=parts[0].name)
            tensor = tensors[name]
            storage = tensor.untyped_storage()
            words = torch.empty(0, dtype=WORDS[tensor.element_size()], device=tensor.device)
            self._words[name] = words.set_(storage)
            self._storages[name] = storage.data_ptr(), storage.nbytes()
        self._steps = {part: part.steps(layout.table[part.name].shape) for part in layout}
        for part, steps in self._steps.items():
            first, last = steps.extent
            words = self._words[part.parameter]
            if first < 0 or last > words.numel() or 8 * words.element_size() != dtype_named(part.dtype).width:
                raise UsageError("the layout leads outside of a parameter", tensor=part.name)
            if not part.box.fits(layout.table[part.name].shape):
                raise UsageError("the layout leads outside of the tensor", tensor=part.name)
        self.fingerprint: dict[Part, int] = {}
        """Digests of parts as they were found, and as patches changed them since."""

    @property
    def has_moved(self) -> bool:
        """Whether the engine has put other memory in the place of a parameter's."""
        tensors = _tensors(self._model)
        found = {name: tensors[name].untyped_storage() for name in self._storages if name in tensors}
        return {name: (one.data_ptr(), one.nbytes()) for name, one in found.items()} != self._storages

    # -- digests -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def held(self, spec: TensorSpec, remember: bool = True) -> list[Held]:
        """The digests of a tensor's boxes, from the bits that are there now."""
        refuse_other_tensor(self.layout.table, spec)
        parts = self.layout.locate(spec.name)
        found = [self._held(part, spec) for part in parts]
        if remember:
            self._settle({part: one.digest for part, one in zip(parts, found, strict=True)})
        return found

    def _held(self, part: Part, spec: TensorSpec) -> Held:
        if part.dtype == spec.dtype:
            words = self._words[part.parameter]
            digest = _digest_here if words.device.type == "cpu" else _digest_there
            return Held(part.box, digest(self._steps[part], words))
        if (spec.dtype, part.dtype) in ROUNDED:
            return Held(part.box, None, _rounded(part, spec), rounded=True)
        bits = cast_back(self.read(part), spec.dtype, part.dtype)
        if bits is None:
            return Held(part.box, None, "the parameter holds a value that is no cast of the tensor's dtype")
        return Held(part.box, self._digest_of_box(part, bits))

    def _digest_of_box(self, part: Part, bits: Bits) -> int:
        """The same from a part's elements in the order of its box."""
        steps = self._steps[part]
        table = steps.table.copy()
        table[:, 2] = [prod(table[k + 1 :, 0].tolist()) for k in range(len(table))]
        return int(places.digest_places(bits, steps.source, 0, table))

    def read(self, part: Part) -> Bits:
        """A part's elements, in the order of its box."""
        return unsigned(self._view(part).reshape(-1).cpu())

    def write(self, part: Part, bits: Bits) -> None:
        """Give a part its elements, in the order of its box: a few rows at a time."""
        target = self._view(part)
        target = target if target.ndim else target.reshape(1)
        row = prod(target.shape[1:])
        rows = max(1, _CHUNK // row)
        for first in range(0, target.shape[0], rows):
            some = target[first : first + rows]
            new = cast(bits[first * row :][: some.numel()], self.layout.table[part.name].dtype, part.dtype)
            some.copy_(_words(new).reshape(some.shape))

    def _view(self, part: Part) -> torch.Tensor:
        counts = [one.count for one in part.box.ranges]
        return torch.as_strided(self._words[part.parameter], counts, part.strides, part.offset)

    # -- prepare -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare_patches(
        self,
        patches: Sequence[PatchReader],
        names: Container[str] | None = None,
        room: int | None = None,
        pause: Pause = lambda: None,
    ) -> Prepared:
        """What staged patches, one behind the other, overwrite in the tensors of ``names``, or all.

        No more than ``room`` bytes are held for it; ``pause`` is called between tensors, and may raise.
        """
        prepared = Prepared(room)
        touching: dict[str, list[tuple[PatchReader, Row]]] = {}
        for patch in patches:
            if patch.header.codec != "plain":
                raise UsageError(f"a patch coded with {patch.header.codec} is not staged")
            for row in patch.rows:
                refuse_other_tensor(self.layout.table, row.spec)
                if names is not None and row.spec.name not in names:
                    continue
                touching.setdefault(row.spec.name, []).append((patch, row))
        for name, rows in touching.items():
            parts = self.layout.locate(name)
            if parts:
                pause()
                self._prepare_rows(self.layout.table[name], parts, [patch.coded(row) for patch, row in rows], prepared)
        return prepared

    def _prepare_rows(self, spec: TensorSpec, parts: Sequence[Part], rows: Sequence[Coded], prepared: Prepared) -> None:
        last = max((i for i, row in enumerate(rows) if "indices" not in row.streams), default=-1)
        later = [CODECS["plain"].decode(row, None, ONE) for row in rows[last + 1 :]]
        if last >= 0:
            whole = rows[last].streams["values"]
            for patch in later:
                patch.scatter(whole)
            for part in parts:
                self._prepare_box(part, spec, _box_of(whole, spec, part.box), prepared)
            return
        for part in parts:
            pending = _Pending()
            for patch in later:
                which, where = self._steps[part].translate(patch.indices)
                pending.add(where, patch.indices[which], patch.new[which])
            self._prepare_places(part, spec, pending, prepared)

    @torch.no_grad()
    def prepare_weights(
        self,
        weights: Weights,
        specs: Iterable[TensorSpec],
        room: int | None = None,
        pause: Pause = lambda: None,
    ) -> Prepared:
        """What of some tensors differs from ``weights``, whatever the engine holds."""
        prepared = Prepared(room)
        for spec in specs:
            refuse_other_tensor(self.layout.table, spec)
            parts = self.layout.locate(spec.name)
            if not parts:
                continue
            pause()
            bits = weights.read(spec.name)
            refuse_other_bits(spec, bits)
            for part in parts:
                self._prepare_box(part, spec, _box_of(bits, spec, part.box), prepared)
        return prepared

    def _prepare_box(self, part: Part, spec: TensorSpec, bits: Bits, prepared: Prepared) -> None:
        """Compare a part with the ``bits`` it should have, in the order of its box."""
        wanted = cast(bits, spec.dtype, part.dtype)
        differ = np.flatnonzero(self.read(part) != wanted)
        self._expect(part, spec, self._digest_of_box(part, bits), prepared)
        prepared.changed += differ.size
        if _DENSE * differ.size > bits.size:
            prepared.wholes.setdefault(part.name, []).append(part)
        else:
            self._scatter(part, _in_storage(differ, part), wanted[differ], prepared)

    def _prepare_places(self, part: Part, spec: TensorSpec, pending: _Pending, prepared: Prepared) -> None:
        words = self._words[part.parameter]
        was = unsigned(words[torch.from_numpy(pending.where).to(words.device)].cpu())
        before = cast_back(was, spec.dtype, part.dtype)
        digest = self.fingerprint.get(part)
        if digest is not None and before is not None:
            digest = (digest + int(cpu.digest_change(pending.indices, before, pending.values))) % MODULUS
        self._expect(part, spec, None if before is None else digest, prepared)
        wanted = cast(pending.values, spec.dtype, part.dtype)
        differ = was != wanted
        prepared.changed += int(np.count_nonzero(differ))
        self._scatter(part, pending.where[differ], wanted[differ], prepared)

    def _scatter(self, part: Part, where: Places, values: Bits, prepared: Prepared) -> None:
        words = self._words[part.parameter]
        needed = where.nbytes + values.nbytes
        if prepared.room is not None and prepared.nbytes + needed > prepared.room:
            prepared.wholes.setdefault(part.name, []).append(part)
        elif where.size:
            there, new = torch.from_numpy(where).to(words.device), _words(values).to(words.device)
            prepared.scatters.append(Scatter(words, there, new))

    def _expect(self, part: Part, spec: TensorSpec, digest: int | None, prepared: Prepared) -> None:
        problem, rounded = "it was not digested before" if digest is None else None, False
        if (spec.dtype, part.dtype) in ROUNDED:
            digest, problem, rounded = None, _rounded(part, spec), True
        prepared.held.setdefault(spec.name, []).append(Held(part.box, digest, problem, rounded))
        prepared.fingerprint[part] = digest

    # -- apply -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def apply(self, prepared: Prepared, weights: Weights | None = None) -> None:
        """Write what was prepared; ``weights`` are what it leads to, and read where parts are written whole."""
        for scatter in prepared.scatters:
            scatter.apply()
        for name, parts in prepared.wholes.items():
            if weights is None:
                raise UsageError("the weights are needed for what is written whole", tensor=name)
            spec = self.layout.table[name]
            bits = weights.read(name)
            refuse_other_bits(spec, bits)
            for part in parts:
                box, expected = _box_of(bits, spec, part.box), prepared.fingerprint[part]
                if expected is not None and self._digest_of_box(part, box) != expected:
                    raise UsageError("the weights are not those that were prepared", tensor=name)
                self.write(part, box)
        self._settle(prepared.fingerprint)

    def _settle(self, digests: Mapping[Part, int | None]) -> None:
        for part, digest in digests.items():
            if digest is None:
                self.fingerprint.pop(part, None)
            else:
                self.fingerprint[part] = digest


class _Pending:
    """Overwrites of one part, later ones in the place of earlier ones."""

    def __init__(self) -> None:
        self.indices = self.where = np.empty(0, np.int64)
        self.values: Bits = np.empty(0, np.uint8)

    def add(self, where: Places, indices: Places, values: Bits) -> None:
        if not self.where.size:
            self.indices, self.where, self.values = indices, where, values
            return
        kept = ~np.isin(self.indices, indices, assume_unique=True)
        order = np.argsort(both := np.concatenate([self.indices[kept], indices]), kind="stable")
        self.indices = both[order]
        self.where = np.concatenate([self.where[kept], where])[order]
        self.values = np.concatenate([self.values[kept], values])[order]


def _box_of(bits: Bits, spec: TensorSpec, box: Box) -> Bits:
    """A box's elements from those of its tensor, flat."""
    slices = tuple(slice(one.start, one.last + 1, one.step) for one in box.ranges)
    return np.ascontiguousarray(bits.reshape(spec.shape)[slices]).reshape(-1)


def _in_storage(flat: Places, part: Part) -> Places:
    """Where the parameter's storage has elements of a box, counted in its own order."""
    where = np.full(flat.size, part.offset, np.int64)
    for one, stride in zip(reversed(part.box.ranges), reversed(part.strides), strict=True):
        where += flat % one.count * stride
        flat = flat // one.count
    return where


def _rounded(part: Part, spec: TensorSpec) -> str:
    return f"{part.dtype} in the engine is rounded from {spec.dtype}"


def _digest_here(steps: Steps, words: torch.Tensor) -> int:
    return int(places.digest_places(unsigned(words), steps.source, steps.target, steps.table))


def _digest_there(steps: Steps, words: torch.Tensor) -> int:
    """The same on any device, by operations of torch."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for index, at in _chunks(steps, words.device):
        total += mix(index, words[at]).sum()
    return int(total.item()) % MODULUS


def _chunks(steps: Steps, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Flat indices of the tensor and places of the parameter, so many at a time."""
    counts, there, here = steps.table.T.tolist()
    inner = next(k for k in range(len(counts)) if prod(counts[k + 1 :]) <= _CHUNK)
    width = prod(counts[inner + 1 :])
    rows = min(counts[inner], _CHUNK // width)

    def grid(strides: Sequence[int]) -> torch.Tensor:
        flat = torch.zeros(1, dtype=torch.int64, device=device)
        for count, stride in zip([rows, *counts[inner + 1 :]], strides[inner:], strict=True):
            flat = (flat[:, None] + torch.arange(count, device=device) * stride).reshape(-1)
        return flat

    sources, targets = grid(there), grid(here)
    for at in product(*map(range, counts[:inner]), range(0, counts[inner], rows)):
        size = min(rows, counts[inner] - at[-1]) * width
        source = steps.source + sum(i * stride for i, stride in zip(at, there, strict=False))
        target = steps.target + sum(i * stride for i, stride in zip(at, here, strict=False))
        yield sources[:size] + source, targets[:size] + target


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = (*model.named_buffers(remove_duplicate=False), *model.named_parameters(remove_duplicate=False))
    return dict(named)


def unsigned(words: torch.Tensor) -> Bits:
    """Words on this side as the unsigned integers they are; their own memory."""
    bits: Bits = words.numpy()
    return bits.view(f"<u{bits.itemsize}")


def _words(bits: Bits) -> torch.Tensor:
    bits = bits if bits.flags.writeable else bits.copy()
    return torch.from_numpy(bits.view("u1" if bits.itemsize == 1 else f"<i{bits.itemsize}"))
