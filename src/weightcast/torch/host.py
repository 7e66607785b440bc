"""Kernels for models in this machine's memory: numba's, on torch's own bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from weightcast.bits import Bits, TensorSpec
from weightcast.codec.ranks import SPAN, Ranks, rank
from weightcast.detect import Change
from weightcast.kernels import cpu
from weightcast.patch import Indices
from weightcast.torch.batch import Batch, Copied, change_of, replacement
from weightcast.workers import Workers

_FORMATS = {"BF16": (7, 8), "F16": (10, 5)}


@dataclass(frozen=True, eq=False)
class Flips:
    """Per tensor: sorted flat indices, and the bits that were there."""

    places: list[tuple[Indices, Bits]]


@dataclass(eq=False)
class HostDelivered:
    found: list[tuple[TensorSpec, Indices, Bits, Bits, int, Ranks | None]]
    gains: torch.Tensor

    def changes(self, replaced: Mapping[int, tuple[Bits, int]]) -> Iterator[Change]:
        for i, (spec, indices, was, now, gain, ranks) in enumerate(self.found):
            change = change_of(spec, indices, was, now, gain, ranks)
            if i in replaced:
                yield replacement(spec, *replaced[i])
            elif change is not None:
                yield change


class HostKernels:
    """Implements `Kernels`; threads share a tensor's spans."""

    def __init__(self, workers: Workers):
        self._workers = workers
        self._room = threading.local()

    def take(self, batch: Batch) -> Copied:
        copied = Copied.room(batch)
        taken = [_unsigned(words) for words in copied.words()]
        sources = bits_in(batch)
        tasks = [(i, first) for i, size in enumerate(batch.sizes) for first in range(0, size, SPAN)]

        def one(task: tuple[int, int]) -> None:
            i, first = task
            _wire(batch, sources[i][first : first + SPAN], taken[i][first : first + SPAN])

        self._workers.map(one, tasks)
        return copied

    def differ(self, batch: Batch, old: Copied) -> Flips:
        sources = bits_in(batch)
        olds = [_unsigned(words) for words in old.words()]
        tasks = [(i, first) for i, size in enumerate(batch.sizes) for first in range(0, size, SPAN)]

        def one(task: tuple[int, int]) -> tuple[Indices, Bits]:
            i, first = task
            before = olds[i][first : first + SPAN]
            after = self._wire_span(batch, sources[i], first, before.size)
            # Room for every element: pages that are never written are never allocated.
            indices, was, now = np.empty(before.size, np.int64), np.empty_like(before), np.empty_like(before)
            n = cpu.changes(before, after, first, indices, was, now)
            return indices[:n].copy(), was[:n].copy()

        pieces: list[list[tuple[Indices, Bits]]] = [[] for _ in batch.sizes]
        for (i, _), piece in zip(tasks, self._workers.map(one, tasks), strict=True):
            pieces[i].append(piece)
        empty = (np.empty(0, np.int64), np.empty(0, batch.kind.word))
        joined = [zip(*(parts or [empty]), strict=True) for parts in pieces]
        return Flips([tuple(np.concatenate(part) for part in both) for both in joined])  # type: ignore[misc]

    def count(self, flips: Flips) -> int:
        return sum(indices.size for indices, _ in flips.places)

    def put(self, copied: Copied, flips: Flips) -> None:
        for words, (indices, was) in zip(copied.words(), flips.places, strict=True):
            cpu.scatter(_unsigned(words), indices, was)

    def deliver(self, batch: Batch, flips: Flips, ranked: bool, shadow: Copied | None) -> HostDelivered:
        shadows = [_unsigned(words) for words in shadow.words()] if shadow is not None else None
        found: list[tuple[TensorSpec, Indices, Bits, Bits, int, Ranks | None]] = []
        for i, (spec, source, (indices, was)) in enumerate(zip(batch.specs, bits_in(batch), flips.places, strict=True)):
            there = np.empty(indices.size, source.dtype)
            cpu.gather(source, indices, 0, there)
            now = np.empty(indices.size, batch.kind.word)
            _wire(batch, there, now)
            gain = int(cpu.digest_change(indices, was, now))
            ranks = self._rank(batch, spec, source, indices, was, now) if ranked and indices.size else None
            if shadows is not None:
                cpu.scatter(shadows[i], indices, now)
            found.append((spec, indices, was, now, gain, ranks))
        gains = np.array([gain for *_, gain, _ in found], np.uint64).view(np.int64)
        return HostDelivered(found, torch.from_numpy(gains))

    def _rank(self, batch: Batch, spec: TensorSpec, source: Bits, indices: Indices, was: Bits, now: Bits) -> Ranks:
        def old(first: int, size: int) -> Bits:
            bits = self._wire_span(batch, source, first, size, fresh=True)
            low, high = np.searchsorted(indices, (first, first + size))
            cpu.scatter(bits, indices[low:high] - first, was[low:high])
            return bits

        return rank(spec, indices, was, now, old, self._workers)

    def digests(self, batch: Batch) -> torch.Tensor:
        tasks = [(i, first) for i, size in enumerate(batch.sizes) for first in range(0, size, SPAN)]
        sources = bits_in(batch)

        def one(task: tuple[int, int]) -> int:
            i, first = task
            bits = self._wire_span(batch, sources[i], first, min(SPAN, batch.sizes[i] - first))
            return int(cpu.digest_runs(bits, np.array([first], np.int64)))

        sums = [0] * len(batch.sizes)
        for (i, _), part in zip(tasks, self._workers.map(one, tasks), strict=True):
            sums[i] += part
        return torch.from_numpy(np.array([total % (1 << 64) for total in sums], np.uint64).view(np.int64))

    def _wire_span(self, batch: Batch, source: Bits, first: int, size: int, fresh: bool = False) -> Bits:
        """Wire bits of a span: the memory itself where nothing is rounded, else a thread's own room."""
        span = source[first : first + size]
        if batch.narrow is None and not fresh:
            return span
        room = getattr(self._room, "bytes", None)
        if room is None:
            room = self._room.bytes = np.empty(SPAN * 8, np.uint8)
        out: Bits = room[: size * batch.kind.word.itemsize].view(batch.kind.word)
        _wire(batch, span, out)
        return out


def bits_in(batch: Batch) -> list[Bits]:
    """The memory of a batch's tensors as unsigned integers."""
    return [_unsigned(words) for words in batch.words()]


def _unsigned(words: torch.Tensor) -> Bits:
    bits: Bits = words.numpy()
    return bits.view(f"<u{bits.itemsize}")


def _wire(batch: Batch, source: Bits, out: Bits) -> None:
    if batch.narrow is None:
        np.copyto(out, source)
    else:
        cpu.narrow(source, *_FORMATS[batch.narrow], out)
