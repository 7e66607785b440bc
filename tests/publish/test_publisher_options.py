"""What a publisher is given is checked when it is made, before anything is uploaded; and how much memory that takes."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightcast as wc
from weightcast.errors import UsageError
from weightcast.store.file import FileStore
from weightcast.store.memory import MemoryStore


def arrays() -> wc.Arrays:
    return wc.Arrays({"w": np.zeros(3, np.float32)})


def module() -> Any:
    return pytest.importorskip("torch").nn.Linear(4, 8)


WRONG = {
    "codec": ("bandd", "no codec 'bandd'.*'plain', 'gap', 'banded'"),
    "detect": ("magic", "no detector 'magic'.*'transient', 'device', 'host'"),
    "dtype": ("bfloat16", "published as 'bfloat16'.*'BF16', 'F16'"),
}


@pytest.mark.parametrize("option", WRONG)
@pytest.mark.parametrize("make", [arrays, module])
def test_unknown_choice_is_refused_with_the_choices_before_anything_is_uploaded(make: Any, option: str) -> None:
    store = MemoryStore("options")
    value, problem = WRONG[option]
    with pytest.raises(UsageError, match=problem):
        wc.Publisher(store, make(), **{option: value})
    assert list(store.list("")) == []


@pytest.mark.parametrize("weights", [{"w": np.zeros(3, np.float32)}, None, 7, [np.zeros(3)]])
def test_argument_that_is_not_weights_is_refused_with_the_remedy(weights: Any) -> None:
    store = MemoryStore("options")
    kind = type(weights).__name__
    with pytest.raises(UsageError, match=rf"expected weights \(wc.Arrays, a folder or a torch module\), got {kind}"):
        wc.Publisher(store, weights)
    assert list(store.list("")) == []


def model(seed: int, tensors: int = 64, elements: int = 1 << 18) -> wc.Arrays:
    rng = np.random.default_rng(seed)
    return wc.Arrays({f"layer.{i:02}": rng.standard_normal(elements).astype(np.float32) for i in range(tensors)})


@pytest.mark.parametrize("known", [True, False], ids=["older version", "unknown weights"])
def test_opening_with_other_weights_than_the_heads_takes_two_copies_of_the_model(known: bool, tmp_path: Path) -> None:
    """One is the detector's, one becomes the head's weights; the rest is what changed, and a few tensors at a time."""
    store, weights = FileStore(tmp_path / "bucket"), model(0)
    wc.init(store, weights)
    with wc.Publisher(store, weights, threads=1) as publisher:
        publisher.publish(weights=moved(weights, 0.01)).result(60)
    ours = weights if known else moved(weights, 0.02)
    tracemalloc.start()
    try:
        with wc.Publisher(store, ours, threads=1) as publisher:
            _, peak = tracemalloc.get_traced_memory()
            assert publisher.publish().result(60).position.version == 2
    finally:
        tracemalloc.stop()
    parts = 0 if known else 1  # a download holds a part of the file in memory, which is all of this small one
    assert peak / weights.table.nbytes < 2.5 + parts


def moved(weights: wc.Arrays, share: float) -> wc.Arrays:
    """The same weights but for some elements."""
    rng = np.random.default_rng(int(1000 * share))
    other = wc.Arrays.copy_of(weights)
    for spec in other.table:
        bits = other.read(spec.name)
        bits[rng.random(bits.size) < share] ^= 1
    return other
