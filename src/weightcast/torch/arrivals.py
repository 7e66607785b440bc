"""Tensors of streams as they arrive: checked against the channel's table, and collected in groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from weightcast.errors import UsageError
from weightcast.format.scan import WireDtype
from weightcast.format.spec import TensorSpec, TensorTable
from weightcast.format.tensors import NARROW
from weightcast.torch.batch import Comparison
from weightcast.torch.coordinates import DTYPES
from weightcast.torch.groups import Group, Kind, aligned, limit_on

Stream = Iterable[tuple[str, torch.Tensor]]

HEAD = "lm_head.weight"

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_NAMES_LISTED = 5
"""Most names of tensors in an error."""

_RESTART = "If it trains other parameters now, restart the trainer."
_OTHER_MODEL = (
    "Is this the channel of that model? If the checkpoint stores tensors in another form than the model, as with the"
    " experts of a mixture, pass the model as well: model=…."
)


@dataclass(eq=False)
class Arrivals:
    """Which tensors the streams of one sender have, and the memory in which they are collected.

    ``table`` is the channel's, if it exists. Without one, the first stream defines the tensors, and float32 is rounded
    to ``wire``.
    """

    table: TensorTable | None
    wire: WireDtype | None
    in_parts: bool
    """Whether shadows are kept elsewhere than the tensors."""
    begin: Callable[[Group], Comparison[Any] | None]
    """Begins the comparison of a group whose tensors are not to be copied."""
    where: dict[str, tuple[Group, int]] = field(default_factory=dict)
    """The group of each tensor that a stream had, and its index there."""
    copies: dict[str, str] = field(default_factory=dict)
    """Tensors that were taken for copies of others, by name: no stream may have them later."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Other names of tensors, of which the checkpoint has one, by what the model says."""
    doubles: dict[str, tuple[Group, str]] = field(default_factory=dict)
    """Of the stream under way: tied tensors that the channel does not have, and the one that it has of each."""
    _spare: torch.Tensor | None = None

    def groups(self, stream: Stream) -> Iterator[Group]:
        """Consume a stream; each group is yielded when all of its tensors have arrived."""
        expected, seen = set(self.where), set[str]()
        forming: dict[Kind, Group] = {}
        unknown: list[str] = []
        self.doubles.clear()
        for name, given in stream:
            if name in seen:
                raise UsageError("the trainer sent a tensor twice", tensor=name)
            seen.add(name)
            tensor = plain(name, given)
            if name in expected:
                group = self._receive(name, tensor)
                if group.is_whole:
                    yield group
            elif name not in self.table if self.table is not None else name in self.tied:
                if not self._is_double(name, tensor):
                    unknown.append(name)
            else:
                spec = self._spec_of(name, tensor, is_later=bool(expected))
                tensor = _widened(tensor, spec)
                kind = _kind(tensor, spec)
                full = forming.get(kind)
                if full is not None and not full.has_room_for(tensor.numel()):
                    yield forming.pop(kind)
                group = forming.setdefault(kind, Group(kind))
                self.where[name] = group, self._add(group, spec, tensor)
        self._refuse(unknown, expected - seen, bool(seen))
        yield from forming.values()

    def _receive(self, name: str, tensor: torch.Tensor) -> Group:
        """Compare or copy a tensor that streams had before."""
        group, i = self.where[name]
        spec, kind = group.slots[i].spec, group.kind
        _refuse_other_shape(tensor, spec)
        tensor = _widened(tensor, spec)
        if tensor.dtype != kind.dtype:
            own, was = DTYPES.get(tensor.dtype, tensor.dtype), DTYPES[kind.dtype]
            problem = f"the trainer sent {own}, before it sent {was}; the channel has {spec.dtype}"
            raise UsageError(problem, tensor=name, hint="If it trains in another dtype now, restart the trainer.")
        if group.room is None and group.comparison is None:
            group.comparison = self.begin(group)
            group.room = self._room(kind, group.used) if group.comparison is None else None
        group.receive(i, tensor)
        return group

    def _add(self, group: Group, spec: TensorSpec, tensor: torch.Tensor) -> int:
        """Copy a tensor that no stream had before into a group that is being formed."""
        if group.room is None:
            most = limit_on(group.kind, self.in_parts)
            group.room = self._room(group.kind, max(most, aligned(tensor.numel())))
        i = group.add(spec)
        group.receive(i, tensor)
        return i

    def _is_double(self, name: str, tensor: torch.Tensor) -> bool:
        """Keep a tied tensor, which the channel has only under another name, until both can be compared."""
        like = self._tied_to(name, tensor)
        if like is None or not _fits(tensor, like):
            return False
        spec, tensor = TensorSpec(name, like.dtype, like.shape), _widened(tensor, like)
        kind = _kind(tensor, spec)
        group = Group(kind, self._room(kind, aligned(tensor.numel())))
        self.doubles[name] = group, like.name
        self._add(group, spec, tensor)
        return True

    def _tied_to(self, name: str, tensor: torch.Tensor) -> TensorSpec | None:
        """What the channel has of a tied tensor: by what the model says, else the embedding of an output layer."""
        if (like := self.tied.get(name)) is not None and (self.table is None or like in self.table):
            return self._spec_of(like, tensor, is_later=False)
        shape = tuple(tensor.shape)
        alike = (spec for spec in self.table or () if spec.shape == shape and "embed" in spec.name)
        return next(alike, None) if name.endswith(HEAD) else None

    def forget(self, known: set[str]) -> None:
        """Forget what a stream that failed left behind, and all tensors that were not ``known`` before it."""
        for group, _ in self.where.values():
            self.free(group)
        self.doubles.clear()
        self.where = {name: self.where[name] for name in known}

    # -- rooms ---------------------------------------------------------------------------------------------------------

    def _room(self, kind: Kind, words: int) -> torch.Tensor:
        spare, nbytes = self._spare, words * kind.word.itemsize
        if kind.device.type == "cpu" and spare is not None and spare.numel() >= nbytes:
            self._spare = None
            return spare[:nbytes].view(kind.word)
        return torch.empty(words, dtype=kind.word, device=kind.device)

    def free(self, group: Group) -> None:
        """Free a group's room. On the host one is kept: fresh pages would cost more than the copy."""
        room = group.leave()
        if (
            room is not None
            and room.device.type == "cpu"
            and (self._spare is None or self._spare.numel() < room.nbytes)
        ):
            self._spare = room.view(torch.uint8)

    # -- what does not match -------------------------------------------------------------------------------------------

    def _spec_of(self, name: str, tensor: torch.Tensor, is_later: bool) -> TensorSpec:
        """What a tensor is in the channel that no stream had before."""
        own = DTYPES.get(tensor.dtype)
        if self.table is not None:
            spec = self.table[name]
            if name in self.copies:
                problem = f"the trainer did not send it before, and it was taken for a copy of {self.copies[name]}"
                raise UsageError(problem, tensor=name, hint=_RESTART)
            _refuse_other_shape(tensor, spec)
            if not _fits(tensor, spec):
                problem = f"the trainer sent {own or tensor.dtype}, the channel has {spec.dtype}"
                raise UsageError(problem, tensor=name, hint="Train in float32 or in the channel's dtype.")
            return spec
        if is_later:
            raise UsageError("the trainer sent a tensor that it did not send before", tensor=name)
        if own is None:
            raise UsageError(f"safetensors files cannot hold {tensor.dtype}", tensor=name)
        return TensorSpec(name, self.wire if own == "F32" and self.wire else own, tuple(tensor.shape))

    def _refuse(self, unknown: list[str], fewer: set[str], any_came: bool) -> None:
        if not any_came:
            raise UsageError("the trainer sent no tensors", hint="Is the whole model frozen?")
        if unknown:
            problem = f"the channel has no such tensor: {listed(unknown)}"
            raise UsageError(problem, tensor=unknown[0], hint=_OTHER_MODEL)
        if fewer:  # silently, these would keep their old bits
            problem = f"the trainer did not send tensors that it sent before: {listed(sorted(fewer))}"
            raise UsageError(problem, tensor=min(fewer), hint=_RESTART)


def plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory can be read as it is; `UsageError` for a shard, and for what is not in memory."""
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"expected a tensor, got {type(tensor).__name__}", tensor=name)
    is_plain = type(tensor) in _PLAIN or type(tensor.detach()) is torch.Tensor
    if not is_plain and hasattr(tensor, "full_tensor"):
        raise UsageError("the tensor is a shard", tensor=name, hint="Send its full_tensor(), from one rank.")
    if not is_plain or tensor.layout != torch.strided or tensor.is_meta:
        problem = f"expected a dense tensor in memory, got {type(tensor).__name__} ({tensor.layout}, {tensor.device})"
        raise UsageError(problem, tensor=name)
    return tensor.resolve_conj().resolve_neg()


def _fits(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    """Whether a tensor can be published in a dtype: its own, or by rounding float32, or by widening to it."""
    own, wanted = DTYPES.get(tensor.dtype), spec.dtype
    return own == wanted or (own == "F32" and wanted in NARROW) or (own in NARROW and wanted == "F32")


def _widened(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A half that the channel has as float32, as frameworks send that cast all they send; it loses nothing."""
    return tensor.float() if spec.dtype == "F32" and DTYPES.get(tensor.dtype) in NARROW else tensor


def _kind(tensor: torch.Tensor, spec: TensorSpec) -> Kind:
    return Kind(tensor.device, tensor.dtype, spec.dtype, narrow=DTYPES[tensor.dtype] != spec.dtype)


def _refuse_other_shape(tensor: torch.Tensor, spec: TensorSpec) -> None:
    if tuple(tensor.shape) != spec.shape:
        problem = f"the trainer sent shape {list(tensor.shape)}, the channel has {list(spec.shape)}"
        raise UsageError(problem, tensor=spec.name, hint=_OTHER_MODEL)


def listed(names: list[str]) -> str:
    """The first few names, for an error."""
    return ", ".join(names[:_NAMES_LISTED]) + (" …" if len(names) > _NAMES_LISTED else "")
