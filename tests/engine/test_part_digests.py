"""A part is digested alike on the host and on a device, however few elements are worked on at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from changes import changed  # noqa: E402
from sharded_engine import SHAPES, Engine, live_worker, staged, together, weights_of  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.engine.box_digests import combine  # noqa: E402
from weightcast.engine.layout import Steps  # noqa: E402
from weightcast.engine.live import LiveParameters  # noqa: E402
from weightcast.engine.part_digests import DigestReader, chunks, digest_on_device, digest_on_host  # noqa: E402
from weightcast.torch.strided import Strided  # noqa: E402

CPU = torch.device("cpu")


@given(
    st.lists(st.tuples(st.integers(1, 7), st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=4),
    st.integers(1, 60),
)
def test_chunks_cover_every_element_once(loops: list[tuple[int, int, int]], most: int) -> None:
    pieces = list(chunks(Steps(5, 9, np.array(loops, np.int64)), CPU, most))
    assert all(0 < source.numel() == target.numel() <= most for source, target in pieces)
    found = [torch.cat(side).tolist() for side in zip(*pieces, strict=True)]
    at = list(np.ndindex(*(count for count, _, _ in loops)))
    for side, first in ((1, 5), (2, 9)):
        wanted = [first + sum(i * loop[side] for i, loop in zip(one, loops, strict=True)) for one in at]
        assert found[side - 1] == wanted


def test_long_loop_is_walked_in_few_chunks() -> None:
    for loops in ([[1001, 1, 1]], [[3, 2000, 1], [990, 2, 3]], [[500, 7, 1], [2, 1, 500]]):
        assert 10 <= len(list(chunks(Steps(0, 0, np.array(loops)), CPU, 100))) <= 30


class Launched:
    """In place of a launch on a GPU: the digest of a part is its source."""

    def __init__(self, parts: list[Strided]):
        self._parts = parts

    def read(self) -> list[int]:
        return [part.source for part in self._parts]


class Key:
    """Of a part. While it is compared for the first time, another thread may read other parts."""

    def __init__(self, meanwhile: Callable[[], object] | None = None):
        self._meanwhile = meanwhile

    def __eq__(self, other: object) -> bool:
        act, self._meanwhile = self._meanwhile, None
        if act is not None:
            act()
        return isinstance(other, Key)

    def __hash__(self) -> int:
        return 1


def test_parts_that_are_read_by_two_threads_are_not_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("parts")
    module.PartDigests = Launched  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "weightcast.torch.kernels.parts", module)
    words, loops = torch.zeros(4, dtype=torch.int16), np.ones((1, 3), np.int64)
    mine, other = Strided(words, 1, 0, loops), Strided(words, 2, 0, loops)
    reader = DigestReader[Hashable](1, lambda _: True)
    first = Key(lambda: reader.read({"other": other}))
    assert [*reader.read({first: mine}).values()] == [1]
    assert [*reader.read({Key(): mine}).values()] == [1]


@pytest.mark.parametrize("most", [1, 7, 100, 1 << 22])
def test_device_digest_equals_the_host_digest(most: int) -> None:
    weights = weights_of(SHAPES)
    model, live = live_worker(Engine(1), weights)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    compared = 0
    for part in live.layout:
        if part.dtype == "BF16":
            storage = parameters[part.parameter].untyped_storage()
            words = torch.empty(0, dtype=torch.int16).set_(storage)
            steps = part.steps(weights.table[part.name].shape)
            assert digest_on_device(steps, words, most) == digest_on_host(steps, words)
            compared += 1
    assert compared > 10


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_parameters_are_digested_and_patched_as_on_the_host(tmp_path: Path) -> None:
    old = weights_of(SHAPES)
    model, live = live_worker(Engine(0, 1), old)
    there = LiveParameters(model.cuda(), live.layout)
    assert together([there], old)["q"].digest == wc.fingerprint(old)["q"]
    for density in (0.1, 1.0):
        new = changed(old, density, 3)
        prepared = there.prepare_patches([staged(old, new, tmp_path)])
        for name, boxes in prepared.digests.items():
            assert combine(new.table[name], boxes).digest == wc.fingerprint(new)[name]
        there.apply(prepared, new)
        assert {name: one.digest for name, one in together([there], new).items()} == {
            spec.name: wc.fingerprint(new)[spec.name] for spec in new.table
        }
        old = new
