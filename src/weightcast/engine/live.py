"""An engine's live parameters in checkpoint coordinates: digested, compared and patched in place.

Nothing is written until `LiveParameters.apply`: what has to be written is translated, cast, copied to the device and
verified beforehand, while the engine serves.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from math import prod

import numpy as np
import torch

from weightcast.engine.box_digests import BoxDigest
from weightcast.engine.casts import ROUNDED, cast, cast_back
from weightcast.engine.layout import Box, Layout, Part
from weightcast.engine.part_digests import digest_part
from weightcast.engine.prepared import Overwrites, Places, Prepared, Scatter, unsigned, words_of
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

_CHUNK = 1 << 22
"""Elements that are worked on at a time where that needs memory."""

_DENSE = 3
"""A part of which more than a third changes is written whole: places would weigh more than elements."""

Pause = Callable[[], None]


class LiveParameters:
    """The parameters and buffers of a worker's model, addressed by a layout."""

    def __init__(self, model: torch.nn.Module, layout: Layout, *, chunk: int = _CHUNK):
        self.layout = layout
        self._model, self._chunk = model, chunk
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
        self.digests: dict[Part, int] = {}
        """Digests of parts as they were found, and as patches changed them since."""

    @property
    def has_moved(self) -> bool:
        """Whether the engine has put other memory in the place of a parameter's."""
        tensors = _tensors(self._model)
        found = {name: tensors[name].untyped_storage() for name in self._storages if name in tensors}
        return {name: (one.data_ptr(), one.nbytes()) for name, one in found.items()} != self._storages

    # -- digests -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def digest(self, spec: TensorSpec, remember: bool = True) -> list[BoxDigest]:
        """The digests of a tensor's boxes, from the bits that are there now."""
        refuse_other_tensor(self.layout.table, spec)
        parts = self.layout.locate(spec.name)
        found = [self._digest_of_part(part, spec) for part in parts]
        if remember:
            self._remember({part: one.digest for part, one in zip(parts, found, strict=True)})
        return found

    def _digest_of_part(self, part: Part, spec: TensorSpec) -> BoxDigest:
        if part.dtype == spec.dtype:
            return BoxDigest(part.box, digest_part(self._steps[part], self._words[part.parameter], self._chunk))
        if (spec.dtype, part.dtype) in ROUNDED:
            return BoxDigest(part.box, None, _rounded(part, spec), rounded=True)
        bits = cast_back(self.read(part), spec.dtype, part.dtype)
        if bits is None:
            return BoxDigest(part.box, None, "the parameter holds a value that is no cast of the tensor's dtype")
        return BoxDigest(part.box, self._digest_of_box(part, bits))

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
        rows = max(1, self._chunk // row)
        for first in range(0, target.shape[0], rows):
            some = target[first : first + rows]
            new = cast(bits[first * row :][: some.numel()], self.layout.table[part.name].dtype, part.dtype)
            some.copy_(words_of(new).reshape(some.shape))

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
        """What staged patches, in this order, overwrite in the tensors of ``names``, or all.

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
            pending = Overwrites()
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
            prepared.rewrites.setdefault(part.name, []).append(part)
        else:
            self._scatter(part, _in_storage(differ, part), wanted[differ], prepared)

    def _prepare_places(self, part: Part, spec: TensorSpec, pending: Overwrites, prepared: Prepared) -> None:
        words = self._words[part.parameter]
        was = unsigned(words[torch.from_numpy(pending.where).to(words.device)].cpu())
        before = cast_back(was, spec.dtype, part.dtype)
        digest = self.digests.get(part)
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
            prepared.rewrites.setdefault(part.name, []).append(part)
        elif where.size:
            there, new = torch.from_numpy(where).to(words.device), words_of(values).to(words.device)
            prepared.scatters.append(Scatter(words, there, new))

    def _expect(self, part: Part, spec: TensorSpec, digest: int | None, prepared: Prepared) -> None:
        problem, rounded = "it was not digested before" if digest is None else None, False
        if (spec.dtype, part.dtype) in ROUNDED:
            digest, problem, rounded = None, _rounded(part, spec), True
        prepared.digests.setdefault(spec.name, []).append(BoxDigest(part.box, digest, problem, rounded))
        prepared.part_digests[part] = digest

    # -- apply -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def apply(self, prepared: Prepared, weights: Weights | None = None) -> None:
        """Write what was prepared; ``weights`` are what it leads to, and read where parts are written whole."""
        for scatter in prepared.scatters:
            scatter.apply()
        for name, parts in prepared.rewrites.items():
            if weights is None:
                raise UsageError("the weights are needed for what is written whole", tensor=name)
            spec = self.layout.table[name]
            bits = weights.read(name)
            refuse_other_bits(spec, bits)
            for part in parts:
                box, expected = _box_of(bits, spec, part.box), prepared.part_digests[part]
                if expected is not None and self._digest_of_box(part, box) != expected:
                    raise UsageError("the weights are not those that were prepared", tensor=name)
                self.write(part, box)
        self._remember(prepared.part_digests)

    def _remember(self, digests: Mapping[Part, int | None]) -> None:
        for part, digest in digests.items():
            if digest is None:
                self.digests.pop(part, None)
            else:
                self.digests[part] = digest


def _in_storage(flat: Places, part: Part) -> Places:
    """Where the parameter's storage has elements of a box, counted in its own order."""
    where = np.full(flat.size, part.offset, np.int64)
    for one, stride in zip(reversed(part.box.ranges), reversed(part.strides), strict=True):
        where += flat % one.count * stride
        flat = flat // one.count
    return where


def _rounded(part: Part, spec: TensorSpec) -> str:
    return f"{part.dtype} in the engine is rounded from {spec.dtype}"


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = (*model.named_buffers(remove_duplicate=False), *model.named_parameters(remove_duplicate=False))
    return dict(named)


def _box_of(bits: Bits, spec: TensorSpec, box: Box) -> Bits:
    """A box's elements from those of its tensor, flat."""
    slices = tuple(slice(one.start, one.last + 1, one.step) for one in box.ranges)
    return np.ascontiguousarray(bits.reshape(spec.shape)[slices]).reshape(-1)
