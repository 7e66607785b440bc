"""A detector for weights that arrive as a stream of (name, tensor), whole, each time they are published.

    stream ─▶ groups ─ differ from their shadows ─▶ changes, on their way to the host
                                      └─▶ shadows, brought on

On the host a tensor is compared as it arrives, and not copied; on a device, when its group is whole.

A group's shadow is on its own device, or in pinned memory of the host. A stream that is refused or interrupted leaves
all of them as they were.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightcast.errors import UsageError
from weightcast.format.coding import Coding
from weightcast.format.scan import Change, Detect, Scan
from weightcast.format.spec import TensorTable
from weightcast.format.tensors import Bits
from weightcast.format.workers import Workers
from weightcast.torch.arrivals import Arrivals, Stream
from weightcast.torch.batch import Comparison, Copied, Delivered, Kernels, Sums, unsigned
from weightcast.torch.detectors import ModelScan
from weightcast.torch.groups import Group, free_memory
from weightcast.torch.model import kernels_for, wire_name, words_of
from weightcast.torch.transit import PinnedCopy, sums_in_transit
from weightcast.torch.translation import Translation

_log = logging.getLogger("weightcast")

SHARE = 0.25
"""Of a GPU's free memory when the first stream begins, for shadows: training may not have reached its peak yet."""


@dataclass(frozen=True, eq=False)
class _Compared:
    """A group that was compared with its shadow."""

    group: Group
    delivered: Delivered
    live: Sums | None
    """Digests of the tensors as they arrived."""


class Streamed:
    """The weights of the last stream, and the detector of what the next one changes.

    ``table`` is the channel's, if it exists: tensors of it that no stream has, such as frozen ones, keep the bits given
    to `fill`. Without a table, the first stream defines it, and float32 is rounded to ``dtype``. With a ``translation``
    streams have the tensors of a model, not those of its checkpoint.
    """

    is_adapter = False

    @torch.inference_mode(False)  # what is kept is written to later, outside of it
    @torch.no_grad()
    def __init__(
        self,
        first: Stream,
        table: TensorTable | None = None,
        dtype: str | torch.dtype | None = None,
        detect: Detect | None = None,
        *,
        coding: Coding,
        workers: Workers,
        translation: Translation | None = None,
    ):
        self._translation = translation
        tied = translation.tied if translation is not None else {}
        self._arrivals = Arrivals(table, wire_name(dtype), in_parts=detect == "host", begin=self._begin, tied=tied)
        self._detect, self._coding, self._workers = detect, coding, workers
        self._kernels: dict[torch.device, Kernels[Any]] = {}
        self._left: dict[torch.device, float] = {}
        """Bytes that shadows may still take on a device."""
        self._digests: dict[Group, npt.NDArray[np.uint64]] = {}
        """Of the shadows on devices: memory there can be lost while a trainer sleeps."""
        self._others: dict[str, Bits] = {}
        self._tied: dict[str, str] = {}
        self._is_broken = False
        for group in self._groups(first):
            kernels = self._kernels_on(group)
            self._keep(group, kernels.take(group.batch))
            if (live := self._live_digests(group)) is not None:
                self._digests[group] = live()
            self._arrivals.free(group)
        for name in self._take_doubles():
            if name not in tied:
                _log.warning("%s is a copy of the embedding, which is all that the channel has of it", name)
        if table is None:
            if translation is not None:
                translation.refuse_missing(self._arrivals.where)
            specs = [group.slots[i].spec for group, i in self._arrivals.where.values()]
            table = TensorTable.of(specs, translation.aliases if translation is not None else {})
        self.table = table

    # -- the weights ---------------------------------------------------------------------------------------------------

    @property
    def weights(self) -> Streamed:
        return self

    @property
    def missing(self) -> list[str]:
        """Tensors of the channel that no stream had."""
        return [spec.name for spec in self.table if spec.name not in self._arrivals.where]

    def fill(self, others: Mapping[str, Bits], tied: Mapping[str, str]) -> None:
        """Set the bits of missing tensors; a ``tied`` one always has those of another tensor."""
        self._others, self._tied = dict(others), dict(tied)
        self._arrivals.copies = self._tied

    def read(self, name: str) -> Bits:
        name = self._tied.get(name, name)
        return unsigned(self._wire_bits(name).cpu()) if name in self._arrivals.where else self._others[name]

    def _wire_bits(self, name: str) -> torch.Tensor:
        group, i = self._arrivals.where[name]
        assert group.shadow is not None
        if isinstance(group.shadow, Copied):
            self._kernels_on(group).settle(group.shadow)
        return group.shadow.tensor(i)

    def save_beside(self, folder: Path) -> None:
        """Write the configuration of the model, if it is known."""
        if self._translation is not None:
            self._translation.write_configs(folder)

    # -- scan ----------------------------------------------------------------------------------------------------------

    def _groups(self, stream: Stream) -> Iterator[Group]:
        return self._arrivals.groups(stream if self._translation is None else self._translation.translate(stream))

    @torch.inference_mode(False)
    @torch.no_grad()
    def scan(self, stream: Stream | None = None) -> Scan:
        """Find what a stream changes; without one, nothing. `UsageError` if it does not match the table."""
        if self._is_broken:
            raise UsageError("a stream was interrupted, and so was undoing it", hint="Open a new publisher.")
        if stream is None:
            return ModelScan(self.table, [])
        known, done = set(self._arrivals.where), list[_Compared]()
        undo: list[tuple[Group, Any]] = []
        try:
            for group in self._groups(stream):
                if group.shadow is None:
                    self._keep(group, self._as_before(group))
                done.append(self._compare(group, undo))
            self._take_doubles()
            digests = {one.group: one.live() for one in done if one.live is not None}
            found = [one.delivered.changes(self._replaced(one, digests.get(one.group))) for one in done]
        except BaseException:
            self._is_broken = True
            self._undo(undo, known)
            self._is_broken = False
            raise
        self._digests |= digests
        for name in self._arrivals.where.keys() - known:
            del self._others[name]
        return ModelScan(self.table, [self._with_tied(changes) for changes in found])

    def _begin(self, group: Group) -> Comparison[Any] | None:
        """Begin to compare a group as it arrives, if its device's kernels can."""
        if not isinstance(group.shadow, Copied):
            return None
        return self._kernels_on(group).begin(group.batch, group.shadow)

    def _compare(self, group: Group, undo: list[tuple[Group, Any]]) -> _Compared:
        """Find what changed in a whole group, and bring its shadow on; ``undo`` gets the flips before that."""
        kernels, old = self._kernels_on(group), group.load()
        flips = group.comparison.flips() if group.comparison is not None else kernels.differ(group.batch, old)
        undo.append((group, flips))
        live = self._live_digests(group)  # sent before what the codec needs: the sender waits for these alone
        delivered = kernels.deliver(group.batch, flips, self._coding, old)
        kernels.rest(group.batch)
        group.store(old)
        self._arrivals.free(group)
        return _Compared(group, delivered, live)

    def _live_digests(self, group: Group) -> Sums | None:
        """Digests of a group's tensors as they arrived; None on the host, where memory is not lost."""
        on_host = group.kind.device.type == "cpu"
        return None if on_host else sums_in_transit(self._kernels_on(group).digests(group.batch))

    def _replaced(self, one: _Compared, digests: npt.NDArray[np.uint64] | None) -> dict[int, tuple[Bits, int]]:
        """The tensors whose shadow was lost since the last stream: they are sent whole."""
        expected, names = self._digests.get(one.group), one.group.names
        if digests is None or expected is None:
            return {}
        wrong = np.flatnonzero(digests != expected + one.delivered.gains()).tolist()
        for i in wrong:
            _log.warning("the GPU's copy of %s was overwritten since the last stream: published whole", names[i])
        return {i: (self.read(names[i]).copy(), int(digests[i])) for i in wrong}

    def _undo(self, flipped: list[tuple[Group, Any]], known: set[str]) -> None:
        """Bring shadows back to where they were before a stream, and forget tensors that were not ``known``."""
        for group, flips in flipped:
            old = group.load()
            self._kernels_on(group).put(old, flips)
            group.store(old)
        self._arrivals.forget(known)

    def _take_doubles(self) -> list[str]:
        """Drop tied tensors that the channel has under another name; `UsageError` if the two differ."""
        doubles = self._arrivals.doubles
        for name, (group, like) in doubles.items():
            wire = self._kernels_on(group).take(group.batch).tensor(0)
            if like not in self._arrivals.where or not _same(wire, self._wire_bits(like)):
                problem = f"the channel does not have it, and it is not a copy of {like}"
                raise UsageError(problem, tensor=name, hint="Begin another channel with this model's weights.")
            self._arrivals.free(group)
        names = list(doubles)
        doubles.clear()
        return names

    def _with_tied(self, changes: Iterator[Change]) -> Iterator[Change]:
        for change in changes:
            yield change
            for name, other in self._tied.items():
                if other == change.spec.name:
                    yield replace(change, spec=self.table[name])

    def close(self) -> None:
        self._arrivals = Arrivals(None, None, in_parts=False, begin=self._begin)
        self._others, self._digests = {}, {}

    # -- shadows -------------------------------------------------------------------------------------------------------

    def _keep(self, group: Group, copied: Copied) -> None:
        """Keep a group's shadow on its device, or in pinned memory."""
        device = group.kind.device
        size = sum(chunk.nbytes for chunk in copied.chunks)
        if device.type == "cuda" and self._detect is None:
            self._left.setdefault(device, SHARE * (free_memory(device) + size))
        away = device.type == "cuda" and (self._detect == "host" or self._left.get(device, size) < size)
        if not away and device in self._left:
            self._left[device] -= size
        group.shadow = PinnedCopy(copied) if away else copied

    def _as_before(self, group: Group) -> Copied:
        """The bits that the tensors of a new group had, which no stream had before."""
        copied = Copied.room(group.batch)
        for words, name in zip(copied.words(), group.names, strict=True):
            words.copy_(words_of(self._others[name]))
        return copied

    def _kernels_on(self, group: Group) -> Kernels[Any]:
        device = group.kind.device
        if device not in self._kernels:
            self._kernels[device] = kernels_for(device, self._workers)
        return self._kernels[device]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other.to(one.device))
