"""Measuring this machine's rates: a few syncs of a synthetic model through memory, phase by phase.

Each codec publishes two densities of a few large tensors and one of many small ones, to a follower that holds arrays.
The seconds of a phase are those that its events say, the least of a few rounds; three of them give the seconds for an
element, a change and a tensor.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from weightcast.estimate.rates import CODECS, PHASES, Rates, Work
from weightcast.events.event import Event
from weightcast.follow.subscriber import Subscriber
from weightcast.format.codec import CodecName
from weightcast.format.digest import fingerprint
from weightcast.format.tensors import Arrays, round_to
from weightcast.format.workers import Workers
from weightcast.publish.publisher import Publisher
from weightcast.store.memory import MemoryStore

_TENSOR, _LARGE = 1 << 24, 2
"""Elements of a large tensor, and how many there are: so large that memory for each comes fresh from the system, as in
large models."""
_SMALL = 512
"""Tensors of 1,024 elements: they show what a tensor costs beside its elements."""
_UPDATES = (1e-7, 1.6e-6)
"""Deviations of two updates: with the weights' of 0.03, 0.3 % and 4 % change."""
_ROUNDS = 2
_BYTES = 1 << 26


@dataclass(frozen=True)
class _Sample:
    """A sync of some weights, and what it took by phase."""

    elements: int
    changes: int
    tensors: int
    seconds: dict[str, float]


def measure(threads: int | None = None, elements: int = _TENSOR) -> Rates:
    """The rates of this machine, in some seconds; kernels should be ready. ``elements`` are those of a large tensor."""
    with Workers(threads) as workers:
        count = workers.threads
        large, small = _states(_LARGE, elements), _states(_SMALL, 1024)
        codecs = {codec: _fitted(_samples(codec, large, small, count)) for codec in CODECS}
        digest = _least(lambda: fingerprint(large[0], workers)) / large[0].table.elements
    data = np.arange(_BYTES // 8, dtype=np.int64)
    there, view = np.empty_like(data), data.data.cast("B")
    return Rates(
        hardware=f"{platform.machine()}, {os.cpu_count()} cores",
        threads=count,
        codecs=codecs,
        copy=_least(lambda: np.copyto(there, data)) / _BYTES,
        digest=digest,
        sha256=_least(lambda: hashlib.sha256(view).digest()) / _BYTES,
        disk=_disk(view),
    )


def _states(tensors: int, elements: int) -> list[Arrays]:
    """Weights, and the same after each of the updates. Tensors are one, turned: making them is most of the time."""
    rng = np.random.default_rng(1)
    master = rng.standard_normal(elements, np.float32) * np.float32(0.03)
    update = rng.standard_normal(elements, np.float32)
    found = []
    for size in (0.0, *_UPDATES):
        bits = round_to("BF16", master + np.float32(size) * update)
        arrays = {f"model.layers.{i}.weight": np.roll(bits, 1000 * i) for i in range(tensors)}
        found.append(Arrays(arrays, dict.fromkeys(arrays, "BF16")))
    return found


def _samples(codec: str, large: Sequence[Arrays], small: Sequence[Arrays], threads: int) -> list[_Sample]:
    """A small and a large change of large tensors, and the large one of small tensors."""
    return [*_synced(codec, large, (1, 2), threads), *_synced(codec, small, (2,), threads)]


def _synced(codec: str, states: Sequence[Arrays], wanted: Sequence[int], threads: int) -> list[_Sample]:
    """Syncs from the first state to each wanted one and back, several times; the least seconds of each phase."""
    events: list[Event] = []
    store, base = MemoryStore(), states[0]
    state_of: dict[int, int] = {}
    changes: dict[int, int] = {}
    publisher = Publisher(store, base, codec=cast(CodecName, codec), threads=threads, on_event=events.append)
    with publisher, Subscriber(store, Arrays.copy_of(base), threads=threads, on_event=events.append) as subscriber:
        subscriber.sync()
        for number in range(_ROUNDS + 1):
            for state in wanted:
                for to in (states[state], base):
                    manifest = publisher.publish(weights=to).result()
                    subscriber.sync()
                    changes[state] = manifest.changed
                    if number:  # the first one touches new memory
                        state_of[manifest.position.version] = state
    least: dict[int, dict[str, float]] = {state: {} for state in wanted}
    for event in events:
        if event.version in state_of:
            seconds = least[state_of[event.version]]
            seconds[event.phase] = min(seconds.get(event.phase, event.seconds), event.seconds)
    table = base.table
    return [_Sample(table.elements, changes[state], len(table), least[state]) for state in wanted]


def _fitted(samples: list[_Sample]) -> dict[str, Work]:
    return {phase: _fit(phase, *samples) for phase in PHASES}


def _fit(phase: str, few: _Sample, many: _Sample, small: _Sample) -> Work:
    """The work that explains three samples; what would be negative is noise, and is 0."""
    least, most, parts = (sample.seconds.get(phase, 0.0) for sample in (few, many, small))
    change = max(0.0, (most - least) / (many.changes - few.changes))
    element = max(0.0, (least - change * few.changes) / few.elements)
    tensor = max(0.0, (parts - change * small.changes - element * small.elements) / small.tensors)
    return Work(element, change, tensor)


def _least(action: Callable[[], object]) -> float:
    """The shortest of a few runs, in seconds: the one least disturbed."""
    found = []
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        action()
        found.append(time.perf_counter() - began)
    return min(found)


def _disk(data: memoryview) -> float:
    """Seconds to write and sync a byte, where temporary files go."""
    with tempfile.TemporaryDirectory() as folder:

        def write() -> None:
            with (Path(folder) / "file").open("wb", buffering=0) as file:
                file.write(data)
                os.fsync(file.fileno())

        return _least(write) / len(data)
