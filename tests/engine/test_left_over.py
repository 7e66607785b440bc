"""What a route changes in some tensors, as patches of these alone: the same bits as the whole route has there."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from cases import Bag, changes, moved
from changes import changed
from hypothesis import given
from hypothesis import strategies as st
from several import objects_of

import weightcast as wc
from weightcast.engine.left_over import stage_left_over
from weightcast.errors import ResultError, UsageError, WeightcastError
from weightcast.follow.replica import opened_patches
from weightcast.format.joined import JoinedPatch, open_objects
from weightcast.format.safetensors import BytesSource
from weightcast.format.tensors import Weights

SMALL = {"a": (40,), "b": (6, 5), "c": (3,)}


def weights(seed: int = 0) -> Bag:
    rng = np.random.default_rng(seed)
    specs = [wc.TensorSpec(name, "BF16", shape) for name, shape in SMALL.items()]
    return Bag({spec: rng.integers(0, 1 << 16, spec.elements).astype(np.uint16) for spec in specs})


def written(folder: Path, old: Weights, new: Weights, several: bool, codec: str) -> tuple[str, ...]:
    """The files of a version's objects."""
    patch = wc.diff(old, new)
    made = objects_of(patch, old) if several else [wc.encode(patch, codec, old=old)]
    paths = [folder / f"{patch.base[:16]}-{patch.result[:16]}-{number}" for number, _ in enumerate(made)]
    for path, data in zip(paths, made, strict=True):
        path.write_bytes(data)
    return tuple(map(str, paths))


@given(st.data(), changes(), st.integers(1, 3), st.booleans(), st.sampled_from(["plain", "gap", "banded"]))
def test_they_lead_to_the_bits_of_the_route_in_those_tensors_alone(
    data: st.DataObject, given_: tuple[Bag, Bag], count: int, several: bool, codec: str
) -> None:
    states = list(given_)
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    for _ in range(count - 1):
        states.append(states[-1].copy())
        for spec in states[-1].table:
            states[-1].write(spec.name, moved(rng, states[-1].read(spec.name), 0.1))
    table = states[0].table
    names = data.draw(st.sets(st.sampled_from([spec.name for spec in table]))) if len(table) else set()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        versions = [written(folder, old, new, several, codec) for old, new in pairwise(states)]
        paths = stage_left_over(states[0], wc.fingerprint(states[0]), versions, names, folder / "left-over")
        found = states[0].copy()
        at = wc.fingerprint(found)
        with opened_patches(map(Path, paths)) as patches:
            for patch in patches:
                assert {row.spec.name for row in patch.rows} <= names
                assert patch.rows
                at = wc.decode(Path(patch.name).read_bytes(), found).apply(found, at)
        for spec in table:
            wanted = states[-1] if spec.name in names else states[0]
            assert np.array_equal(found.read(spec.name), wanted.read(spec.name))


def test_weights_that_are_not_the_base_are_noticed_and_nothing_is_left(tmp_path: Path) -> None:
    old = weights()
    versions = [written(tmp_path, old, changed(old, 0.5, 1), False, "banded")]
    other = old.copy()
    other.read("a")[:] ^= 1
    with pytest.raises(WeightcastError):
        stage_left_over(other, wc.fingerprint(old), versions, {"a"}, tmp_path / "left-over")
    assert not list((tmp_path / "left-over").iterdir())


def test_what_an_earlier_route_left_is_deleted(tmp_path: Path) -> None:
    old, left = weights(), tmp_path / "left-over"
    new = changed(old, 0.5, 1, {"a"})
    versions = [written(tmp_path, old, new, False, "gap")]
    assert len(stage_left_over(old, wc.fingerprint(old), versions, {"a"}, left)) == 1
    assert stage_left_over(old, wc.fingerprint(old), versions, {"b"}, left) == ()
    assert not list(left.iterdir())


def test_part_of_a_patch_says_what_it_alone_leads_to() -> None:
    old = weights()
    new = changed(old, 0.5, 1)
    whole = JoinedPatch(open_objects([BytesSource(wc.encode(wc.diff(old, new), "gap"))]))
    part = whole.only({"b"}, wc.fingerprint(old))
    expected = old.copy()
    expected.write("b", new.read("b"))
    assert [row.spec.name for row in part.rows] == ["b"]
    assert (part.header.base, part.header.result) == (wc.fingerprint(old).digest, wc.fingerprint(expected).digest)
    assert [row.spec.name for row in whole.rows] == ["a", "b", "c"], "the whole is as it was"
    with pytest.raises((UsageError, ResultError)):
        whole.only({"b"}, wc.fingerprint(Bag({wc.TensorSpec("x", "BF16", (2,)): np.zeros(2, np.uint16)})))
