"""From a stream of a model's tensors to one of its checkpoint's.

transformers holds the experts of a mixture fused, and saves them apart; it also renames, splits and computes others. A
framework streams what the model holds. Here each tensor is cut into views under the checkpoint's names as it arrives;
only what is computed from several tensors waits, in a copy, for the last of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import torch

from weightcast.errors import UsageError
from weightcast.torch.arrivals import Stream, listed, plain
from weightcast.torch.coordinates import Conversion, Piece, coordinates_in
from weightcast.torch.structure import structure_of

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")

_OTHER_STRUCTURE = "Pass the model that is trained, or one of the same configuration."


@dataclass(eq=False)
class _Computed:
    """Tensors of the checkpoint that are computed together from some of the model's."""

    conversion: Conversion
    names: list[str] = field(default_factory=list)


@dataclass(eq=False)
class _Source:
    """A tensor of the model; ``names`` are several if it is tied."""

    shape: tuple[int, ...]
    names: list[str] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    computed: list[_Computed] = field(default_factory=list)

    def cut(self, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The pieces of a tensor that has arrived, not copied."""
        if [piece.shape for piece in self.pieces] == [self.shape]:
            yield self.pieces[0].name, tensor
            return
        flat = tensor.reshape(-1)
        for piece in self.pieces:
            yield piece.name, flat.narrow(0, piece.offset, prod(piece.shape)).view(piece.shape)


class Translation:
    """What a model's structure says of its checkpoint: names, ties, and where each tensor comes from."""

    def __init__(self, model: torch.nn.Module):
        structure = structure_of(model)
        layout = coordinates_in(structure)
        self.write_configs = layout.write_configs
        """Writes the files that loaders need beside the weights into a folder."""
        self._names = frozenset(one.name for found in (layout.pieces, layout.made) for one in found)
        self.aliases: Mapping[str, str] = layout.aliases
        """Of a plain module's tied tensors, as a table has them."""
        self._sources: dict[str, _Source] = {}
        sources: dict[int, _Source] = {}
        for tensors in (structure.named_parameters, structure.named_buffers):
            for name, tensor in tensors(remove_duplicate=False):
                source = sources.setdefault(id(tensor), _Source(tuple(tensor.shape)))
                source.names.append(name)
                self._sources[name] = source
        for piece in layout.pieces:
            sources[id(piece.source)].pieces.append(piece)
        computed: dict[Conversion, _Computed] = {}
        for made in layout.made:
            conversion = made.making
            assert isinstance(conversion, Conversion)
            if conversion not in computed:
                computed[conversion] = _Computed(conversion)
                for tensor in made.sources:
                    sources[id(tensor)].computed.append(computed[conversion])
            computed[conversion].names.append(made.name)
        self.tied = {
            name: source.pieces[0].name
            for source in sources.values()
            if len(source.names) > 1 and [piece.shape for piece in source.pieces] == [source.shape]
            for name in source.names
            if name not in self._names
        }
        """The other names of tied tensors that a stream may have as well."""

    def translate(self, stream: Stream) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint's tensors, as those of the model arrive; views of these, of any order, dtype and device.

        A tied tensor has the checkpoint's name the first time, one of its other names after that. What is named as in
        the checkpoint passes, and what the checkpoint does not have is dropped.
        """
        seen, first = set[str](), dict[_Source, str]()
        waiting: dict[_Computed, dict[str, torch.Tensor]] = {}
        for given, sent in stream:
            name = self._without_wrappers(given)
            if name in seen:
                raise UsageError("the trainer sent a tensor twice", tensor=name)
            seen.add(name)
            source = self._sources.get(name)
            if source is None:
                if name not in self._names:
                    raise UsageError("the model has no such tensor", tensor=given, hint=_OTHER_STRUCTURE)
                yield name, sent
                continue
            tensor = plain(name, sent).detach()
            if tuple(tensor.shape) != source.shape:
                problem = f"the trainer sent shape {list(tensor.shape)}, the model has {list(source.shape)}"
                raise UsageError(problem, tensor=name, hint=_OTHER_STRUCTURE)
            if source in first:
                alias = name if name in self.tied else first[source]
                if alias in self.tied:
                    yield alias, tensor
                continue
            first[source] = name
            yield from source.cut(tensor)
            for computed in source.computed:
                yield from _compute(computed, source, tensor, waiting)
        for computed, came in waiting.items():
            absent = sorted(computed.conversion.sources.keys() - came.keys())
            problem = f"it is computed from tensors of which the trainer did not send {listed(absent)}"
            raise UsageError(problem, tensor=computed.names[0], hint="Train all of them, or none.")

    def _without_wrappers(self, name: str) -> str:
        """A tensor's name in the bare model: streams may name wrappers that the model was put into later."""
        if name in self._sources or name in self._names:
            return name
        parts = [part for part in name.split(".") if part not in _WRAPPERS]
        bare = ".".join(parts)
        return bare if bare in self._sources else ".".join(part for part in parts if part != "module")

    def refuse_missing(self, arrived: Collection[str]) -> None:
        """`UsageError` if a stream that begins a channel does not have the whole checkpoint."""
        if missing := sorted(self._names - set(arrived)):
            problem = f"the channel does not exist yet, and the trainer did not send {listed(missing)}"
            hint = "Begin the channel with the whole checkpoint: `weightcast init URL CHECKPOINT`."
            raise UsageError(problem, tensor=missing[0], hint=hint)


def _compute(
    computed: _Computed, source: _Source, tensor: torch.Tensor, waiting: dict[_Computed, dict[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that need this one, if all others that they need are there; else keep it for them."""
    wanted = computed.conversion.sources.keys()
    came = waiting.setdefault(computed, {})
    is_last = len(came) + 1 == len(wanted)
    came[next(name for name in source.names if name in wanted)] = tensor if is_last else tensor.clone()
    if is_last:
        found = computed.conversion.tensors(waiting.pop(computed))
        for name in computed.names:
            yield name, found[name].contiguous()
