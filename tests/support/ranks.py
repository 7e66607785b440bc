"""Ranks of a sharded training as threads: messages through queues, and ranks that die or come late on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, Queue
from typing import Any, TypeVar

import numpy as np

import weightcast as wc
from weightcast.errors import PeerError
from weightcast.format.boxes import Box, place_of
from weightcast.format.spec import TensorSpec

T = TypeVar("T")


class Wires:
    """Queues between each two ranks."""

    def __init__(self, size: int, timeout: float = 30.0):
        self.size, self.timeout = size, timeout
        self.queues: list[list[Queue[bytes | None]]] = [[Queue() for _ in range(size)] for _ in range(size)]
        """From a rank to another."""

    def peers(self) -> list[ThreadPeers]:
        return [ThreadPeers(self, rank) for rank in range(self.size)]


class ThreadPeers:
    """Implements `Peers` between threads."""

    def __init__(self, wires: Wires, rank: int):
        self._wires, self.rank, self.size = wires, rank, wires.size
        self.dies_before: int | None = None
        """The message to or from another rank, counted from 0, before which this rank is gone."""
        self.stops_before: int | None = None
        """The same, but it hangs until the others have given up."""
        self.sent = self.received = 0
        """Bytes."""
        self.messages = 0
        """So far, to and from others."""
        self._lost: dict[int, PeerError] = {}

    def _alive(self) -> None:
        if self.dies_before is not None and self.messages >= self.dies_before:
            self.close()
            raise KilledError
        if self.stops_before is not None and self.messages >= self.stops_before:
            time.sleep(4 * self._wires.timeout)
            raise KilledError
        self.messages += 1

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def gather(self, mine: bytes) -> list[bytes] | None:
        if self.rank:
            self._put(mine, 0)
            return None
        return [mine, *self._from_all(1)]

    def share(self, data: bytes | None) -> bytes:
        if self.rank:
            # Rank 0 has waited for a late rank before the others give up, and tells them which one it is.
            return self._get(0, 2)
        assert data is not None
        for rank in self._others():
            self._put(data, rank)
        return data

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        for rank in self._others():
            self._put(parts[rank], rank)
        found = self._from_all(1)
        found.insert(self.rank, parts[self.rank])
        return found

    def _from_all(self, waits: int) -> list[bytes]:
        found, lost = [], None
        for rank in self._others():
            try:
                found.append(self._get(rank, waits))
            except PeerError as error:
                lost = lost or error
        if lost is not None:
            raise lost
        return found

    def _put(self, data: bytes, rank: int) -> None:
        self._alive()
        self.sent += len(data)
        self._wires.queues[self.rank][rank].put(data)

    def _get(self, rank: int, waits: int) -> bytes:
        self._alive()
        if rank in self._lost:
            raise self._lost[rank]
        queue = self._wires.queues[rank][self.rank]
        try:
            data = queue.get(timeout=self._wires.timeout * waits)
        except Empty:
            self._lost[rank] = PeerError(f"rank {rank} did not come in time", rank=rank)
            raise self._lost[rank] from None
        if data is None:
            self._lost[rank] = PeerError(f"rank {rank} is gone", rank=rank)
            raise self._lost[rank]
        self.received += len(data)
        return data

    def close(self) -> None:
        """What comes from this rank ends."""
        for queue in self._wires.queues[self.rank]:
            queue.put(None)


class KilledError(BaseException):
    """Ends a thread of a rank without a word, as SIGKILL does a process."""


def on_ranks(size: int, act: Callable[[int, ThreadPeers], T], timeout: float = 30.0) -> list[T | BaseException]:
    """Run ``act`` on a thread for each rank; what it returned or raised, in the order of ranks."""

    def run(peers: ThreadPeers) -> T | BaseException:
        try:
            return act(peers.rank, peers)
        except BaseException as error:  # noqa: BLE001 - compared by the test
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, Wires(size, timeout).peers()))


SHAPES: dict[str, tuple[int, ...]] = {"a": (37, 24), "b": (8, 40), "norm": (24,), "scale": (), "experts": (4, 6, 10)}


def bits_at(step: int, density: float = 0.1) -> dict[str, np.ndarray]:
    """A bf16 model of some hundred weights after so many steps; about a tenth moves in each."""
    rng = np.random.default_rng(0)
    found = {}
    for name, shape in SHAPES.items():
        floats = np.asarray(0.02 * rng.standard_normal(shape), np.float32)
        found[name] = np.asarray(floats.view(np.uint32) >> 16, np.uint16)
    for number in range(1, step + 1):
        change = np.random.default_rng(number)
        for array in found.values():
            array[...] += (change.random(array.shape) < density).astype(np.uint16)
    return found


def whole(step: int) -> wc.Arrays:
    """The same, unsharded."""
    arrays = bits_at(step)
    return wc.Arrays(arrays, dict.fromkeys(arrays, "BF16"))


def boxes_of(rank: int, size: int) -> list[tuple[str, Box]]:
    """The boxes of one rank: `a` by uneven rows, `b` by columns, `experts` by expert, the rest on one rank each."""

    def along(axis: int, name: str) -> list[tuple[str, Box]]:
        shape = SHAPES[name]
        chunk = -(-shape[axis] // size)
        begin, end = min(rank * chunk, shape[axis]), min((rank + 1) * chunk, shape[axis])
        offset = [begin if i == axis else 0 for i in range(len(shape))]
        return [(name, Box.of(offset, [end - begin if i == axis else n for i, n in enumerate(shape)]))] * (end > begin)

    alone = [(name, Box.of([0] * len(SHAPES[name]), SHAPES[name])) for name in ("norm", "scale")]
    return [
        *along(0, "a"),
        *along(1, "b"),
        *along(0, "experts"),
        *(alone[:1] if rank == 0 else alone[1:] * (rank == 1)),
    ]


class Shard:
    """The weights of one rank, which train in step with the others."""

    def __init__(self, rank: int, size: int, step: int = 0):
        self.boxes = (
            boxes_of(rank, size) if size > 1 else [(name, Box.of([0] * len(s), s)) for name, s in SHAPES.items()]
        )
        self.arrays = [self._part(bits_at(step), name, box) for name, box in self.boxes]
        self.weights = wc.Shards(
            [(name, box, array) for (name, box), array in zip(self.boxes, self.arrays, strict=True)],
            dict.fromkeys(SHAPES, "BF16"),
        )

    def at(self, step: int) -> None:
        """Train to a step."""
        bits = bits_at(step)
        for (name, box), array in zip(self.boxes, self.arrays, strict=True):
            array[...] = self._part(bits, name, box)

    @staticmethod
    def _part(bits: dict[str, np.ndarray], name: str, box: Box) -> np.ndarray:
        spec = TensorSpec(name, "BF16", SHAPES[name])
        return place_of(spec, box).read(bits[name].reshape(-1)).reshape(box.shape).copy()


def errors_of(found: Sequence[Any]) -> list[BaseException]:
    return [one for one in found if isinstance(one, BaseException)]


def started(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread
