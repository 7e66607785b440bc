"""How many copies of a model a publisher makes in memory when it opens; the caller's own is not counted."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_store import ScriptedStore

import weightcast as wc

TENSORS, ELEMENTS = 16, 1 << 19
MODEL = TENSORS * ELEMENTS * 4
MOST = 2.5
"""One copy, and the buffers of a download, which hold all of a file as small as this one."""


def values(step: int = 0, every: int = 1) -> dict[str, np.ndarray]:
    """Step 0 of a model of 32 MB; other steps differ in each ``every``-th element."""
    rng = np.random.default_rng(0)
    found = {f"layer_{i}": rng.standard_normal(ELEMENTS, dtype=np.float32) for i in range(TENSORS)}
    for array in found.values():
        array.view(np.uint32)[::every] += np.uint32(step)
    return found


def copies_to_open(channel: Path, weights: Any, **options: Any) -> float:
    """The peak of what Python and numpy allocate, in models, and then a publish that must lead to the weights."""
    tracemalloc.start()
    try:
        publisher = wc.Publisher(channel, weights, threads=1, **options)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    with publisher:
        publisher.publish().result()
    return peak / MODEL


def followed(channel: Path) -> wc.Arrays:
    held = wc.Arrays(values())
    with wc.Subscriber(channel, held, threads=1) as subscriber:
        subscriber.sync()
    return held


@pytest.mark.parametrize(("step", "every"), [(0, 1), (1, 100), (1, 1)], ids=["the head", "a little", "everything"])
def test_arrays_are_copied_once_when_a_publisher_opens(step: int, every: int, tmp_path: Path) -> None:
    wc.init(tmp_path / "channel", wc.Arrays(values()))
    mine = wc.Arrays(values(step, every))
    assert copies_to_open(tmp_path / "channel", mine) < MOST
    assert wc.fingerprint(followed(tmp_path / "channel")) == wc.fingerprint(mine)


def test_arrays_are_copied_once_when_a_publisher_begins_a_channel(tmp_path: Path) -> None:
    assert copies_to_open(tmp_path / "channel", wc.Arrays(values())) < MOST


def test_model_is_copied_once_when_a_publisher_opens(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    wc.init(tmp_path / "channel", wc.Arrays(values()))
    mine = values(1, 100)
    model = torch.nn.ParameterDict({name: torch.from_numpy(array) for name, array in mine.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert copies_to_open(tmp_path / "channel", model, optimizer=optimizer) < MOST
    assert wc.fingerprint(followed(tmp_path / "channel")) == wc.fingerprint(wc.Arrays(mine))


def test_updates_that_wait_hold_no_copies_of_the_model(tmp_path: Path) -> None:
    """While one update is sent and another waits, the publisher holds its own copy, and what changed."""
    arrays = values()
    store = ScriptedStore()
    with wc.Publisher(store, wc.Arrays(arrays), threads=1) as publisher:
        upload = store.hang("put", "deltas/")
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(4):
                for array in arrays.values():
                    array.view(np.uint32)[::100] += np.uint32(1)
                publisher.publish()
            held = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
            upload.end()
    assert held < 0.5 * MODEL
