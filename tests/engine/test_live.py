"""Live parameters are compared, prepared for and patched through a layout: proven before, exact afterwards."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from cases import Bag

torch = pytest.importorskip("torch")

from changes import SPECIAL, changed  # noqa: E402
from sharded_engine import SHAPES, Engine, live_worker, memory, model_of, staged, stream, together, weights_of  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.disk.staged import stage  # noqa: E402
from weightcast.engine.box_digests import combine  # noqa: E402
from weightcast.engine.layout import Layout, Part  # noqa: E402
from weightcast.engine.learn import learn  # noqa: E402
from weightcast.engine.live import LiveParameters  # noqa: E402
from weightcast.engine.prepared import Prepared  # noqa: E402
from weightcast.errors import FormatError, UsageError  # noqa: E402
from weightcast.format.boxes import Box, Range  # noqa: E402
from weightcast.format.patchfile import PatchReader  # noqa: E402
from weightcast.format.safetensors import FileSource  # noqa: E402
from weightcast.format.spec import TensorSpec, TensorTable  # noqa: E402

Pair = list[tuple[Engine, torch.nn.Module, LiveParameters]]


def expected(engine: Engine, weights: Bag) -> dict[str, bytes]:
    model = engine.make()
    engine.load(model, stream(weights))
    return memory(model)


def promised(prepared: list[Prepared], name: str, spec: TensorSpec) -> int | None:
    return combine(spec, [one for each in prepared for one in each.digests.get(name, [])]).digest


@pytest.fixture
def pair() -> Pair:
    """Two workers, started with the first weights."""
    old = weights_of(SHAPES)
    return [(Engine(rank), *live_worker(Engine(rank), old)) for rank in (0, 1)]


@pytest.mark.parametrize("density", [0.02, 0.2, 0.6, 1.0])
def test_patch_is_verified_before_and_exact_afterwards(density: float, pair: Pair, tmp_path: Path) -> None:
    old = weights_of(SHAPES)
    new = changed(old, density, 1)
    reader = staged(old, new, tmp_path)
    before = [memory(model) for _, model, _ in pair]
    prepared = [live.prepare_patches([reader]) for _, _, live in pair]
    assert [memory(model) for _, model, _ in pair] == before
    for row in reader.rows:
        assert promised(prepared, row.spec.name, row.spec) == row.digest
    for (engine, model, live), each in zip(pair, prepared, strict=True):
        live.apply(each, new)
        assert memory(model) == expected(engine, new)
    fingerprint = [dict(live.digests) for _, _, live in pair]
    truth = wc.fingerprint(new)
    sums = together([live for _, _, live in pair], new)
    assert {name: one.digest for name, one in sums.items()} == {spec.name: truth[spec.name] for spec in new.table}
    assert [dict(live.digests) for _, _, live in pair] == fingerprint


@pytest.mark.parametrize(
    "densities", [(0.05, 0.05), (0.9, 0.1), (0.1, 0.9), (0.1, 0.9, 0.1), (0.05, 0.1, 0.05), (1, 1, 1)]
)
def test_patches_staged_together_equal_patches_applied_in_turn(
    densities: tuple[float, ...], pair: Pair, tmp_path: Path
) -> None:
    states = [weights_of(SHAPES)]
    for i, density in enumerate(densities):
        some = set(list(SHAPES)[i::2]) | {"q", "down", "router", "experts.1.down"}
        states.append(changed(states[-1], density, 10 + i, some))
    readers = [staged(a, b, tmp_path) for a, b in pairwise(states)]
    for engine, model, live in pair:
        one = live.prepare_patches(readers)
        again, other = live_worker(engine, states[0])
        for reader, state in zip(readers, states[1:], strict=True):
            other.apply(other.prepare_patches([reader]), state)
        live.apply(one, states[-1])
        assert memory(model) == memory(again) == expected(engine, states[-1])
        assert live.digests == other.digests


def test_patch_of_any_codec_is_staged(pair: Pair, tmp_path: Path) -> None:
    old = weights_of(SHAPES)
    new = changed(old, 0.1, 4)
    wc.write_patch(old, new, tmp_path / "banded.patch")
    coded = PatchReader(FileSource(tmp_path / "banded.patch"))
    with pytest.raises(UsageError, match="not staged"):
        pair[0][2].prepare_patches([coded])
    stage(coded, old, wc.fingerprint(old), tmp_path / "plain.patch")
    for engine, model, live in pair:
        live.apply(live.prepare_patches([PatchReader(FileSource(tmp_path / "plain.patch"))]), new)
        assert memory(model) == expected(engine, new)


def test_every_special_value_is_written_and_overwritten_exactly(tmp_path: Path) -> None:
    engine, n = Engine(0, 1), len(SPECIAL)
    old = weights_of(SHAPES)
    there, back = old.copy(), old.copy()
    for name in ("q", "router", "down", "experts.0.gate"):
        bits = old.read(name).copy()
        bits[:n], bits[n : 2 * n] = SPECIAL, SPECIAL[::-1]
        there.write(name, bits)
        back.write(name, np.roll(bits, 1))
    model, live = live_worker(engine, old)
    for a, b in ((old, there), (there, back)):
        prepared = live.prepare_patches([staged(a, b, tmp_path)])
        for name, boxes in prepared.digests.items():
            assert combine(b.table[name], boxes).digest == wc.fingerprint(b)[name]
        live.apply(prepared, b)
        assert memory(model) == expected(engine, b)


def test_worker_without_digests_promises_nothing(tmp_path: Path) -> None:
    old, engine = weights_of(SHAPES), Engine(0, 1)
    new = changed(old, 0.1, 2)
    model, live = live_worker(engine, old)
    live.digests.clear()
    prepared = live.prepare_patches([staged(old, new, tmp_path)])
    assert {one.problem for boxes in prepared.digests.values() for one in boxes} == {None, "it was not digested before"}
    live.apply(prepared, new)
    assert memory(model) == expected(engine, new)


def test_wrong_bit_outside_a_patch_shows_in_the_promised_digest(tmp_path: Path) -> None:
    old, engine = weights_of(SHAPES), Engine(0, 1)
    new = old.copy()
    new.read("norm")[0] ^= 1
    model, live = live_worker(engine, old)
    model.norm.data.view(torch.int16)[5] ^= 1
    live.digest(old.table["norm"])
    prepared = live.prepare_patches([staged(old, new, tmp_path)])
    assert combine(new.table["norm"], prepared.digests["norm"]).digest != wc.fingerprint(new)["norm"]


def test_two_copies_in_one_worker_are_distinguished(tmp_path: Path) -> None:
    table = {"x": ("BF16", (40,))}
    old, new = weights_of(table), weights_of(table)
    new.read("x")[7] ^= 1
    model = model_of(a=torch.empty(40, dtype=torch.bfloat16), b=torch.empty(40, dtype=torch.bfloat16))

    def load(given: object) -> None:
        for _, tensor in given:
            model.a.data.copy_(tensor)
            model.b.data.copy_(tensor)

    live = LiveParameters(model, learn(model, load, old.table))
    load(stream(old))
    model.a.data.view(torch.int16)[30] ^= 1
    assert together([live], old)["x"].problem == "copies of the same elements differ"
    prepared = live.prepare_patches([staged(old, new, tmp_path)])
    assert combine(new.table["x"], prepared.digests["x"]).problem == "copies of the same elements differ"


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mess", ["as started", "half applied", "noise", "one element"])
def test_reload_from_any_state_gives_the_exact_weights(mess: str, pair: Pair, tmp_path: Path) -> None:
    old = weights_of(SHAPES)
    new = changed(old, 0.1, 6)
    prepared = []
    for engine, model, live in pair:
        if mess == "half applied":
            half = live.prepare_patches([staged(old, new, tmp_path)])
            for scatter in half.scatters[::2]:
                scatter.apply()
        elif mess == "noise":
            rng = np.random.default_rng(5)
            for tensor in model.parameters():
                words = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                words.copy_(torch.from_numpy(rng.integers(0, 256, words.numel(), np.uint8)))
            model.lm_head.data[VOCABULARY_ROWS[engine.rank] :] = 0
        elif mess == "one element":
            engine.load(model, stream(new))
            model.w2.data.view(torch.int16)[1, 2, 0] ^= 1
        one = live.prepare_weights(new, new.table)
        prepared.append(one)
        live.apply(one, new)
        assert memory(model) == expected(engine, new)
        if mess == "one element":
            assert (one.changed, len(one.scatters), len(one.rewrites)) == (1, 1, 0)
    for spec in new.table:
        assert promised(prepared, spec.name, spec) == wc.fingerprint(new)[spec.name]


VOCABULARY_ROWS = (6, 4)


def test_tensors_that_are_already_right_are_not_written(pair: Pair, tmp_path: Path) -> None:
    old = weights_of(SHAPES)
    new = changed(old, 0.1, 6)
    dense = changed(old, 1.0, 6)
    for _, _, live in pair:
        for there, way in ((old, new), (new, dense)):
            now = live.prepare_weights(there, there.table)
            assert (now.changed, now.scatters, now.rewrites, now.nbytes) == (0, [], {}, 0)
            step = live.prepare_patches([staged(there, way, tmp_path)])
            live.apply(step, way)
            again = live.prepare_patches([staged(there, way, tmp_path)])
            assert (again.changed, again.scatters, again.rewrites, again.nbytes) == (0, [], {}, 0)


def test_only_requested_tensors_are_written(pair: Pair) -> None:
    new = changed(weights_of(SHAPES), 0.5, 6)
    for _, _, live in pair:
        prepared = live.prepare_weights(new, [new.table["q"], new.table["norm"]])
        assert prepared.digests.keys() == {"q", "norm"}


def test_dense_weights_are_read_again_when_they_are_written(pair: Pair) -> None:
    new = changed(weights_of(SHAPES), 1.0, 6)
    for engine, model, live in pair:
        prepared = live.prepare_weights(new, new.table)
        assert prepared.rewrites
        assert not prepared.nbytes
        with pytest.raises(UsageError, match="weights are needed"):
            live.apply(prepared)
        live.apply(prepared, new)
        assert memory(model) == expected(engine, new)


@pytest.mark.parametrize("rows", [1, 4, 1000])
def test_rows_written_a_few_at_a_time_are_all_written(rows: int) -> None:
    new = changed(weights_of(SHAPES), 1.0, 6)
    for engine in (Engine(0), Engine(1)):
        model, live = live_worker(engine, weights_of(SHAPES), chunk=rows)
        live.apply(live.prepare_weights(new, new.table), new)
        assert memory(model) == expected(engine, new)


# -- memory and calls -------------------------------------------------------------------------------------------------


def long(
    elements: int, change: Callable[[np.ndarray], None], tmp_path: Path
) -> tuple[LiveParameters, PatchReader, Bag]:
    """A worker that holds the second half of one long tensor."""
    old = weights_of({"x": ("BF16", (elements, 1))})
    new = old.copy()
    change(new.read("x"))
    model = model_of(p=torch.empty(elements // 2, 1, dtype=torch.bfloat16))

    def load(given: object) -> None:
        model.p.data.copy_(dict(given)["x"][elements // 2 :])

    live = LiveParameters(model, learn(model, load, old.table))
    load(stream(old))
    live.digest(old.table["x"])
    return live, staged(old, new, tmp_path), new


def test_prepared_patch_takes_memory_for_its_changes(tmp_path: Path) -> None:
    def change(bits: np.ndarray) -> None:
        bits[::1000] ^= 1

    live, reader, _ = long(200_000, change, tmp_path)
    prepared = live.prepare_patches([reader])
    assert prepared.changed == 100
    assert prepared.nbytes == 100 * (8 + 2)


def test_prepared_dense_patch_takes_no_memory(tmp_path: Path) -> None:
    def change(bits: np.ndarray) -> None:
        bits[...] ^= 1

    live, reader, _ = long(200_000, change, tmp_path)
    prepared = live.prepare_patches([reader])
    assert list(prepared.rewrites) == ["x"]
    assert not prepared.nbytes


@pytest.mark.parametrize("room", [0, 100, 600, 1 << 20])
def test_prepared_patches_stay_within_the_memory_limit(room: int, pair: Pair, tmp_path: Path) -> None:
    old = weights_of(SHAPES)
    new = changed(old, 0.1, 6)
    for engine, model, live in pair:
        prepared = live.prepare_patches([staged(old, new, tmp_path)], room=room)
        assert prepared.nbytes <= room
        assert bool(prepared.scatters) == (room > 0)
        live.apply(prepared, new)
        assert memory(model) == expected(engine, new)


def test_dense_patch_that_is_sparse_in_this_worker_is_scattered(tmp_path: Path) -> None:
    def change(bits: np.ndarray) -> None:
        bits[: bits.size // 2] ^= 1
        bits[-5:] ^= 1

    live, reader, new = long(2000, change, tmp_path)
    prepared = live.prepare_patches([reader])
    assert not prepared.rewrites
    assert prepared.changed == 5
    live.apply(prepared, new)
    (part,) = live.layout.locate("x")
    assert np.array_equal(live.read(part), new.read("x")[1000:])


def test_callback_between_tensors_may_stop_the_preparation(pair: Pair, tmp_path: Path) -> None:
    old = weights_of(SHAPES)
    new = changed(old, 0.5, 6)
    model, live = pair[0][1:]
    calls: list[int] = []
    live.prepare_patches([staged(old, new, tmp_path)], between=lambda: calls.append(1))
    assert len(calls) == len(SHAPES)
    calls.clear()
    live.prepare_weights(new, new.table, between=lambda: calls.append(1))
    assert len(calls) == len(SHAPES)
    before = memory(model)

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        live.prepare_patches([staged(old, new, tmp_path)], between=stop)
    assert memory(model) == before


# -- refusals ----------------------------------------------------------------------------------------------------------

SPEC = TensorSpec("x", "BF16", (4, 6))


def part(**other: object) -> Part:
    box = Box((Range(0, 4), Range(0, 6)))
    usual = {"name": "x", "box": box, "parameter": "p", "dtype": "BF16", "offset": 0, "strides": (6, 1)}
    return Part(**usual | other)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (part(offset=1), "outside of a parameter"),
        (part(offset=-1), "outside of a parameter"),
        (part(strides=(7, 1)), "outside of a parameter"),
        (part(strides=(-6, 1)), "outside of a parameter"),
        (part(dtype="F32"), "outside of a parameter"),
        (part(box=Box((Range(1, 4), Range(0, 6)))), "outside of the tensor"),
        (part(box=Box((Range(0, 2, 4), Range(0, 6)))), "outside of the tensor"),
        (part(parameter="q"), "no parameter q"),
    ],
)
def test_layout_outside_its_parameter_or_tensor_is_refused(bad: Part, message: str) -> None:
    model = model_of(p=torch.empty(4, 6, dtype=torch.bfloat16))
    with pytest.raises(UsageError, match=message):
        LiveParameters(model, Layout(TensorTable.of([SPEC]), [bad], {}))


class Lying:
    """A staged patch whose streams were exchanged."""

    def __init__(self, honest: PatchReader, indices: list[int]):
        self.rows, self.header, self._honest, self._indices = honest.rows, honest.header, honest, indices

    def coded(self, row: object) -> object:
        coded = self._honest.coded(row)
        coded.streams["indices"] = np.array(self._indices, "<i4")
        return coded


@pytest.mark.parametrize("indices", [[-1, 3], [0, 24], [3, 3], [4, 2]])
def test_bad_indices_are_refused(indices: list[int], tmp_path: Path) -> None:
    old = weights_of({"x": ("BF16", (4, 6))})
    new = old.copy()
    new.read("x")[[2, 9]] ^= 1
    model = model_of(p=torch.empty(4, 6, dtype=torch.bfloat16))
    live = LiveParameters(model, Layout(old.table, [part()], {}))
    before = memory(model)
    with pytest.raises(FormatError, match="out of range, unsorted or repeated"):
        live.prepare_patches([Lying(staged(old, new, tmp_path), indices)])
    assert memory(model) == before


@pytest.mark.parametrize("shape", [("BF16", (6, 4)), ("F16", (4, 6))])
def test_tensors_of_another_model_are_refused(shape: tuple[str, tuple[int, ...]], tmp_path: Path) -> None:
    model = model_of(p=torch.empty(4, 6, dtype=torch.bfloat16))
    live = LiveParameters(model, Layout(TensorTable.of([SPEC]), [part()], {}))
    old, new = weights_of({"x": shape}), weights_of({"x": shape}, 1)
    with pytest.raises(UsageError, match="another dtype or shape"):
        live.prepare_patches([staged(old, new, tmp_path)])
    with pytest.raises(UsageError, match="another dtype or shape"):
        live.prepare_weights(new, new.table)
    with pytest.raises(UsageError, match="another dtype or shape"):
        live.digest(new.table["x"])
    short = Bag({SPEC: weights_of({"x": ("BF16", (4, 5))}).read("x")})
    with pytest.raises(UsageError, match="contiguous"):
        live.prepare_weights(short, short.table)


def test_widened_parameter_with_other_values_has_no_digest() -> None:
    weights = weights_of({"x": ("BF16", (4, 6))})
    model = model_of(p=torch.empty(4, 6, dtype=torch.float32))
    live = LiveParameters(model, Layout(weights.table, [part(dtype="F32")], {}))
    assert "not a cast" in live.digest(SPEC)[0].problem
    prepared = live.prepare_weights(weights, weights.table)
    live.apply(prepared, weights)
    assert together([live], weights)["x"].digest == wc.fingerprint(weights)["x"]


def test_rounded_parameters_are_written_and_never_promised(tmp_path: Path) -> None:
    old = weights_of({"x": ("F32", (4, 6))}, finite=True)
    for density in (0.1, 1.0):
        new = old.copy()
        new.write("x", np.where(np.arange(24) < 24 * density, old.read("x") ^ np.uint32(1 << 20), old.read("x")))
        model = model_of(p=torch.empty(4, 6, dtype=torch.bfloat16))
        live = LiveParameters(model, Layout(old.table, [part()], {}))
        live.apply(live.prepare_weights(old, old.table), old)
        for prepared in (live.prepare_patches([staged(old, new, tmp_path)]), live.prepare_weights(new, new.table)):
            assert [one.problem for one in prepared.digests["x"]] == ["BF16 in the engine is rounded from F32"]
            live.apply(prepared, new)
            assert not live.digests
            assert np.array_equal(live.read(part()), wc.round_to("BF16", new.read("x").view(np.float32)))


def test_replaced_memory_of_a_parameter_is_noticed() -> None:
    model, live = live_worker(Engine(0), weights_of(SHAPES))
    assert not live.has_moved
    model.w2.data[0] = 0
    model.w2.data = model.w2.data.transpose(1, 2)  # another view of the same
    assert not live.has_moved
    model.qkv.data = model.qkv.data.clone()
    assert live.has_moved
    model, live = live_worker(Engine(0), weights_of(SHAPES))
    del model.norm
    assert live.has_moved
