"""What a worker decodes against its own parameters is what a mirror would have staged for it, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import Bag

torch = pytest.importorskip("torch")

from changes import changed  # noqa: E402
from several import objects_of  # noqa: E402
from sharded_engine import SHAPES, Engine, live_worker, memory, model_of, staged, stream, weights_of  # noqa: E402
from surgery import with_column  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.engine.box_digests import combine  # noqa: E402
from weightcast.engine.cuts import cuts_of  # noqa: E402
from weightcast.engine.decoding import Decoded, Version, prepare_coded  # noqa: E402
from weightcast.engine.layout import Layout, Part  # noqa: E402
from weightcast.engine.learn import learn  # noqa: E402
from weightcast.engine.live import LiveParameters  # noqa: E402
from weightcast.errors import BaseError, FormatError, UsageError  # noqa: E402
from weightcast.format.boxes import whole  # noqa: E402
from weightcast.format.joined import joined, open_objects  # noqa: E402
from weightcast.format.patch import ModelSize  # noqa: E402
from weightcast.format.safetensors import BytesSource  # noqa: E402

CODECS = ("plain", "gap", "banded")
Workers = list[tuple[Engine, torch.nn.Module, LiveParameters]]


def version_of(*objects: bytes) -> Version:
    return joined(open_objects(map(BytesSource, objects)))


def coded(old: Bag, new: Bag, codec: str, **options: Any) -> Version:
    return version_of(wc.encode(wc.diff(old, new), codec, old, **options))


def workers_of(weights: Bag, count: int) -> Workers:
    engines = [Engine(rank, count) for rank in range(count)]
    return [(engine, *live_worker(engine, weights)) for engine in engines]


def expected(engine: Engine, weights: Bag) -> dict[str, bytes]:
    model = engine.make()
    engine.load(model, stream(weights))
    return memory(model)


def states_of(densities: Sequence[float], shapes: Any = SHAPES) -> list[Bag]:
    states = [weights_of(shapes)]
    for i, density in enumerate(densities):
        some = set(list(shapes)[i::2]) | {"q", "down", "router", "experts.1.down"}
        states.append(changed(states[-1], density, 10 + i, some))
    return states


def decode_all(workers: Workers, versions: Sequence[Version], **options: Any) -> list[Decoded]:
    before = [memory(model) for _, model, _ in workers]
    decoded = [prepare_coded(live, versions, **options) for _, _, live in workers]
    assert [memory(model) for _, model, _ in workers] == before
    return decoded


def must_be_as_a_mirror_stages(
    workers: Workers, decoded: Sequence[Decoded], states: Sequence[Bag], folder: Path
) -> None:
    """Apply what was decoded, and the rest as a mirror stages it; another engine gets all from the mirror."""
    readers = [staged(a, b, folder) for a, b in pairwise(states)]
    others = [live_worker(engine, states[0]) for engine, _, _ in workers]
    new, truth = states[-1], wc.fingerprint(states[-1])
    found: dict[str, list[Any]] = {}
    for (engine, model, live), (model_there, there), one in zip(workers, others, decoded, strict=True):
        whole = there.prepare_patches(readers)
        rest = live.prepare_patches(readers, one.undecoded)
        assert one.prepared.rewrites == {}
        assert one.prepared.boxes.keys() | rest.boxes.keys() == whole.boxes.keys()
        assert not one.prepared.boxes.keys() & rest.boxes.keys()
        assert one.prepared.boxes | rest.boxes == whole.boxes
        assert one.prepared.changed + rest.changed == whole.changed
        for name, boxes in (*one.prepared.digests.items(), *rest.digests.items()):
            found.setdefault(name, []).extend(boxes)
        for each in (one.prepared, rest):
            live.apply(each, new)
        there.apply(whole, new)
        assert memory(model) == memory(model_there) == expected(engine, new)
        assert live.digests == there.digests
    for name, boxes in found.items():
        assert combine(new.table[name], boxes).digest == truth[name]


# -- the same as a mirror's -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("density", [0.02, 0.2, 0.6, 1.0])
def test_worker_with_whole_tensors_decodes_all_of_them(codec: str, density: float, tmp_path: Path) -> None:
    states = [weights_of(SHAPES), changed(weights_of(SHAPES), density, 1)]
    workers = workers_of(states[0], 1)
    decoded = decode_all(workers, [coded(*states, codec)])
    assert decoded[0].undecoded == frozenset()
    must_be_as_a_mirror_stages(workers, decoded, states, tmp_path)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("density", [0.1, 1.0])
def test_tensor_parallel_workers_decode_their_boxes(codec: str, density: float, tmp_path: Path) -> None:
    """The embedding is shared in unequal parts, for which nothing is cut."""
    states = [weights_of(SHAPES), changed(weights_of(SHAPES), density, 1)]
    workers = workers_of(states[0], 2)
    cuts = cuts_of(workers[0][2].layout)
    decoded = decode_all(workers, [coded(*states, codec, cut=cuts)])
    sparse = codec != "plain" and density < 1
    assert [one.undecoded for one in decoded] == 2 * [frozenset({"embed"} if sparse else ())]
    must_be_as_a_mirror_stages(workers, decoded, states, tmp_path)


@pytest.mark.parametrize("codec", ["gap", "banded"])
def test_tensors_coded_whole_are_undecoded_where_a_part_is_held(codec: str, tmp_path: Path) -> None:
    states = [weights_of(SHAPES), changed(weights_of(SHAPES), 0.1, 1)]
    workers = workers_of(states[0], 2)
    decoded = decode_all(workers, [coded(*states, codec)])
    sharded = {"embed", "q", "q_bias", "o", "gate", "up", "down"} | {name for name in SHAPES if "experts" in name}
    assert [one.undecoded for one in decoded] == [sharded, sharded]
    must_be_as_a_mirror_stages(workers, decoded, states, tmp_path)


@pytest.mark.parametrize("count", [1, 2])
def test_version_of_several_objects_and_codecs_is_decoded(count: int, tmp_path: Path) -> None:
    states = [weights_of(SHAPES), changed(weights_of(SHAPES), 0.2, 1)]
    workers = workers_of(states[0], count)
    decoded = decode_all(workers, [version_of(*objects_of(wc.diff(*states), states[0]))])
    assert count == 2 or decoded[0].undecoded == frozenset()
    must_be_as_a_mirror_stages(workers, decoded, states, tmp_path)


@pytest.mark.parametrize(
    "codecs", [("banded", "banded", "banded"), ("gap", "banded", "plain"), ("plain", "gap", "gap")]
)
@pytest.mark.parametrize("densities", [(0.05, 0.1, 0.05), (0.9, 0.1, 0.05), (0.1, 0.9, 0.1), (1.0, 1.0, 1.0)])
@pytest.mark.parametrize("count", [1, 2])
def test_later_version_is_decoded_against_the_bits_after_the_one_before(
    codecs: Sequence[str], densities: Sequence[float], count: int, tmp_path: Path
) -> None:
    states = states_of(densities)
    workers = workers_of(states[0], count)
    cuts = cuts_of(workers[0][2].layout)
    versions = [coded(a, b, codec, cut=cuts) for (a, b), codec in zip(pairwise(states), codecs, strict=True)]
    decoded = decode_all(workers, versions)
    assert count == 2 or decoded[0].undecoded == frozenset()
    must_be_as_a_mirror_stages(workers, decoded, states, tmp_path)


def test_squash_and_deltas_are_decoded_in_one_route(tmp_path: Path) -> None:
    states = states_of((0.05, 0.05, 0.05, 0.05))
    workers = workers_of(states[0], 1)
    versions = [
        coded(states[0], states[2], "gap"),
        version_of(*objects_of(wc.diff(*states[2:4]), states[2])),
        coded(*states[3:], "banded"),
    ]
    decoded = decode_all(workers, versions)
    must_be_as_a_mirror_stages(workers, decoded, [states[0], *states[2:]], tmp_path)


@pytest.mark.parametrize("codec", CODECS)
def test_what_returns_to_its_old_bits_is_not_written(codec: str) -> None:
    states = [weights_of(SHAPES), changed(weights_of(SHAPES), 0.2, 1), weights_of(SHAPES)]
    workers = workers_of(states[0], 1)
    (one,) = decode_all(workers, [coded(a, b, codec) for a, b in pairwise(states)])
    assert (one.prepared.changed, one.prepared.nbytes, one.undecoded) == (0, 0, frozenset())
    (_, _, live) = workers[0]
    assert one.prepared.boxes
    assert {part: box.digest for part, box in one.prepared.boxes.items()}.items() <= live.digests.items()


def without_base(new: Bag) -> Version:
    truth = wc.fingerprint(new)
    tensors = [
        wc.TensorPatch(spec, np.arange(spec.elements), new.read(spec.name), None, truth[spec.name])
        for spec in new.table
    ]
    return version_of(wc.encode(wc.Patch(None, truth.digest, ModelSize.of(new.table), tuple(tensors)), "plain"))


def test_patch_without_a_base_replaces_all(tmp_path: Path) -> None:
    states = [weights_of(SHAPES), changed(weights_of(SHAPES), 0.6, 1)]
    states[1].read("scale")[...] ^= 1
    anchor = without_base(states[1])
    for count in (1, 2):
        workers = workers_of(states[0], count)
        decoded = decode_all(workers, [anchor])
        assert all(not one.undecoded for one in decoded)
        must_be_as_a_mirror_stages(workers, decoded, states, tmp_path)


def test_only_named_tensors_are_decoded() -> None:
    states = [weights_of(SHAPES), changed(weights_of(SHAPES), 0.1, 1)]
    workers = workers_of(states[0], 2)
    decoded = decode_all(workers, [coded(*states, "banded")], names={"norm", "k", "q"})
    for one in decoded:
        assert one.prepared.digests.keys() == {"norm", "k"}
        assert one.undecoded == {"q"}


@pytest.mark.parametrize("room", [0, 100, 600, 1 << 20])
@pytest.mark.parametrize("density", [0.1, 1.0])
def test_what_does_not_fit_into_memory_is_undecoded(room: int, density: float, tmp_path: Path) -> None:
    states = [weights_of(SHAPES), changed(weights_of(SHAPES), density, 1)]
    workers = workers_of(states[0], 1)
    (one,) = decode_all(workers, [coded(*states, "banded")], room=room)
    assert one.prepared.nbytes <= room
    assert bool(one.undecoded) == (room < 1 << 20)
    assert bool(one.prepared.writes) == (room > 0)
    must_be_as_a_mirror_stages(workers, [one], states, tmp_path)


def test_callback_between_tensors_may_stop_decoding() -> None:
    states = [weights_of(SHAPES), changed(weights_of(SHAPES), 0.1, 1)]
    model, live = live_worker(Engine(0, 1), states[0])
    calls: list[int] = []
    prepare_coded(live, [coded(*states, "gap")], between=lambda: calls.append(1))
    assert len(calls) >= len(SHAPES)
    before = memory(model)

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        prepare_coded(live, [coded(*states, "gap")], between=stop)
    assert memory(model) == before


# -- blocks ------------------------------------------------------------------------------------------------------------

TALL = {"x": ("BF16", (1024, 1024))}
"""Four blocks."""


def tall_worker(weights: Bag, rows: slice, columns: slice) -> LiveParameters:
    """A worker that holds some rows and columns between others of its own."""
    height, width = rows.stop - rows.start, columns.stop - columns.start
    model = model_of(p=torch.empty(3 + height, width, dtype=torch.bfloat16))

    def load(given: Any) -> None:
        for _, tensor in given:
            model.p.data[3:].copy_(tensor[rows, columns])

    live = LiveParameters(model, learn(model, load, weights.table))
    load(stream(weights))
    live.digest(weights.table["x"])
    return live


def tall_states(rows: slice, density: float = 0.01) -> tuple[Bag, Bag]:
    """A change in some rows alone."""
    old = weights_of(TALL, finite=True)
    dense, new = changed(old, density, 3), old.copy()
    new.read("x").reshape(1024, 1024)[rows] = dense.read("x").reshape(1024, 1024)[rows]
    return old, new


def must_be(live: LiveParameters, one: Decoded, new: Bag, rows: slice, columns: slice = slice(0, 1024)) -> None:
    live.apply(one.prepared)
    (part,) = live.layout.locate("x")
    assert np.array_equal(live.read(part), new.read("x").reshape(1024, 1024)[rows, columns].reshape(-1))
    assert live.digests[part] == live.digest(new.table["x"])[0].digest


ALL = slice(0, 1024)


@pytest.mark.parametrize("codec", ["gap", "banded"])
@pytest.mark.parametrize(
    ("rows", "changes", "is_decoded"),
    [
        (slice(0, 512), ALL, True),
        (slice(256, 512), ALL, True),
        (slice(512, 1024), slice(0, 512), True),
        (slice(128, 640), slice(256, 512), True),
        (slice(128, 640), slice(256, 513), False),
        (slice(128, 640), slice(0, 128), False),
        (slice(128, 640), slice(768, 1024), True),
    ],
)
def test_rows_of_a_tensor_are_decoded_if_the_blocks_that_change_are_within_them(
    codec: str, rows: slice, changes: slice, is_decoded: bool
) -> None:
    old, new = tall_states(changes)
    live = tall_worker(old, rows, ALL)
    one = prepare_coded(live, [coded(old, new, codec)])
    assert one.undecoded == frozenset(() if is_decoded else {"x"})
    if is_decoded:
        must_be(live, one, new, rows)
    else:
        assert (one.prepared.boxes, one.prepared.writes, one.prepared.changed) == ({}, [], 0)


@pytest.mark.parametrize("codec", ["gap", "banded"])
def test_raw_blocks_are_read_whatever_is_held(codec: str) -> None:
    old = weights_of(TALL)
    new = weights_of(TALL, 1)
    later = changed(new, 1.0, 5)
    for rows, columns in ((ALL, slice(100, 300)), (slice(128, 640), ALL), (slice(7, 9), slice(3, 4))):
        live = tall_worker(old, rows, columns)
        one = prepare_coded(live, [coded(old, new, codec), coded(new, later, "plain")])
        assert not one.undecoded
        must_be(live, one, later, rows, columns)


@pytest.mark.parametrize("codec", ["gap", "banded"])
def test_rounded_parameter_is_decoded_from_raw_blocks_alone(codec: str) -> None:
    shapes = {"x": ("F32", (40, 5))}
    old, near, far = (
        weights_of(shapes, finite=True),
        weights_of(shapes, finite=True),
        weights_of(shapes, 1, finite=True),
    )
    near.read("x")[7] ^= 1
    part = Part("x", whole((40, 5)), "p", "BF16", 0, (5, 1))
    live = LiveParameters(model_of(p=torch.empty(40, 5, dtype=torch.bfloat16)), Layout(old.table, [part], {}))
    live.write(part, old.read("x"))
    assert prepare_coded(live, [coded(old, near, codec)]).undecoded == {"x"}
    one = prepare_coded(live, [coded(old, far, codec)])
    assert [box.rounded for box in one.prepared.boxes.values()] == [True]
    live.apply(one.prepared)
    assert np.array_equal(live.read(part), wc.round_to("BF16", far.read("x").view(np.float32)))


@pytest.mark.parametrize("codec", CODECS)
def test_boxes_that_a_worker_does_not_hold_cost_nothing(codec: str) -> None:
    old, new = tall_states(ALL)
    cut = [wc.Cut("x", axis=1, parts=4)]
    live = tall_worker(old, ALL, slice(256, 512))
    version = coded(old, new, codec, cut=cut)
    (reader,) = {reader for reader, _ in version.parts["x"]}
    read: list[int] = []
    honest = reader.coded
    reader.coded = lambda row: read.append(row.place.box.offset[1]) or honest(row)
    one = prepare_coded(live, [version])
    assert read == [256]
    must_be(live, one, new, ALL, slice(256, 512))


@pytest.mark.parametrize("rows", [ALL, slice(0, 512)])
def test_more_changes_than_the_table_says_are_refused(rows: slice) -> None:
    """A worker with a part of the tensor cannot say that there are too few."""
    old, new = tall_states(ALL)
    data = wc.encode(wc.diff(old, new), "gap", old)
    count = int((old.read("x") != new.read("x"))[: (rows.stop << 10)].sum())
    live = tall_worker(old, rows, ALL)
    with pytest.raises(FormatError, match="the table says"):
        prepare_coded(live, [version_of(with_column(data, "changed", 0, count - 1))])
    few = prepare_coded(live, [version_of(with_column(data, "changed", 0, count))])
    must_be(live, few, new, rows)


def test_several_threads_decode_the_same() -> None:
    old, new = tall_states(ALL)
    live = tall_worker(old, ALL, ALL)
    with wc.Workers(2) as workers:
        one = prepare_coded(live, [coded(old, new, "banded")], workers=workers)
    must_be(live, one, new, ALL)


# -- the base ----------------------------------------------------------------------------------------------------------


def flipped(old: Bag, at: int, bit: int) -> LiveParameters:
    """A worker in whose memory a bit was flipped since it was digested."""
    live = tall_worker(old, ALL, ALL)
    (part,) = live.layout.locate("x")
    live.view(part).reshape(-1).numpy().view(np.uint16)[at] ^= 1 << bit
    return live


def promised(live: LiveParameters, old: Bag, new: Bag, codec: str) -> tuple[Decoded | None, int | None]:
    """What was decoded, and the digest that it leads to; nothing if the codec noticed."""
    try:
        one = prepare_coded(live, [coded(old, new, codec)])
    except (BaseError, FormatError):
        return None, None
    return one, combine(new.table["x"], one.prepared.digests["x"]).digest


def stepped_states() -> tuple[Bag, Bag]:
    """Small weights change, large ones do not, so that there are bands."""
    old = weights_of(TALL, finite=True)
    new, exponents = old.copy(), old.read("x") >> 7 & 0xFF
    new.read("x")[(exponents < 120) & (np.arange(1 << 20) % 7 == 0)] ^= 1
    return old, new


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bit", [0, 7, 10, 14, 15])
@pytest.mark.parametrize("is_changed", [True, False])
def test_parameter_that_differs_in_one_bit_is_noticed(codec: str, bit: int, is_changed: bool) -> None:
    old, new = stepped_states()
    at = int(np.flatnonzero((old.read("x") != new.read("x")) == is_changed)[5])
    live, truth = flipped(old, at, bit), wc.fingerprint(new)["x"]
    if is_changed or (codec == "banded" and bit == 10):  # decoding depends on it
        assert promised(live, old, new, codec)[1] != truth
    live.digests.clear()
    one, digest = promised(live, old, new, codec)
    if one is not None:
        live.apply(one.prepared)
        (part,) = live.layout.locate("x")
        assert (digest == truth) == np.array_equal(live.read(part), new.read("x"))
        assert (digest == truth) == (codec == "plain" and is_changed)


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("codec", CODECS)
def test_copies_that_differ_in_one_worker_are_distinguished(codec: str, wrong: int) -> None:
    table = {"x": ("BF16", (40,))}
    old, new = weights_of(table), weights_of(table)
    new.read("x")[7] ^= 1
    model = model_of(a=torch.empty(40, dtype=torch.bfloat16), b=torch.empty(40, dtype=torch.bfloat16))
    parts = [Part("x", whole((40,)), name, "BF16", 0, (1,)) for name in ("a", "b")]
    live = LiveParameters(model, Layout(old.table, parts, {}))
    for part in parts:
        live.write(part, old.read("x"))
    live.digest(old.table["x"])
    live.view(parts[wrong])[7] ^= 4
    one = prepare_coded(live, [coded(old, new, codec)])
    assert combine(new.table["x"], one.prepared.digests["x"]).problem == "copies of the same elements differ"


def test_blocks_that_cannot_be_decoded_are_not_blamed_on_their_object_if_the_memory_changed() -> None:
    old, new = stepped_states()
    live = tall_worker(old, ALL, ALL)
    version = coded(old, new, "banded")
    (part,) = live.layout.locate("x")
    live.write(part, np.full(1 << 20, 0x3F80, np.uint16))
    with pytest.raises(BaseError, match="not what they were when they were digested") as caught:
        prepare_coded(live, [version])
    assert caught.value.tensor == "x"
    live.digests.clear()
    with pytest.raises(FormatError):
        prepare_coded(live, [version])


def test_worker_that_remembers_no_digests_reads_them() -> None:
    states = [weights_of(SHAPES), changed(weights_of(SHAPES), 0.1, 1)]
    _, live = live_worker(Engine(0, 1), states[0])
    live.digests.clear()
    one = prepare_coded(live, [coded(*states, "banded")])
    truth = wc.fingerprint(states[1])
    for name, boxes in one.prepared.digests.items():
        assert combine(states[1].table[name], boxes).digest == truth[name]


def test_versions_that_do_not_follow_each_other_are_refused() -> None:
    states = states_of((0.1, 0.1, 0.1))
    _, live = live_worker(Engine(0, 1), states[0])
    first, _, third = (coded(a, b, "gap") for a, b in pairwise(states))
    with pytest.raises(UsageError, match="the next begins at"):
        prepare_coded(live, [first, third])


@pytest.mark.parametrize("shape", [("BF16", (6, 4)), ("F16", (4, 6))])
@pytest.mark.parametrize("codec", CODECS)
def test_tensors_of_another_model_are_refused(codec: str, shape: tuple[str, tuple[int, ...]]) -> None:
    _, live = live_worker(Engine(0, 1), weights_of(SHAPES))
    old, new = weights_of({"q": shape}), weights_of({"q": shape}, 1)
    with pytest.raises(UsageError, match="another dtype or shape"):
        prepare_coded(live, [coded(old, new, codec)])
    with pytest.raises(UsageError, match="another dtype or shape"):
        prepare_coded(live, [without_base(new)])


def test_patch_without_a_base_that_leaves_a_tensor_out_is_refused() -> None:
    weights = weights_of(SHAPES)
    _, live = live_worker(Engine(0, 1), weights)
    part = Bag({spec: weights.read(spec.name) for spec in weights.table if spec.name != "norm"})
    with pytest.raises(UsageError, match="leaves a tensor out"):
        prepare_coded(live, [without_base(part)])
