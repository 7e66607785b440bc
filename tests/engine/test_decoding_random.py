"""Any layout, any objects, any damage: a worker decodes, or refuses, what a mirror does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from boxed import columns, encode_cut
from cases import Bag, moved, random_bits
from hypothesis import assume, given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from several import objects_of  # noqa: E402
from sharded_engine import memory, model_of, staged  # noqa: E402
from surgery import with_stream  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.engine.box_digests import combine  # noqa: E402
from weightcast.engine.casts import ROUNDED  # noqa: E402
from weightcast.engine.decoding import Version, prepare_coded  # noqa: E402
from weightcast.engine.layout import Layout, Part  # noqa: E402
from weightcast.engine.live import LiveParameters  # noqa: E402
from weightcast.errors import FormatError, ResultError, WeightcastError  # noqa: E402
from weightcast.format.boxes import Box, Range, natural_strides, place_of  # noqa: E402
from weightcast.format.coding import cut_tensor  # noqa: E402
from weightcast.format.joined import joined, open_objects  # noqa: E402
from weightcast.format.patch import verify_tensor  # noqa: E402
from weightcast.format.patchfile import encode_boxes  # noqa: E402
from weightcast.format.safetensors import BytesSource  # noqa: E402
from weightcast.format.spec import TensorSpec  # noqa: E402
from weightcast.format.workers import ONE  # noqa: E402

CODECS = ("plain", "gap", "banded")
CASTS = [("BF16", "BF16"), ("BF16", "F32"), ("F16", "F32"), ("F32", "F32"), ("F32", "BF16"), ("F32", "F16")]
TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass
class Piece:
    """A part, and how long the storage is that it lies in."""

    part: Part
    size: int


@st.composite
def storages(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...], int]:
    """Offset, strides and size of a storage that holds a box: its dimensions in any order, with gaps."""
    order = draw(st.permutations(range(len(shape))))
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis] + draw(st.integers(0, 2))
    offset = draw(st.integers(0, 3))
    return offset, tuple(strides), offset + step


@st.composite
def tensors(draw: st.DrawFn, name: str) -> tuple[TensorSpec, list[list[Piece]]]:
    """A tensor cut along one dimension, in turns or in rows, whose pieces one worker or both hold."""
    dtype, parameter = draw(st.sampled_from(CASTS))
    spec = TensorSpec(name, dtype, tuple(draw(st.lists(st.integers(1, 6), max_size=3))))
    ranges = [Range(0, size) for size in spec.shape]
    axis = draw(st.integers(0, len(ranges) - 1)) if ranges else None
    pieces = [ranges]
    if axis is not None:
        size, count = spec.shape[axis], draw(st.integers(1, 3))
        if draw(st.booleans()):
            cut = [Range(i, len(range(i, size, count)), count) for i in range(min(count, size))]
        else:
            edges = [size * i // count for i in range(count + 1)]
            cut = [Range(a, b - a) for a, b in pairwise(edges) if b > a]
        pieces = [[*ranges[:axis], one, *ranges[axis + 1 :]] for one in cut]
    workers: list[list[Piece]] = [[], []]
    for i, box in enumerate(map(Box, map(tuple, pieces))):
        for rank in draw(st.sampled_from([[0], [1], [0, 1]])):
            offset, strides, size = draw(storages(box.shape))
            workers[rank].append(Piece(Part(name, box, f"{name}_{i}", parameter, offset, strides), size))
    return spec, workers


def worker_of(pieces: Sequence[Piece], weights: Bag) -> tuple[torch.nn.Module, LiveParameters]:
    """A worker with the weights, digested."""
    model = model_of(
        **{one.part.parameter: torch.empty(one.size, dtype=TORCH[one.part.dtype]) for one in pieces},
    )
    live = LiveParameters(model, Layout(weights.table, [one.part for one in pieces], {}))
    for one in pieces:
        spec = weights.table[one.part.name]
        box = tuple(slice(along.start, along.last + 1, along.step) for along in one.part.box.ranges)
        live.write(one.part, np.ascontiguousarray(weights.read(spec.name).reshape(spec.shape)[box]).reshape(-1))
    for spec in weights.table:
        live.digest(spec)
    return model, live


def finite(rng: np.random.Generator, spec: TensorSpec) -> np.ndarray:
    """binary16 NaNs are not cast exactly, and rounded ones are one."""
    values = rng.normal(0, 0.02, spec.elements).astype(np.float32)
    return values.view(np.uint32) if spec.dtype == "F32" else wc.round_to(spec.dtype, values)


def next_state(draw: st.DrawFn, rng: np.random.Generator, old: Bag) -> Bag:
    new = old.copy()
    for spec in old.table:
        density = draw(st.sampled_from([0.0, 0.1, 0.3, 1.0]))
        new.write(spec.name, moved(rng, old.read(spec.name), density, draw(st.sampled_from([1, 30]))))
    return new


def version_of(draw: st.DrawFn, old: Bag, new: Bag) -> Version:
    patch, codec = wc.diff(old, new), draw(st.sampled_from(CODECS))
    kind = draw(st.sampled_from(["whole", "columns", "cut", "several"]))
    if kind == "several":
        objects = objects_of(patch, old, draw(st.lists(st.sampled_from(CODECS), min_size=1, max_size=3)))
    elif kind == "columns":
        places = {tensor.spec.name: columns(tensor.spec, 2) for tensor in patch.tensors}
        objects = [encode_cut(patch, places, codec, old)]
    else:
        cut = [wc.Cut("*", draw(st.integers(0, 2)), draw(st.integers(1, 3)))] if kind == "cut" else []
        objects = [wc.encode(patch, codec, old, cut=cut)]
    return joined(open_objects(map(BytesSource, objects)))


@given(st.data())
def test_any_layout_is_decoded_as_a_mirror_stages_it(data: st.DataObject) -> None:
    drawn = [data.draw(tensors(f"t{i}")) for i in range(data.draw(st.integers(1, 3)))]
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    states = [Bag({spec: finite(rng, spec) for spec, _ in drawn})]
    versions = []
    for _ in range(data.draw(st.integers(1, 3))):
        states.append(next_state(data.draw, rng, states[-1]))
        versions.append(version_of(data.draw, *states[-2:]))
    old, new = states[0], states[-1]
    found: dict[str, list[Any]] = {}
    with TemporaryDirectory() as folder:
        readers = [staged(a, b, Path(folder)) for a, b in pairwise(states)]
        for rank in (0, 1):
            pieces = [one for _, workers in drawn for one in workers[rank]]
            (model, live), (other, there) = worker_of(pieces, old), worker_of(pieces, old)
            before = memory(model)
            one, whole = prepare_coded(live, versions), there.prepare_patches(readers)
            assert memory(model) == before
            rest = live.prepare_patches(readers, one.undecoded)
            assert one.prepared.boxes | rest.boxes == whole.boxes
            for name in one.undecoded:
                assert not may_not_be_lost(live, name, versions)
            for each in (one.prepared, rest):
                live.apply(each, new)
            there.apply(whole, new)
            assert memory(model) == memory(other) == memory(worker_of(pieces, new)[0])
            assert live.digests == there.digests
            for name, boxes in one.prepared.digests.items():
                found.setdefault(name, []).extend(boxes)
            for name in one.undecoded:
                found.setdefault(name, []).extend(rest.digests[name])
    truth = wc.fingerprint(new)
    for name, boxes in found.items():
        assert combine(new.table[name], boxes).digest in (truth[name], None)


def may_not_be_lost(live: LiveParameters, name: str, versions: Sequence[Version]) -> bool:
    spec, parts = live.layout.table[name], live.layout.locate(name)
    rounded = any((spec.dtype, part.dtype) in ROUNDED for part in parts)
    return not rounded and sum({part.box: part.box.elements for part in parts}.values()) == spec.elements


# -- damage ------------------------------------------------------------------------------------------------------------

SPEC = TensorSpec("x", "BF16", (30, 20))


def outcome(version: Version, weights: Bag) -> tuple[Any, ...]:
    """What a mirror makes of a version: what it changes, or why it refuses it."""
    start = wc.fingerprint(weights)
    try:
        for patch in version.tensors(weights):
            verify_tensor(start, version.header.base, patch)
            return ("decoded", patch.digest)
    except ResultError:
        return ("wrong",)
    except WeightcastError as error:
        return type(error), str(error)
    return ("nothing",)


def outcome_in_worker(version: Version, weights: Bag) -> tuple[Any, ...]:
    part = Part("x", Box((Range(0, 30), Range(0, 20))), "p", "BF16", 0, tuple(natural_strides(SPEC.shape)))
    model, live = worker_of([Piece(part, SPEC.elements)], weights)
    before = memory(model)
    try:
        one = prepare_coded(live, [version])
    except WeightcastError as error:
        assert memory(model) == before
        return type(error), str(error)
    assert not one.undecoded
    if not one.prepared.boxes:
        return ("nothing",)
    found = combine(SPEC, one.prepared.digests["x"]).digest
    return ("decoded", found) if found == version.rows[0].digest else ("wrong",)


@given(st.data())
def test_damaged_object_has_the_same_outcome_as_in_a_mirror(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    old = Bag({SPEC: random_bits(rng, SPEC)})
    new = Bag({SPEC: moved(rng, old.read("x"), data.draw(st.sampled_from([0.01, 0.2, 0.9])), 100)})
    patch, codec = wc.diff(old, new), data.draw(st.sampled_from(CODECS))
    assume(patch.tensors)
    cut = data.draw(st.sampled_from([[], [wc.Cut("x", 1, 2)], [wc.Cut("x", 0, 3)]]))
    damaged = bytearray(wc.encode(patch, codec, old, cut=cut))
    for _ in range(data.draw(st.integers(0, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        version = joined(open_objects([BytesSource(bytes(damaged))]))
    except FormatError:
        return
    assert outcome_in_worker(version, old) == outcome(version, old)


@pytest.mark.parametrize("codec", CODECS)
def test_boxes_that_both_change_an_element_are_refused_as_in_a_mirror(codec: str) -> None:
    old = Bag({SPEC: np.arange(600, dtype=np.uint16)})
    new = old.copy()
    new.read("x")[:] ^= 1
    patch, objects = wc.diff(old, new), []
    for first in (0, 4):
        place = place_of(SPEC, Box.of([0, first], [30, 8]))
        (some,) = [part for _, part in cut_tensor(patch.tensors[0], [place])]
        known = {place.label: place.read(old.read("x"))}
        objects.append(encode_boxes(replace(patch, tensors=(some,)), codec, {place.label: place}, known, ONE))
    version = joined(open_objects(map(BytesSource, objects)))
    assert outcome(version, old) == outcome_in_worker(version, old)
    assert outcome(version, old)[0] is FormatError


def test_plain_patch_that_lists_an_element_it_does_not_change_is_refused() -> None:
    old = Bag({SPEC: np.arange(600, dtype=np.uint16)})
    new = old.copy()
    new.read("x")[::9] ^= 1
    values = new.read("x")[::9].copy()
    values[3] = old.read("x")[27]
    lie = with_stream(wc.encode(wc.diff(old, new), "plain"), "x.values", values.tobytes())
    version = joined(open_objects([BytesSource(lie)]))
    assert outcome_in_worker(version, old) == outcome(version, old)
    assert outcome(version, old)[0] is FormatError
