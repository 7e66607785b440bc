"""Models whose processes each hold a part, or a copy: the boxes of checkpoint tensors that one rank publishes.

Every rank finds its boxes alone, from shapes, meshes and placements, which all ranks know. Nothing is sent or gathered.
Where several ranks hold the same box, one publishes it; all of them agree which, since all of them count the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import distributed, nn

from weightcast.errors import UsageError
from weightcast.format.boxes import Box, Held, Place, natural_strides, place_of, whole
from weightcast.format.spec import TensorSpec, TensorTable
from weightcast.format.workers import ONE, Workers
from weightcast.torch.batch import Slot
from weightcast.torch.coordinates import Made, Piece, coordinates_of, is_dtensor, memory_of
from weightcast.torch.model import LiveModel, WireDtypes, placements_of, unmade, wire_name


def is_sharded(model: nn.Module) -> bool:
    """Whether other processes hold other parts or copies of the model, as FSDP2, tensor parallelism and DDP have it.

    Needs no process group, and sends nothing.
    """
    return any(
        isinstance(module, nn.parallel.DistributedDataParallel)
        or _is_fsdp(module)
        or any(map(is_dtensor, [*module._parameters.values(), *module._buffers.values()]))
        for module in model.modules()
    )


def _is_fsdp(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on the module. By name: importing the class takes long."""
    return any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)


class ShardedModel(LiveModel):
    """What this rank publishes of a model: detectors work on it as on a small model.

    ``ranks`` are the global ranks that publish together, in the same order everywhere: all, if not given. ``table`` is
    this rank's own: the tensors of which it publishes a box, each with the box's shape.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: str | torch.dtype | None = None,
        table: TensorTable | None = None,
        workers: Workers = ONE,
        ranks: Sequence[int] | None = None,
    ):
        layout, wire = coordinates_of(model, sharded=True), WireDtypes(wire_name(dtype), table)
        specs = [wire.spec(one.name, one.shape, one.source.dtype) for one in layout.pieces]
        specs += [wire.spec(one.name, one.shape, one.dtype) for one in layout.made]
        self.whole = TensorTable.of(specs, layout.aliases)
        """The table of the whole model, the same on all ranks."""
        self.places: dict[str, Place] = {}
        """For each tensor of this rank's table: the whole tensor, and the box of it."""
        slots: list[Slot] = []
        self._dtensors: dict[str, torch.Tensor] = {}
        self._is_fsdp = any(map(_is_fsdp, layout.model.modules()))
        for share in _shares(self.whole, layout.pieces, layout.made, ranks):
            part = replace(share.place.spec, shape=share.place.box.shape)
            source = unmade(share.one) if isinstance(share.one, Made) else share.one.source
            slots.append(wire.slot(part.name, part.shape, source, share.offset))
            self.places[part.name] = share.place
        self._watch(layout, slots, workers)
        self._dtensors = {name: tensor for name, tensor in self._tensors().items() if is_dtensor(tensor)}

    def declare(self) -> tuple[Sequence[tuple[str, str, Box]], TensorTable | None]:
        """What this rank has, and the whole table."""
        return [Held(name, place.spec.dtype, place.box) for name, place in self.places.items()], self.whole

    def place(self, whole: TensorTable) -> None:
        """Take up the whole table that was agreed on, which is this one: nothing is to be done."""

    def _tensors(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers; the sharded parameter where FSDP2 has put an unsharded one for a while.

        FSDP2 registers the unsharded parameter for forward and backward, and may leave it there (after a forward
        without backward, or with `reshard_after_forward=False`). Then it puts back the very object that was there
        before, which is also the optimizer's: whatever else stands there meanwhile is not part of the checkpoint. There
        is no public way to ask for that object, but it is known from before, and the other one is told by its
        placements. `FSDPModule.reshard()` would bring it back too, at the price of another all-gather.
        """
        found = super()._tensors()
        if self._is_fsdp:
            for name, known in self._dtensors.items():
                if name in found and placements_of(found[name]) != placements_of(known):
                    found[name] = known
        self._dtensors = {name: found[name] for name in self._dtensors if name in found}
        return found


# -- shares ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Share:
    """What this rank publishes of one tensor of the checkpoint."""

    one: Piece | Made
    place: Place
    offset: int
    """Elements of this rank's memory of the source that are before the box, which is one run there."""


def _shares(
    table: TensorTable, pieces: Sequence[Piece], made: Sequence[Made], ranks: Sequence[int] | None
) -> list[_Share]:
    """This rank's shares. The largest tensors are given away first: what follows evens out the ranks' bytes."""
    if not distributed.is_initialized():
        hint = "Call torch.distributed.init_process_group() first, and destroy it last."
        raise UsageError("there is no process group to share the model in", hint=hint)
    rank = distributed.get_rank()
    everyone = tuple(range(distributed.get_world_size()) if ranks is None else ranks)
    if rank not in everyone:
        raise UsageError(f"rank {rank} is not one of those that publish", hint="Open the publisher on these only.")
    holders = _Holders(everyone)
    shares: list[_Share] = []
    boxes: dict[int, Box] = {}
    every: list[Piece | Made] = [*pieces, *made]
    for one in sorted(every, key=lambda one: (-table[one.name].nbytes, one.name.encode())):
        sources = one.sources if isinstance(one, Made) else (one.source,)
        if isinstance(one, Made) and any(map(is_dtensor, sources)):
            hint = (
                "Leave its parameters out of sharding (ignored_params= of fully_shard), or gather the model and stream"
                " it with StreamPublisher."
            )
            raise UsageError("the tensor is computed from parameters that are sharded", tensor=one.name, hint=hint)
        # Statistics in a buffer may differ between copies of a model, but belong together: they have one publisher.
        spreads = all(isinstance(source, nn.Parameter) for source in sources)
        spec = table[one.name]
        mine = holders.owner(one.name, sources[0], spreads, spec.nbytes, rank) == rank
        if isinstance(one, Piece) and is_dtensor(one.source):
            if id(one.source) not in boxes:
                boxes[id(one.source)] = _local_box(one.name, one.source)
            share = _part(spec, one, boxes[id(one.source)]) if spec.elements else None
        else:
            offset = one.offset if isinstance(one, Piece) else 0
            share = _Share(one, place_of(spec, whole(spec.shape)), offset) if spec.elements else None
        if mine and share is not None:
            shares.append(share)
    return shares


@dataclass(eq=False)
class _Copies:
    """The ranks that hold the same boxes of some tensors: one group for each box."""

    groups: list[tuple[int, ...]]
    loads: list[int]
    """What was given to the first, the second … rank of each group, in bytes of whole tensors."""

    def give(self, size: int, spreads: bool) -> int:
        """Which rank of each group publishes the next tensor: the one with least so far, or the first."""
        which = self.loads.index(min(self.loads)) if spreads else 0
        self.loads[which] += size
        return which


class _Holders:
    """Who publishes what, counted the same by everyone."""

    def __init__(self, ranks: tuple[int, ...]):
        self._ranks = ranks
        self._copies: dict[Any, _Copies] = {}

    def owner(self, name: str, source: torch.Tensor, spreads: bool, size: int, rank: int) -> int | None:
        """The rank that publishes the part of the tensor which this rank holds; None if it holds none."""
        if not is_dtensor(source):
            key, groups = None, [self._ranks]
        else:
            key, groups = self._groups(name, source)
        if key not in self._copies:
            self._copies[key] = _Copies(groups, [0] * max(map(len, groups)))
        copies = self._copies[key]
        which = copies.give(size, spreads)
        return next((group[which % len(group)] for group in copies.groups if rank in group), None)

    def _groups(self, name: str, source: Any) -> tuple[Any, list[tuple[int, ...]]]:
        mesh, placements = source.device_mesh, source.placements
        for placement in placements:
            _refuse_placement(name, placement)
        copied = [axis for axis, placement in enumerate(placements) if placement.is_replicate()]
        cut = [axis for axis in range(mesh.ndim) if axis not in copied]
        key = (mesh, tuple(copied))
        if key in self._copies:
            return key, self._copies[key].groups
        table, others = self._ranks_along(name, mesh)
        rows = table.permute(*cut, *copied, *others).reshape(prod(table.shape[axis] for axis in cut), -1)
        groups = [tuple(rank for rank in row if rank in self._ranks) for row in rows.tolist()]
        if not all(groups):
            hint = "Publish from all ranks of the model's mesh, or from one whole copy of it."
            raise UsageError("none of the ranks that publish holds a part of the tensor", tensor=name, hint=hint)
        return key, groups

    def _ranks_along(self, name: str, mesh: Any) -> tuple[torch.Tensor, list[int]]:
        """The global ranks along a mesh, and more axes along which others have copies of the tensors on it.

        Of a mesh that is a slice of another, such as the one for tensor parallelism in each of several replicas, every
        rank has the slice that it is in. The other slices are in the mesh that it was cut from.
        """
        ranks, root = mesh.mesh, _root_of(mesh)
        if set(self._ranks) <= set(ranks.flatten().tolist()) or root == mesh:
            return ranks, []
        at = torch.stack([(root.mesh == rank).nonzero()[0] for rank in ranks.flatten()])
        own = [axis for axis in range(root.ndim) if at[:, axis].unique().numel() > 1]
        others = [axis for axis in range(root.ndim) if axis not in own]
        slices = root.mesh.permute(*own, *others).reshape(prod(root.mesh.shape[axis] for axis in own), -1)
        if len(slices) != ranks.numel():
            hint = "Publish from the ranks of one of its copies only."
            raise UsageError("it cannot be told which ranks have copies of the tensor", tensor=name, hint=hint)
        row = torch.zeros(len(at), dtype=torch.int64)
        for axis in own:
            row = row * root.mesh.shape[axis] + at[:, axis]
        return slices[row].reshape(*ranks.shape, -1), [mesh.ndim]


def _root_of(mesh: Any) -> Any:
    """The mesh that it was cut from: no public API tells, and its name has changed."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed import device_mesh

    return device_mesh._mesh_resources.get_root_mesh(mesh)


def _refuse_placement(name: str, placement: Any) -> None:
    if placement.is_partial():
        hint = "Reduce it first: tensor.redistribute(placements=[Replicate()])."
        raise UsageError("the ranks hold summands of the tensor, not parts of it", tensor=name, hint=hint)
    if not placement.is_replicate() and type(placement).__name__ not in ("Shard", "_StridedShard"):
        hint = "Shard it with Shard(dim), or publish it whole, with StreamPublisher."
        raise UsageError(f"the placement {placement} is not supported", tensor=name, hint=hint)


# -- boxes -------------------------------------------------------------------------------------------------------------


def _part(spec: TensorSpec, one: Piece, local: Box) -> _Share | None:
    """What a piece and this rank's part of its DTensor have in common; None if nothing."""
    wanted = box_of_run(one.offset, prod(one.shape), one.source.shape)
    if wanted is None:
        raise _no_box(one.name, "the tensor is no box of its parameter")
    shared = _intersection(wanted, local)
    if shared is None:
        return None
    within = _reshaped(_relative(shared, wanted), wanted.shape, spec.shape)
    if within is None:
        raise _no_box(spec.name, "the part that a rank holds is no box of the tensor")
    # A piece has all of its parameter's inner dimensions: what is here of it is one run of what is here.
    offset = Place(TensorSpec(spec.name, spec.dtype, local.shape), _relative(shared, local)).first
    assert offset is not None
    return _Share(one, place_of(spec, within), offset)


def _no_box(name: str, problem: str) -> UsageError:
    hint = "Shard another dimension of its parameter (shard_placement_fn= of fully_shard), or leave it whole."
    return UsageError(problem, tensor=name, hint=hint)


def _local_box(name: str, source: Any) -> Box:
    """What this rank has of a DTensor; a box without elements if it has nothing."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = source.device_mesh, source.placements
    _refuse_scattered(name, tuple(source.shape), tuple(mesh.mesh.shape), tuple(placements))
    shape, offset = compute_local_shape_and_global_offset(source.shape, mesh, placements)
    held = memory_of(source)
    if prod(shape) != held.numel() or (held.numel() and tuple(held.shape) != tuple(shape)):
        problem = f"a rank holds {list(held.shape)} of the tensor, but by its placements {list(shape)}"
        raise UsageError(problem, tensor=name, hint="Make its dimensions divisible by the sizes of the mesh.")
    return Box.of(offset, shape) if held.numel() else Box.of([0] * source.ndim, [0] * source.ndim)


@lru_cache(maxsize=1024)
def _is_scattered(size: int, splits: tuple[tuple[Any, int], ...]) -> bool:
    """Whether some rank's indices along a dimension, split from the left to the right, have gaps."""
    parts = [torch.arange(size)]
    for placement, count in splits:
        along_first = type(placement)(0, **_split_factor(placement))
        parts = [some for part in parts for some in along_first._split_tensor(part, count, with_padding=False)[0]]
    return any(int(part[-1] - part[0]) != part.numel() - 1 for part in parts if part.numel())


def _split_factor(placement: Any) -> dict[str, int]:
    factor = getattr(placement, "split_factor", None)
    return {} if factor is None else {"split_factor": factor}


def _refuse_scattered(name: str, shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Any, ...]) -> None:
    """FSDP2 on top of tensor parallelism is split from the right to the left, by `_StridedShard`: mostly boxes."""
    for axis in {placement.dim for placement in placements if hasattr(placement, "split_factor")}:
        splits = [pair for pair in zip(placements, mesh, strict=True) if getattr(pair[0], "dim", None) == axis]
        if _is_scattered(shape[axis], tuple(splits)):
            raise _no_box(name, "the rows that a rank holds of the tensor lie apart")


def box_of_run(first: int, count: int, shape: Sequence[int]) -> Box | None:
    """The box that has these elements of a tensor, by flat index; None if it is no box. ``count`` is not 0."""
    offset, counts, rest, is_inside = [], [], first, False
    for size, stride in zip(shape, natural_strides(shape), strict=True):
        start, rest = divmod(rest, stride)
        length = size if is_inside else max(1, count // stride)
        if start + length > size:
            return None
        is_inside = is_inside or count >= stride
        offset.append(start)
        counts.append(length)
    return Box.of(offset, counts) if prod(counts) == count else None


def _intersection(a: Box, b: Box) -> Box | None:
    starts = [max(pair) for pair in zip(a.offset, b.offset, strict=True)]
    stops = [min(x.last, y.last) + 1 for x, y in zip(a.ranges, b.ranges, strict=True)]
    counts = [stop - start for start, stop in zip(starts, stops, strict=True)]
    return Box.of(starts, counts) if all(count > 0 for count in counts) else None


def _relative(box: Box, origin: Box) -> Box:
    return Box.of([a - b for a, b in zip(box.offset, origin.offset, strict=True)], box.shape)


def _reshaped(box: Box, shape: Sequence[int], to: Sequence[int]) -> Box | None:
    """A box of a tensor after a reshape; None if it is no box there."""
    if box.is_all_of(shape):
        return whole(to)
    if [size for size in shape if size > 1] == [size for size in to if size > 1]:
        long = (one for one, size in zip(box.ranges, shape, strict=True) if size > 1)
        return Box(tuple(next(long) if size > 1 else part for size, part in zip(to, whole(to).ranges, strict=True)))
    first = Place(TensorSpec("", "U8", tuple(shape)), box).first
    return None if first is None else box_of_run(first, box.elements, to)
