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
from weightcast.engine.part_digests import DigestReader, has_kernels
from weightcast.engine.prepared import PartChange, Places, Prepared, Scatter, Whole, unsigned, words_of
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
from weightcast.torch.strided import Strided

_CHUNK = 1 << 22
"""Elements processed at a time where that takes memory."""

DENSE = 3
"""A part of which more than a third changes is written whole: places would take more memory than elements."""

_FEW = 1 << 12
"""Elements that show most tensors not to be uniform."""

_UNKNOWN = "it was not digested before"


class LiveParameters:
    """The parameters and buffers of a worker's model, addressed by a layout.

    ``has_kernels`` says on which devices Triton digests them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layout: Layout,
        *,
        chunk: int = _CHUNK,
        has_kernels: Callable[[torch.device], bool] = has_kernels,
    ):
        self.layout = layout
        self._model, self._chunk = model, chunk
        self._reader = DigestReader[Part](chunk, has_kernels)
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

    def digest(self, spec: TensorSpec, remember: bool = True) -> list[BoxDigest]:
        """The digests of a tensor's boxes, from the bits that are there now."""
        (found,) = self.digest_each([spec], remember).values()
        return found

    @torch.no_grad()
    def digest_each(
        self, specs: Sequence[TensorSpec], remember: bool = True, between: Callable[[], None] = lambda: None
    ) -> dict[str, list[BoxDigest]]:
        """The same for several tensors. ``between`` is called between those that take time, and may raise."""
        for spec in specs:
            refuse_other_tensor(self.layout.table, spec)
        parts = [part for spec in specs for part in self.layout.locate(spec.name)]
        is_together = {part: self._reader.reads_together(self._words[part.parameter].device) for part in parts}
        found = self._digests_of([part for part in parts if is_together[part]])
        boxes: dict[str, list[BoxDigest]] = {}
        for spec in specs:
            mine = self.layout.locate(spec.name)
            if not all(is_together[part] for part in mine):
                between()
            found |= self._digests_of([part for part in mine if not is_together[part]])
            boxes[spec.name] = [found[part] for part in mine]
        if remember:
            self._remember(found)
        return boxes

    def digest_of_part(self, part: Part, spec: TensorSpec) -> BoxDigest:
        """From the bits that are there now."""
        return self._digests_of([part])[part]

    def _digests_of(self, parts: Sequence[Part]) -> dict[Part, BoxDigest]:
        table = self.layout.table
        same = {part: self.strided(part) for part in parts if part.dtype == table[part.name].dtype}
        digests: dict[Part, int | None] = {**self._reader.read(same)}
        for part in parts:
            if part not in same:
                digests[part] = self._digest_of_cast(part, table[part.name])
        problem = "the parameter holds a value that is not a cast of the tensor's dtype"
        return {part: _box_digest(part, table[part.name], digests[part], problem) for part in parts}

    def _digest_of_cast(self, part: Part, spec: TensorSpec) -> int | None:
        if (spec.dtype, part.dtype) in ROUNDED:
            return None
        bits = cast_back(self.read(part), spec.dtype, part.dtype)
        return None if bits is None else self._digest_of_box(part, bits)

    def digests_after(self, gains: Mapping[Part, int]) -> dict[Part, BoxDigest]:
        """Of parts that are not cast, once what adds this to each is written."""
        unread = {part: self.strided(part) for part in gains if part not in self.digests}
        before = {**self.digests, **self._reader.read(unread)}
        return {part: BoxDigest(part.box, (before[part] + gain) % MODULUS) for part, gain in gains.items()}

    def strided(self, part: Part) -> Strided:
        """Where a part is, or a part of one."""
        steps = self._steps.get(part) or part.steps(self.layout.table[part.name].shape)
        return Strided(self._words[part.parameter], steps.source, steps.target, steps.table)

    def _digest_of_box(self, part: Part, bits: Bits) -> int:
        """A part's digest, from its elements in the order of the box."""
        steps = self._steps[part].in_order()
        return int(places.digest_places(bits, steps.source, steps.target, steps.table))

    def read(self, part: Part) -> Bits:
        """A part's elements, in the order of its box."""
        return unsigned(self.view(part).reshape(-1).contiguous().cpu())

    def write(self, part: Part, bits: Bits) -> None:
        """Write a part's elements, in the order of its box, a few rows at a time."""
        target = self.view(part)
        target = target if target.ndim else target.reshape(1)
        row = prod(target.shape[1:])
        rows = max(1, self._chunk // row)
        for first in range(0, target.shape[0], rows):
            some = target[first : first + rows]
            new = cast(bits[first * row :][: some.numel()], self.layout.table[part.name].dtype, part.dtype)
            some.copy_(words_of(new).reshape(some.shape))

    def is_uniform(self, part: Part) -> bool:
        """Whether all its elements are equal; a single one is."""
        bits = self.view(part)
        first = bits[(0,) * bits.ndim]
        rows = bits.reshape(-1)[:_FEW] if bits.is_contiguous() else bits[:1]
        return bool((rows == first).all()) and bool((bits == first).all())

    def view(self, part: Part) -> torch.Tensor:
        """A part's elements where they are, as words in the shape of its box."""
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
        *,
        hold_wholes: bool = False,
    ) -> Prepared:
        """What staged patches, in this order, overwrite in the tensors of ``names``, or in all.

        It takes at most ``room`` bytes; ``between`` is called between tensors, and may raise. With ``hold_wholes``
        parts of which much changes are held, too, if there is room for them.
        """
        prepared = Prepared(room, hold_wholes)
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
        if DENSE * differ.size <= bits.size:
            self._scatter(part, _in_storage(differ, part), wanted[differ], prepared)
        elif prepared.holds_wholes and (prepared.left is None or wanted.nbytes <= prepared.left):
            prepared.wholes.append(self.whole_of(part, wanted))
        else:
            prepared.rewrites.setdefault(part.name, []).append(part)

    def _prepare_places(self, part: Part, patch: TensorPatch, prepared: Prepared) -> None:
        change = self.change_of(part, patch, self.digests.get(part))
        prepared.boxes[part] = change.box
        prepared.changed += change.where.size
        self._scatter(part, change.where, change.values, prepared)

    def change_of(self, part: Part, patch: TensorPatch, digest: int | None) -> PartChange:
        """What a patch changes in a part whose ``digest`` is this one now. Its old bits, if known, are the part's."""
        spec = patch.spec
        which, where = self._steps[part].translate(patch.indices)
        indices, values, before = patch.indices, patch.new, patch.old
        if which.size < indices.size:
            indices, values = indices[which], values[which]
            before = None if before is None else before[which]
        if before is None:
            was = self.gather(part, where)
            before = cast_back(was, spec.dtype, part.dtype)
        else:
            was = cast(before, spec.dtype, part.dtype)
        if digest is not None and before is not None:
            digest = (digest + int(cpu.digest_change(indices, before, values))) % MODULUS
        box = _box_digest(part, spec, None if before is None else digest, _UNKNOWN)
        wanted = cast(values, spec.dtype, part.dtype)
        differ = was != wanted
        if not differ.all():
            indices, where, wanted = indices[differ], where[differ], wanted[differ]
        return PartChange(indices, where, wanted, box)

    def patched(self, part: Part, change: PartChange) -> Bits:
        """A part's elements after a change, in the order of its box."""
        bits = self.read(part).copy()
        which, where = self._steps[part].in_order().translate(change.indices)
        bits[where] = change.values[which]
        return bits

    def bits_at(self, part: Part, indices: Places) -> tuple[Places, Bits]:
        """Which of some sorted flat indices of a tensor a part has, and the bits there."""
        which, where = self._steps[part].translate(indices)
        return which, self.gather(part, where)

    def gather(self, part: Part, where: Places) -> Bits:
        """Elements of the storage that a part is in."""
        words = self._words[part.parameter]
        if words.device.type != "cpu":
            return unsigned(words[torch.from_numpy(where).to(words.device)].cpu())
        bits = unsigned(words)
        found = np.empty(where.size, bits.dtype)
        cpu.gather(bits, where, 0, found)
        return found

    def _scatter(self, part: Part, where: Places, values: Bits, prepared: Prepared) -> None:
        left = prepared.left
        if left is not None and where.nbytes + values.nbytes > left:
            prepared.rewrites.setdefault(part.name, []).append(part)
        elif where.size:
            prepared.scatters.append(self.scatter_of(part, where, values))

    def scatter_of(self, part: Part, where: Places, values: Bits) -> Scatter:
        """Elements to write into a part's storage, on its device."""
        words = self._words[part.parameter]
        return Scatter(words, torch.from_numpy(where).to(words.device), words_of(values).to(words.device))

    def whole_of(self, part: Part, values: Bits) -> Whole:
        """All elements of a part to write, in the order of its box and the parameter's dtype, on its device."""
        target = self.view(part)
        return Whole(target, words_of(values).to(target.device))

    # -- apply -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def apply(self, prepared: Prepared, weights: Weights | None = None) -> None:
        """Write what was prepared; ``weights``, to which it leads, are needed where parts are written whole."""
        for write in prepared.writes:
            write.apply()
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
