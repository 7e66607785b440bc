"""An engine's live parameters in checkpoint coordinates: digested, compared and patched in place.

Only `LiveParameters.apply` writes. What it writes is translated, cast, copied to the device and verified before, while
the engine serves.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import reduce
from math import prod

import numpy as np
import torch

from weightcast.engine.box_digests import BoxDigest
from weightcast.engine.casts import ROUNDED, cast, cast_back
from weightcast.engine.layout import Layout, Part
from weightcast.engine.part_digests import digest_part
from weightcast.engine.prepared import Places, Prepared, Scatter, unsigned, words_of
from weightcast.errors import UsageError
from weightcast.format.boxes import Box
from weightcast.format.codec import Coded, plain
from weightcast.format.digest import MODULUS
from weightcast.format.kernels import cpu, places
from weightcast.format.patch import TensorPatch, compose_tensor, refuse_other_tensor
from weightcast.format.patchfile import PatchReader
from weightcast.format.spec import TensorSpec, dtype_named
from weightcast.format.table import Row
from weightcast.format.tensors import Bits, Weights, refuse_other_bits
from weightcast.torch.batch import WORDS

_CHUNK = 1 << 22
"""Elements processed at a time where that takes memory."""

_DENSE = 3
"""A part of which more than a third changes is written whole: places would take more memory than elements."""

_UNKNOWN = "it was not digested before"


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
        found = {part: self._digest_of_part(part, spec) for part in self.layout.locate(spec.name)}
        if remember:
            self._remember(found)
        return list(found.values())

    def _digest_of_part(self, part: Part, spec: TensorSpec) -> BoxDigest:
        digest = None
        if part.dtype == spec.dtype:
            digest = digest_part(self._steps[part], self._words[part.parameter], self._chunk)
        elif (spec.dtype, part.dtype) not in ROUNDED:
            bits = cast_back(self.read(part), spec.dtype, part.dtype)
            digest = None if bits is None else self._digest_of_box(part, bits)
        return _box_digest(part, spec, digest, "the parameter holds a value that is not a cast of the tensor's dtype")

    def _digest_of_box(self, part: Part, bits: Bits) -> int:
        """A part's digest, from its elements in the order of the box."""
        steps = self._steps[part]
        table = steps.table.copy()
        table[:, 2] = [prod(table[k + 1 :, 0].tolist()) for k in range(len(table))]
        return int(places.digest_places(bits, steps.source, 0, table))

    def read(self, part: Part) -> Bits:
        """A part's elements, in the order of its box."""
        return unsigned(self._view(part).reshape(-1).cpu())

    def write(self, part: Part, bits: Bits) -> None:
        """Write a part's elements, in the order of its box, a few rows at a time."""
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
        between: Callable[[], None] = lambda: None,
    ) -> Prepared:
        """What staged patches, in this order, overwrite in the tensors of ``names``, or in all.

        It takes at most ``room`` bytes; ``between`` is called between tensors, and may raise.
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
                between()
                self._prepare_rows(self.layout.table[name], parts, [patch.coded(row) for patch, row in rows], prepared)
        return prepared

    def _prepare_rows(self, spec: TensorSpec, parts: Sequence[Part], rows: Sequence[Coded], prepared: Prepared) -> None:
        last = max((i for i, row in enumerate(rows) if "indices" not in row.streams), default=-1)
        later = [plain.decode_tensor(row, None) for row in rows[last + 1 :]]
        if last >= 0:
            whole = rows[last].streams["values"]
            for patch in later:
                patch.scatter(whole)
            for part in parts:
                self._prepare_box(part, spec, _box_of(whole, spec, part.box), prepared)
            return
        patch = reduce(compose_tensor, later)
        for part in parts:
            self._prepare_places(part, patch, prepared)

    @torch.no_grad()
    def prepare_weights(
        self,
        weights: Weights,
        specs: Iterable[TensorSpec],
        room: int | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> Prepared:
        """What differs from ``weights`` in some tensors, whatever the engine holds."""
        prepared = Prepared(room)
        for spec in specs:
            refuse_other_tensor(self.layout.table, spec)
            parts = self.layout.locate(spec.name)
            if not parts:
                continue
            between()
            bits = weights.read(spec.name)
            refuse_other_bits(spec, bits)
            for part in parts:
                self._prepare_box(part, spec, _box_of(bits, spec, part.box), prepared)
        return prepared

    def _prepare_box(self, part: Part, spec: TensorSpec, bits: Bits, prepared: Prepared) -> None:
        """Compare a part with the ``bits`` it should have, in the order of its box."""
        wanted = cast(bits, spec.dtype, part.dtype)
        differ = np.flatnonzero(self.read(part) != wanted)
        prepared.boxes[part] = _box_digest(part, spec, self._digest_of_box(part, bits), _UNKNOWN)
        prepared.changed += differ.size
        if _DENSE * differ.size > bits.size:
            prepared.rewrites.setdefault(part.name, []).append(part)
        else:
            self._scatter(part, _in_storage(differ, part), wanted[differ], prepared)

    def _prepare_places(self, part: Part, patch: TensorPatch, prepared: Prepared) -> None:
        spec, words = patch.spec, self._words[part.parameter]
        which, where = self._steps[part].translate(patch.indices)
        indices, values = patch.indices[which], patch.new[which]
        was = unsigned(words[torch.from_numpy(where).to(words.device)].cpu())
        before = cast_back(was, spec.dtype, part.dtype)
        digest = self.digests.get(part)
        if digest is not None and before is not None:
            digest = (digest + int(cpu.digest_change(indices, before, values))) % MODULUS
        prepared.boxes[part] = _box_digest(part, spec, None if before is None else digest, _UNKNOWN)
        wanted = cast(values, spec.dtype, part.dtype)
        differ = was != wanted
        prepared.changed += int(np.count_nonzero(differ))
        self._scatter(part, where[differ], wanted[differ], prepared)

    def _scatter(self, part: Part, where: Places, values: Bits, prepared: Prepared) -> None:
        words = self._words[part.parameter]
        needed = where.nbytes + values.nbytes
        if prepared.room is not None and prepared.nbytes + needed > prepared.room:
            prepared.rewrites.setdefault(part.name, []).append(part)
        elif where.size:
            there, new = torch.from_numpy(where).to(words.device), words_of(values).to(words.device)
            prepared.scatters.append(Scatter(words, there, new))

    # -- apply -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def apply(self, prepared: Prepared, weights: Weights | None = None) -> None:
        """Write what was prepared; ``weights``, to which it leads, are needed where parts are written whole."""
        for scatter in prepared.scatters:
            scatter.apply()
        for name, parts in prepared.rewrites.items():
            if weights is None:
                raise UsageError("the weights are needed for what is written whole", tensor=name)
            spec = self.layout.table[name]
            bits = weights.read(name)
            refuse_other_bits(spec, bits)
            for part in parts:
                box, expected = _box_of(bits, spec, part.box), prepared.boxes[part].digest
                if expected is not None and self._digest_of_box(part, box) != expected:
                    raise UsageError("the weights are not those that were prepared", tensor=name)
                self.write(part, box)
        self._remember(prepared.boxes)

    def _remember(self, boxes: Mapping[Part, BoxDigest]) -> None:
        for part, box in boxes.items():
            if box.digest is None:
                self.digests.pop(part, None)
            else:
                self.digests[part] = box.digest


def _in_storage(flat: Places, part: Part) -> Places:
    """Where a parameter's storage has the elements of a box, given by their flat indices in the box."""
    where = np.full(flat.size, part.offset, np.int64)
    for one, stride in zip(reversed(part.box.ranges), reversed(part.strides), strict=True):
        where += flat % one.count * stride
        flat = flat // one.count
    return where


def _box_digest(part: Part, spec: TensorSpec, digest: int | None, otherwise: str) -> BoxDigest:
    """``otherwise`` says why there is no digest, if there is none."""
    if (spec.dtype, part.dtype) in ROUNDED:
        return BoxDigest(part.box, None, f"{part.dtype} in the engine is rounded from {spec.dtype}", rounded=True)
    return BoxDigest(part.box, digest, otherwise if digest is None else None)


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict((*model.named_buffers(remove_duplicate=False), *model.named_parameters(remove_duplicate=False)))


def _box_of(bits: Bits, spec: TensorSpec, box: Box) -> Bits:
    """The elements of a box, flat, from those of its tensor."""
    slices = tuple(slice(one.start, one.last + 1, one.step) for one in box.ranges)
    return np.ascontiguousarray(bits.reshape(spec.shape)[slices]).reshape(-1)
