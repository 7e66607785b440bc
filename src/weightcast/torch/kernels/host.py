"""Kernels for models in this machine's memory: numba's, on torch's own bytes.

Here memory is cheap and threads are not. The copy of a step is kept until the changes have been ranked against it in
the background, and its memory is reused, since fresh pages would cost more than the copy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch

from weightcast.format.coding import Coding
from weightcast.format.digest import MODULUS, tensor_digest
from weightcast.format.kernels import cpu
from weightcast.format.scan import Change, ranked
from weightcast.format.spec import TensorSpec
from weightcast.format.tasks import Found, compare_tensors
from weightcast.format.tensors import NARROW, Bits
from weightcast.format.workers import Workers
from weightcast.torch.batch import Batch, Copied, Kernels, Ledger, log_edits, replacement, unsigned, without_undone

SPAN = 1 << 20
"""Elements of a task."""


_WORTH_A_CALL = 1 << 16
"""Elements of a tensor that is compared in a call of its own: for fewer, the call takes longer than a copy."""


@dataclass(frozen=True, eq=False)
class Flips:
    """For each tensor: sorted flat indices, the old bits there, and the bits when they were found.

    ``old`` has all the old bits.
    """

    found: list[Found]
    old: Copied


class HostDelivered:
    """Implements `Delivered`. Ranks are computed when the changes are read, or when the old copy is needed again."""

    def __init__(
        self, found: list[Change], old: Copied, coding: Coding, is_shadow: bool, ledger: Ledger | None, workers: Workers
    ):
        gains = np.array([one.gain for one in found], np.uint64)
        self.gains = lambda: gains
        self._found, self._coding, self._is_shadow, self._workers = found, coding, is_shadow, workers
        self._ledger = ledger
        self._edited: dict[int, tuple[Bits, int]] = {}
        self._old: Copied | None = old
        self._lock = threading.Lock()

    def changes(self, replaced: Mapping[int, tuple[Bits, int]]) -> Iterator[Change]:
        self.finish()
        for i, (bits, digest) in replaced.items():
            if self._ledger is not None:
                self._ledger.replace(i, bits, digest)
        replaced = self._edited | dict(replaced)
        for i, one in enumerate(self._found):
            kept = replacement(one.spec, *replaced[i]) if i in replaced else without_undone(one)
            if kept is not None:
                yield kept

    def finish(self) -> None:
        """Stop using the old copy: rank against it and, if it is a shadow, update it."""
        with self._lock:
            old, self._old = self._old, None
            if old is None:
                return
            tensors = _bits_in(old)
            if self._ledger is not None:
                self._check(self._ledger, tensors)
            if self._coding.is_banded:
                self._found = self._rank(tensors)
            if self._is_shadow:
                for bits, one in zip(tensors, self._found, strict=True):
                    cpu.scatter(bits, one.indices, one.now)

    def _check(self, ledger: Ledger, tensors: list[Bits]) -> None:
        """Send a tensor whole if it was edited before the step began: its checksum or digest is not the ledger's."""
        every = range(len(tensors))
        sums = self._workers.stream(lambda i: _checksum(tensors[i], self._workers), every, self._size)
        checksums = np.array(list(sums), np.uint64)
        known = ledger.checksums
        suspects = every if known is None else np.flatnonzero(checksums != known).tolist()
        digests = {i: tensor_digest(tensors[i], self._workers) for i in suspects}
        wrong = [i for i, digest in digests.items() if digest != ledger.digests[i]]
        for i in wrong:
            ledger.digests[i] = digests[i]
        ledger.digests = ledger.digests + self.gains()
        moved = [cpu.checksum_change(one.indices, one.was, one.now) for one in self._found]
        ledger.checksums = checksums + np.array(moved, np.uint64)
        for i in wrong:
            one, bits = self._found[i], tensors[i].copy()
            cpu.scatter(bits, one.indices, one.now)
            self._edited[i] = bits, int(ledger.digests[i])
        log_edits([self._found[i].spec.name for i in wrong])

    def _size(self, i: int) -> int:
        return self._found[i].spec.elements

    def _rank(self, tensors: list[Bits]) -> list[Change]:
        changed = [i for i, one in enumerate(self._found) if one.indices.size]
        found = ranked([self._found[i] for i in changed], [tensors[i] for i in changed], self._coding, self._workers)
        by_tensor = dict(zip(changed, found, strict=True))
        return [by_tensor.get(i, one) for i, one in enumerate(self._found)]


class HostComparison:
    """Implements `Comparison`: reads a tensor where it is, and keeps only what changed; small ones are collected."""

    def __init__(self, batch: Batch, old: Copied, workers: Workers):
        self._batch, self._old, self._workers = batch, old, workers
        self._olds = _bits_in(old)
        self._small: dict[int, Bits] = {}
        self._found: dict[int, Found] = {}

    def add(self, i: int, tensor: torch.Tensor) -> None:
        new = unsigned(tensor.detach().cpu().contiguous().reshape(-1))
        if new.size < _WORTH_A_CALL:
            self._small[i] = new.copy()
        else:
            self._compare({i: new})

    def _compare(self, news: Mapping[int, Bits]) -> None:
        specs, olds = [self._batch.specs[i] for i in news], [self._olds[i] for i in news]
        found = _compared(self._batch, specs, olds, list(news.values()), self._workers)
        self._found.update(zip(news, found, strict=True))

    def flips(self) -> Flips:
        self._compare(self._small)
        return Flips([self._found[i] for i in range(len(self._olds))], self._old)


class HostKernels(Kernels[Flips]):
    """Kernels for models in host memory; the threads share the spans of a tensor."""

    def __init__(self, workers: Workers):
        self._workers = workers
        self._room = threading.local()
        self._rooms: WeakKeyDictionary[Batch, list[list[torch.Tensor]]] = WeakKeyDictionary()
        self._unfinished: WeakKeyDictionary[Copied, HostDelivered] = WeakKeyDictionary()

    def take(self, batch: Batch) -> Copied:
        copied = self._room_for(batch)
        taken, sources = _bits_in(copied), _bits_in(batch)

        def one(task: tuple[int, int]) -> None:
            i, first = task
            _wire(batch, sources[i][first : first + SPAN], taken[i][first : first + SPAN])

        self._workers.map(one, _spans(batch.sizes))
        return copied

    def _room_for(self, batch: Batch) -> Copied:
        rooms = self._rooms.setdefault(batch, [])
        copied = Copied(batch, rooms.pop()) if rooms else Copied.room(batch)
        finalize(copied, _give_back, rooms, copied.chunks).atexit = False
        return copied

    def differ(self, batch: Batch, old: Copied) -> Flips:
        self.settle(old)
        return Flips(_compared(batch, batch.specs, _bits_in(old), _bits_in(batch), self._workers), old)

    def begin(self, batch: Batch, old: Copied) -> HostComparison:
        self.settle(old)
        return HostComparison(batch, old, self._workers)

    def count(self, flips: Flips) -> int:
        return sum(one.indices.size for one in flips.found)

    def settle(self, copied: Copied) -> None:
        unfinished = self._unfinished.pop(copied, None)
        if unfinished is not None:
            unfinished.finish()

    def put(self, copied: Copied, flips: Flips) -> None:
        self.settle(copied)
        for bits, one in zip(_bits_in(copied), flips.found, strict=True):
            cpu.scatter(bits, one.indices, one.was)

    def deliver(
        self, batch: Batch, flips: Flips, coding: Coding, shadow: Copied | None, ledger: Ledger | None = None
    ) -> HostDelivered:
        # With a shadow, flips were found right before; without one, steps may have followed.
        found = flips.found if shadow is not None else self._as_now(batch, flips)
        changes = [
            Change(spec, one.indices, one.was, one.now, one.gain) for spec, one in zip(batch.specs, found, strict=True)
        ]
        old = flips.old if shadow is None else shadow
        delivered = HostDelivered(changes, old, coding, shadow is not None, ledger, self._workers)
        if shadow is not None:
            self._unfinished[shadow] = delivered
        return delivered

    def _as_now(self, batch: Batch, flips: Flips) -> list[Found]:
        """The flips with the bits that are there now."""
        sources = _bits_in(batch)

        def one(i: int) -> Found:
            indices, was = flips.found[i].indices, flips.found[i].was
            there, now = np.empty(indices.size, sources[i].dtype), np.empty_like(was)
            cpu.gather(sources[i], indices, 0, there)
            _wire(batch, there, now)
            return Found(indices, was, now, int(cpu.digest_change(indices, was, now)))

        return self._workers.map(one, range(len(sources)))

    def digests(self, batch: Batch) -> torch.Tensor:
        sources = _bits_in(batch)

        def one(task: tuple[int, int]) -> int:
            i, first = task
            bits = self._wire_span(batch, sources[i], first, min(SPAN, batch.sizes[i] - first))
            return int(cpu.digest_runs(bits, np.array([first], np.int64)))

        tasks, sums = _spans(batch.sizes), [0] * len(batch.sizes)
        for (i, _), part in zip(tasks, self._workers.map(one, tasks), strict=True):
            sums[i] += part
        return torch.from_numpy(np.array([total % (1 << 64) for total in sums], np.uint64).view(np.int64))

    def _wire_span(self, batch: Batch, source: Bits, first: int, size: int) -> Bits:
        """The wire bits of a span: its own memory if nothing is rounded, else a buffer of this thread."""
        span = source[first : first + size]
        if batch.narrow is None:
            return span
        room = getattr(self._room, "bytes", None)
        if room is None:
            room = self._room.bytes = np.empty(SPAN * 8, np.uint8)
        out: Bits = room[: size * batch.kind.word.itemsize].view(batch.kind.word)
        _wire(batch, span, out)
        return out


def _give_back(rooms: list[list[torch.Tensor]], chunks: list[torch.Tensor]) -> None:
    """Keep two: one for the copy in use, one for the copy that changes are ranked against."""
    if len(rooms) < 2:
        rooms.append(chunks)


def _checksum(bits: Bits, workers: Workers) -> int:
    parts = workers.map(lambda first: int(cpu.checksum(bits[first : first + SPAN], first)), range(0, bits.size, SPAN))
    return sum(parts) % MODULUS


def _spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The tensor and the first element of each span."""
    return [(i, first) for i, size in enumerate(sizes) for first in range(0, size, SPAN)]


def _bits_in(tensors: Batch | Copied) -> list[Bits]:
    """The memory of the tensors as unsigned integers."""
    return [unsigned(words) for words in tensors.words()]


def _compared(
    batch: Batch, specs: Sequence[TensorSpec], olds: Sequence[Bits], news: Sequence[Bits], workers: Workers
) -> list[Found]:
    """Compare tensors of a batch, rounded if it is."""
    return compare_tensors(specs, olds, news, workers, None if batch.narrow is None else NARROW[batch.narrow])


def _wire(batch: Batch, source: Bits, out: Bits) -> None:
    if batch.narrow is None:
        np.copyto(out, source)
    else:
        cpu.narrow(source, *NARROW[batch.narrow], out)
