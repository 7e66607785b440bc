"""Layouts are learned from an engine's own loader: nothing is written, what is known is right, what is not is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from cases import Bag
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from sharded_engine import BF16, SHAPES, TORCH_DTYPES, Engine, Stream, memory, model_of, stream, together, weights_of  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.engine.casts import cast  # noqa: E402
from weightcast.engine.layout import Layout, Part  # noqa: E402
from weightcast.engine.learn import learn  # noqa: E402
from weightcast.engine.live import LiveParameters  # noqa: E402
from weightcast.format.spec import TensorSpec, TensorTable  # noqa: E402
from weightcast.format.tensors import Bits  # noqa: E402

Load = Callable[[torch.nn.Module, Stream], None]


def box_bits(weights: Bag, part: object) -> Bits:
    spec = weights.table[part.name]
    slices = tuple(slice(one.start, one.last + 1, one.step) for one in part.box.ranges)
    return weights.read(part.name).reshape(spec.shape)[slices].reshape(-1)


def learned(model: torch.nn.Module, load: Load, table: TensorTable) -> Layout:
    before = memory(model)
    layout = learn(model, lambda given: load(model, given), table)
    assert memory(model) == before
    return layout


def check(make: Callable[[], torch.nn.Module], load: Load, weights: Bag) -> Layout:
    """Learn, then load for real: each known part holds its box, and nothing that the loader changed is left out."""
    layout = learned(make(), load, weights.table)
    loaded = make()
    load(loaded, stream(weights))
    live = LiveParameters(loaded, layout)
    for part in layout:
        wanted = cast(box_bits(weights, part), weights.table[part.name].dtype, part.dtype)
        assert np.array_equal(live.read(part), wanted)
    ours = make()
    if not layout.unknown:
        load(ours, stream(Bag({spec: ~weights.read(spec.name) for spec in weights.table})))
        live = LiveParameters(ours, layout)
        for part in layout:
            live.write(part, np.ascontiguousarray(box_bits(weights, part)))
        assert memory(ours) == memory(loaded)
    return layout


# -- an engine as vLLM is one ------------------------------------------------------------------------------------------


def test_parts_of_all_workers_add_up_to_the_model() -> None:
    weights = weights_of(SHAPES)
    workers = []
    for rank in (0, 1):
        engine = Engine(rank)
        layout = check(engine.make, engine.load, weights)
        assert not layout.unknown
        model = engine.make()
        engine.load(model, stream(weights))
        workers.append(LiveParameters(model, layout))
    sums, truth = together(workers, weights), wc.fingerprint(weights)
    assert {name: one.digest for name, one in sums.items()} == {spec.name: truth[spec.name] for spec in weights.table}
    missing = {name for name, one in together(workers[:1], weights).items() if one.digest is None}
    assert missing == SHAPES.keys() - {"k", "v", "norm", "router", "scale"}


def test_flipped_element_is_found_and_named() -> None:
    weights, engine = weights_of(SHAPES), Engine(1)
    layout = learned(engine.make(), engine.load, weights.table)
    model = engine.make()
    engine.load(model, stream(weights))
    live = LiveParameters(model, layout)
    before = {spec.name: live.digest(spec) for spec in weights.table}
    rng = np.random.default_rng(3)
    named = set()
    for parameter, tensor in model.named_parameters():
        words = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        for element in rng.permutation(tensor.numel())[:20].tolist():
            words[element * tensor.element_size() + 1] ^= 0x10
            after = {spec.name: live.digest(spec) for spec in weights.table}
            words[element * tensor.element_size() + 1] ^= 0x10
            differing = [name for name in before if before[name] != after[name]]
            homes = [part.name for part in layout.by_parameter[parameter] if element in places_of(part, weights.table)]
            assert differing == homes
            named.update(homes)
    assert len(named) > 15


def places_of(part: Part, table: TensorTable) -> set[int]:
    """The elements of the parameter's storage that hold a part; padding is in none."""
    shape = table[part.name].shape
    return set(part.steps(shape).translate(np.arange(table[part.name].elements))[1].tolist())


# -- one loader at a time ----------------------------------------------------------------------------------------------


@dataclass
class One:
    """A loader of one tensor ``x`` into one parameter ``p``."""

    load: Callable[[torch.Tensor, torch.Tensor], object]
    x: tuple[str, tuple[int, ...]] = ("BF16", (4, 6))
    p: tuple[str, tuple[int, ...]] = ("BF16", (4, 6))
    unknown: str | None = None
    finite: bool = False

    def make(self) -> torch.nn.Module:
        return model_of(p=torch.empty(self.p[1], dtype=TORCH_DTYPES[self.p[0]]))

    def run(self, model: torch.nn.Module, given: Stream) -> None:
        for _, tensor in given:
            self.load(model.p.data, tensor)


def put(target: torch.Tensor, value: torch.Tensor) -> None:
    target[...] = value


def temporaries(p: torch.Tensor, x: torch.Tensor) -> None:
    room = torch.zeros(4)
    room += torch.ones(4)
    torch.add(room, room, out=room)
    for _ in range(50):
        torch.empty(1000).fill_(1)
    assert room.sum().item() == 8
    p.copy_(x)


def foreach(p: torch.Tensor, x: torch.Tensor) -> None:
    torch._foreach_copy_([p], [x])


def through_room(p: torch.Tensor, x: torch.Tensor) -> None:
    room = torch.empty(4, 6, dtype=x.dtype, device=x.device)
    room[:, :3], room[:, 3:] = x[:, 3:], x[:, :3]
    p.copy_(room)


KNOWN = {
    "whole": One(lambda p, x: p.copy_(x)),
    "assigned": One(put),
    "transposed": One(lambda p, x: p.copy_(x.t()), p=("BF16", (6, 4))),
    "transposed copy": One(lambda p, x: p.copy_(x.t().contiguous()), p=("BF16", (6, 4))),
    "into a transposed view": One(lambda p, x: p.t().copy_(x), p=("BF16", (6, 4))),
    "every other column": One(lambda p, x: p.copy_(x[:, ::2]), p=("BF16", (4, 3))),
    "odd rows": One(lambda p, x: p.copy_(x[1::2]), p=("BF16", (2, 6))),
    "into odd rows": One(lambda p, x: p[1::2].copy_(x), p=("BF16", (8, 6))),
    "every other, flat": One(lambda p, x: p.copy_(x.flatten()[::2]), p=("BF16", (12,))),
    "flat": One(lambda p, x: p.copy_(x.flatten()), p=("BF16", (24,))),
    "rows, flat and folded again": One(lambda p, x: p.copy_(x.flatten()[:12].view(4, 3)), p=("BF16", (4, 3))),
    "folded": One(lambda p, x: p.copy_(x.reshape(2, 2, 3, 2)), p=("BF16", (2, 2, 3, 2))),
    "a chain": One(lambda p, x: p.copy_(x.contiguous().clone().to("cpu").t().clone().t().contiguous())),
    "a slice of a copy": One(lambda p, x: p.copy_(x.t().contiguous()[2:4].t()), p=("BF16", (4, 2))),
    "widened": One(lambda p, x: p.copy_(x), p=("F32", (4, 6))),
    "widened half": One(lambda p, x: p.copy_(x), x=("F16", (4, 6)), p=("F32", (4, 6)), finite=True),
    "widened before": One(lambda p, x: p.copy_(x.float()), p=("F32", (4, 6))),
    "wide and back": One(lambda p, x: p.copy_(x.float()), finite=True),
    "no dimensions": One(lambda p, x: p.copy_(x), x=("F32", ()), p=("F32", ())),
    "no dimensions into one": One(lambda p, x: p.copy_(x.reshape(1)), x=("F32", ()), p=("F32", (1,))),
    "bytes": One(lambda p, x: p.copy_(x), x=("F8_E4M3", (3, 3)), p=("F8_E4M3", (3, 3))),
    "bits shown as others": One(
        lambda p, x: p.view(torch.uint8).copy_(x.view(torch.uint8)), x=("F8_E4M3", (3,)), p=("F8_E4M3", (3,))
    ),
    "bytes as what they are": One(lambda p, x: p.copy_(x.view(torch.int8)), x=("U8", (3,)), p=("I8", (3,))),
    "complex": One(lambda p, x: p.copy_(x), x=("C64", (3,)), p=("C64", (3,))),
    "padded before": One(lambda p, x: (p.zero_(), p[:4].copy_(x)), p=("BF16", (6, 6))),
    "padded behind": One(lambda p, x: (p[:4].copy_(x), put(p[4:], 0)), p=("BF16", (6, 6))),
    "padded at the side": One(lambda p, x: (p[:, :6].copy_(x), p[:, 6:].fill_(0)), p=("BF16", (4, 8))),
    "twice": One(lambda p, x: (p.copy_(x), p.copy_(x))),
    "temporaries": One(temporaries),
}

UNKNOWN = {
    "product": One(lambda p, x: p.copy_(x * 2), unknown="computes"),
    "in place": One(lambda p, x: p.copy_(x.mul_(2)), unknown="computes"),
    "concatenated": One(lambda p, x: p.copy_(torch.cat([x[2:], x[:2]])), unknown="computes"),
    "picked": One(lambda p, x: p.copy_(x[[3, 2, 1, 0]]), unknown="computes"),
    "index_put_": One(lambda p, x: p.index_put_((torch.tensor([3, 2, 1, 0]),), x), unknown="index_put_"),
    "add_": One(lambda p, x: p.add_(x), unknown="add_"),
    "out=": One(lambda p, x: torch.add(x, x, out=p), unknown="add"),
    "foreach": One(foreach, unknown="foreach"),
    "through a room": One(through_room, unknown="computes"),
    "its value": One(lambda p, x: p.fill_(x.item()), x=("F32", ()), unknown="reads its value", finite=True),
    "broadcast": One(lambda p, x: p.copy_(x), x=("BF16", (6,)), unknown="not a box"),
    "repeated": One(lambda p, x: p.copy_(x.expand(4, 6)), x=("BF16", (1, 6)), unknown="not a box"),
    "shuffled": One(lambda p, x: p.copy_(x.view(2, 12).t().reshape(24)), x=("BF16", (24,)), p=("BF16", (24,)),
                    unknown="not a box"),
    "cast we do not know": One(lambda p, x: p.copy_(x), p=("F16", (4, 6)),
                               unknown="casts it from BF16 to F16", finite=True),
    "rounded on the way": One(lambda p, x: p.copy_(x.bfloat16()), x=("F32", (4, 6)), p=("F32", (4, 6)),
                              unknown="casts", finite=True),
    "bits as numbers": One(lambda p, x: p.copy_(x.view(torch.int16)), unknown="casts"),
    "written over": One(lambda p, x: (p.copy_(x), p[1].fill_(0)), unknown="writes over it in p"),
    "scaled behind": One(lambda p, x: (p.copy_(x), p.mul_(2)), unknown="writes over it in p"),
    "conjugated": One(lambda p, x: p.copy_(x.conj()), x=("C64", (3,)), p=("C64", (3,)), unknown="not a box"),
    "moved on": One(lambda p, x: (p[:2].copy_(x[:2]), p[2:].copy_(p[:2])), unknown="computes"),
    "raises": One(lambda p, x: 1 // 0, unknown="cannot be traced: ZeroDivisionError"),
    "numpy": One(lambda p, x: p.numpy().__setitem__(0, x.numpy()), x=("F32", (4,)), p=("F32", (4,)),
                 unknown="cannot be traced"),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_loader_is_traced(name: str) -> None:
    one = KNOWN[name]
    layout = check(one.make, one.run, weights_of({"x": one.x}, finite=one.finite))
    assert not layout.unknown
    assert len(layout.locate("x")) == 1


@pytest.mark.parametrize("name", UNKNOWN)
def test_untraceable_loader_is_unknown_with_a_reason(name: str) -> None:
    one = UNKNOWN[name]
    layout = learned(one.make(), one.run, weights_of({"x": one.x}).table)
    assert layout.unknown.keys() == {"x"}
    assert one.unknown in layout.unknown["x"]
    assert not list(layout)


@pytest.mark.parametrize("load", [lambda p, x: p.copy_(x), lambda p, x: p.copy_(x.to(p.dtype))])
def test_rounded_tensor_is_traced_and_unverified(load: Callable[..., object]) -> None:
    one = One(load, x=("F32", (4, 6)), finite=True)
    weights = weights_of({"x": one.x}, finite=True)
    layout = check(one.make, one.run, weights)
    live = LiveParameters(one.make(), layout)
    sums = together([live], weights)
    assert sums["x"].digest is None
    assert sums["x"].problem == "BF16 in the engine is rounded from F32"


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (3, 0, 2)])
def test_tensors_without_elements_are_traced(shape: tuple[int, ...]) -> None:
    one = One(lambda p, x: p.copy_(x), x=("BF16", shape), p=("BF16", shape))
    weights = weights_of({"x": one.x})
    layout = check(one.make, one.run, weights)
    assert not layout.unknown
    assert together([LiveParameters(one.make(), layout)], weights)["x"].digest == wc.fingerprint(weights)["x"]


def test_empty_share_of_a_tensor_has_no_part() -> None:
    one = One(lambda p, x: p[:0].copy_(x[4:]))
    layout = check(one.make, one.run, weights_of({"x": one.x}))
    assert not layout.unknown
    assert not list(layout)


def test_dtype_that_torch_lacks_is_unknown_with_a_reason() -> None:
    one = One(lambda p, x: p.copy_(x))
    layout = learned(
        one.make(), one.run, TensorTable.of([TensorSpec("f4", "F4", (4,)), TensorSpec("x", "BF16", (4, 6))])
    )
    assert layout.unknown == {"f4": "torch has no dtype for F4"}
    assert [part.name for part in layout] == ["x"]


# -- several tensors ---------------------------------------------------------------------------------------------------

TWO = weights_of({"a": ("BF16", (4, 6)), "b": ("BF16", (4, 6))})


def two(load: Callable[[torch.Tensor, str, torch.Tensor], object], shape: tuple[int, ...]) -> Layout:
    def run(model: torch.nn.Module, given: Stream) -> None:
        for name, tensor in given:
            load(model.p.data, name, tensor)

    return check(lambda: model_of(p=torch.empty(shape, dtype=BF16)), run, TWO)


@pytest.mark.parametrize(
    ("load", "shape"),
    [
        (lambda p, name, x: p[:, 6 * (name == "b") :][:, :6].copy_(x), (4, 12)),
        (lambda p, name, x: p[name == "b" :: 2].copy_(x), (8, 6)),
        (lambda p, name, x: p[:, name == "b" :: 2].copy_(x), (4, 12)),
        (lambda p, name, x: p[..., int(name == "b")].copy_(x), (4, 6, 2)),
        (lambda p, name, x: p.copy_(x) if name == "a" else None, (4, 6)),
    ],
)
def test_interleaved_tensors_do_not_disturb_each_other(load: Callable[..., object], shape: tuple[int, ...]) -> None:
    assert not two(load, shape).unknown


def test_last_of_two_tensors_in_one_place_counts() -> None:
    layout = two(lambda p, name, x: p[:4].copy_(x), (5, 6))
    assert layout.unknown == {"a": "the loader writes over it in p"}
    assert [part.name for part in layout] == ["b"]


def test_tensors_that_overlap_in_one_row_are_noticed() -> None:
    layout = two(lambda p, name, x: p[3 * (name == "b") :][:4].copy_(x), (7, 6))
    assert layout.unknown == {"a": "the loader writes over it in p"}


def test_computed_tensor_does_not_affect_its_neighbour() -> None:
    layout = two(lambda p, name, x: p[4 * (name == "b") :][:4].copy_(x * 2 if name == "a" else x), (8, 6))
    assert layout.unknown == {"a": "the loader computes with it"}
    assert [part.name for part in layout] == ["b"]


def test_sum_of_two_tensors_is_traced_to_neither() -> None:
    kept: list[torch.Tensor] = []

    def load(p: torch.Tensor, name: str, x: torch.Tensor) -> None:
        kept.append(x)
        if name == "b":
            p.copy_(kept[-2] + kept[-1])

    assert two(load, (4, 6)).unknown.keys() == {"a", "b"}


def test_parameters_that_are_views_of_one_storage_are_traced() -> None:
    def make() -> torch.nn.Module:
        model = model_of(flat=torch.empty(48, dtype=BF16))
        model.register_buffer("a", model.flat.data[:24].view(4, 6))
        model.register_buffer("b", model.flat.data[24:].view(6, 4).t())
        return model

    def load(model: torch.nn.Module, given: Stream) -> None:
        for name, tensor in given:
            getattr(model, name).copy_(tensor)

    layout = check(make, load, TWO)
    assert not layout.unknown
    assert {part.parameter for part in layout} == {"flat"}


def test_storage_viewed_with_another_dtype_is_unknown() -> None:
    def make() -> torch.nn.Module:
        model = model_of(flat=torch.empty(96, dtype=torch.uint8))
        model.register_buffer("a", model.flat.data[:48].view(BF16).view(4, 6))
        return model

    def load(model: torch.nn.Module, given: Stream) -> None:
        model.a.copy_(dict(given)["a"])

    assert learned(make(), load, TWO.table).unknown.keys() == {"a"}


@pytest.mark.parametrize("how", ["data", "attribute", "new attribute"])
def test_loader_that_replaces_parameters_is_undone_and_not_trusted(how: str) -> None:
    model = model_of(p=torch.empty(4, 6, dtype=BF16))
    parameter, data = model.p, model.p.data_ptr()

    def load(model: torch.nn.Module, given: Stream) -> None:
        for _ in given:
            pass
        if how == "data":
            model.p.data = torch.zeros(6, 4, dtype=BF16)
        else:
            name = "p" if how == "attribute" else "q"
            setattr(model, name, torch.nn.Parameter(torch.zeros(4, 6, dtype=BF16)))

    layout = learned(model, load, TWO.table)
    assert layout.unknown.keys() == {"a", "b"}
    assert "in the place of parameters" in layout.unknown["a"]
    assert model.p is parameter
    assert model.p.data_ptr() == data
    assert dict(model.named_parameters()).keys() == {"p"}


def test_writes_outside_parameters_are_suppressed_and_not_traced() -> None:
    model = model_of(p=torch.empty(4, 6, dtype=BF16))
    model.beside = [torch.ones(4, 6, dtype=BF16)]

    def load(model: torch.nn.Module, given: Stream) -> None:
        for name, tensor in given:
            model.beside[0].fill_(3)
            (model.beside[0] if name == "a" else model.p).copy_(tensor)

    layout = learned(model, load, TWO.table)
    assert layout.unknown == {"a": "the loader writes with copy_"}
    assert bool((model.beside[0] == 1).all())


def test_out_arguments_do_not_reach_the_model() -> None:
    model = model_of(p=torch.empty(4, 6, dtype=BF16))

    def load(model: torch.nn.Module, given: Stream) -> None:
        ones = torch.ones(4, 6, dtype=BF16)
        torch.add(ones, ones, out=model.p.data)
        torch._foreach_add_([model.p.data], 1.0)

    assert not learned(model, load, TWO.table).unknown


# -- any views ---------------------------------------------------------------------------------------------------------


def any_view(draw: st.DrawFn, copies: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """A chain of operations, drawn as numbers that fit whatever shape they meet."""
    kinds = ["narrow", "transpose", "step", "flatten", "fold", "select"] + ["contiguous", "clone"] * copies
    chain = draw(st.lists(st.tuples(st.sampled_from(kinds), *[st.integers(0, 11)] * 3), max_size=5))

    def run(tensor: torch.Tensor) -> torch.Tensor:
        for kind, a, b, c in chain:
            if kind == "contiguous":
                tensor = tensor.contiguous()
            elif kind == "clone":
                tensor = tensor.clone()
            elif kind == "flatten":
                tensor = tensor.reshape(-1) if copies else tensor.flatten() if tensor.is_contiguous() else tensor
            elif tensor.ndim:
                tensor = _viewed(tensor, kind, a, b, c)
        return tensor

    return run


def _viewed(tensor: torch.Tensor, kind: str, a: int, b: int, c: int) -> torch.Tensor:
    dim = a % tensor.ndim
    size = tensor.shape[dim]
    if kind == "narrow":
        first = b % size
        return tensor.narrow(dim, first, 1 + c % (size - first))
    if kind == "transpose":
        return tensor.transpose(dim, b % tensor.ndim)
    if kind == "step":
        return tensor[(slice(None),) * dim + (slice(b % size, None, 1 + c % 3),)]
    if kind == "select":
        return tensor.select(dim, b % size)
    divisor = next(n for n in range(1 + b % size, 0, -1) if size % n == 0)
    return tensor.unflatten(dim, (divisor, size // divisor))


@given(st.data())
def test_any_views_and_copies_put_the_same_bits_where_the_loader_does(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 12), max_size=4)))
    source, target = any_view(data.draw, copies=True), any_view(data.draw, copies=False)
    room = tuple(data.draw(st.permutations([*shape, 2, 3]))) if data.draw(st.booleans()) else shape
    weights = weights_of({"x": ("I16", shape)})

    def run(model: torch.nn.Module, given: Stream) -> None:
        for _, tensor in given:
            seen, there = source(tensor), target(model.p.data)
            if seen.shape != there.shape:  # whatever both have in common
                dims = min(seen.ndim, there.ndim)
                seen, there = (one[(0,) * (one.ndim - dims)] if one.ndim > dims else one for one in (seen, there))
                common = tuple(slice(min(sizes)) for sizes in zip(seen.shape, there.shape, strict=True))
                seen, there = seen[common], there[common]
            there.copy_(seen)

    def make() -> torch.nn.Module:
        return model_of(p=torch.empty(room, dtype=torch.int16))

    layout = check(make, run, weights)
    assert not layout.unknown or layout.unknown == {"x": "the loader rearranges it, and the result is not a box"}


@given(st.data())
def test_views_without_copies_and_folds_are_always_known(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    kinds = ["narrow", "transpose", "step", "select"]
    chain = data.draw(st.lists(st.tuples(st.sampled_from(kinds), *[st.integers(0, 11)] * 3), max_size=5))
    copied = data.draw(st.integers(0, 6))

    def run(model: torch.nn.Module, given: Stream) -> None:
        for _, tensor in given:
            for i, (kind, a, b, c) in enumerate(chain):
                tensor = _viewed(tensor, kind, a, b, c) if tensor.ndim else tensor
                tensor = tensor.contiguous() if i == copied else tensor
            model.p.data[tuple(slice(size) for size in tensor.shape)].reshape(-1)  # looking is no harm
            flat = model.p.data.view(-1)[: tensor.numel()]
            flat.view(tensor.shape).copy_(tensor)

    layout = check(lambda: model_of(p=torch.empty(shape, dtype=torch.int16)), run, weights_of({"x": ("I16", shape)}))
    assert not layout.unknown
