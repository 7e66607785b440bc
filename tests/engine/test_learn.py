"""Layouts are learned from an engine's own loader: nothing is written, what is known is right, what is not is named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from loaders import One, check, learned  # noqa: E402
from sharded_engine import BF16, SHAPES, Engine, Stream, model_of, stream, together, weights_of  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.engine.layout import Layout, Part  # noqa: E402
from weightcast.engine.live import LiveParameters  # noqa: E402
from weightcast.format.spec import TensorSpec, TensorTable  # noqa: E402

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


def shuffled(count: int) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


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
    "index_put_": One(lambda p, x: p.index_put_((torch.tensor([3, 2, 1, 0]),), x), unknown="index_put_"),
    "add_": One(lambda p, x: p.add_(x), unknown="add_"),
    "out=": One(lambda p, x: torch.add(x, x, out=p), unknown="add"),
    "foreach": One(foreach, unknown="foreach"),
    "its value": One(lambda p, x: p.fill_(x.item()), x=("F32", ()), unknown="reads its value", finite=True),
    "broadcast to many rows": One(lambda p, x: p.copy_(x), x=("BF16", (6,)), p=("BF16", (1025, 6)),
                                  unknown="not a box"),
    "shuffled at random": One(lambda p, x: p.copy_(x[shuffled(3000)]), x=("I16", (3000,)), p=("I16", (3000,)),
                              unknown="not a box"),
    "picked by a list": One(lambda p, x: p.copy_(x[[3, 2, 1, 0]]), unknown="computes"),  # torch loses it on stand-ins
    "picked by itself": One(lambda p, x: p.copy_(x[x]), x=("I64", (4,)), p=("I64", (4,)), unknown="computes"),
    "a sum in a room": One(lambda p, x: p.copy_(torch.cat([x[:2], x[2:] * 2])), unknown="computes"),
    "bits of another dtype in a room": One(lambda p, x: p.copy_(torch.cat([x[2:], x[:2]]).view(torch.int16)),
                                           unknown="not a box"),
    "two casts in a room": One(lambda p, x: p.copy_(torch.cat([x[:2], x[2:].half()])), unknown="computes"),
    "a room filled with a value": One(lambda p, x: p.copy_(torch.empty(4, 6, dtype=BF16).fill_(x[0, 0])),
                                      unknown="computes"),
    "a room scaled": One(lambda p, x: p.copy_(torch.cat([x[2:], x[:2]]).mul_(2)), unknown="computes"),
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


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_tensors_joined_in_one_copy_are_told_apart(join: Callable[..., torch.Tensor]) -> None:
    def load(model: torch.nn.Module, given: Stream) -> None:
        both = dict(given)
        model.p.data.copy_(join([both["b"], both["a"]]).view(8, 6))

    layout = check(lambda: model_of(p=torch.empty(8, 6, dtype=BF16)), load, TWO)
    assert not layout.unknown
    assert [part.offset for part in layout] == [24, 0]


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
            setattr(model, name, torch.nn.Parameter(torch.zeros(6, 4, dtype=BF16)))

    layout = learned(model, load, TWO.table)
    assert layout.unknown.keys() == {"a", "b"}
    assert "in the place of parameters" in layout.unknown["a"]
    assert model.p is parameter
    assert model.p.data_ptr() == data
    assert dict(model.named_parameters()).keys() == {"p"}


@pytest.mark.parametrize("how", ["data", "attribute"])
def test_parameter_that_the_loader_replaces_by_its_like_is_traced_and_kept(how: str) -> None:
    def load(model: torch.nn.Module, given: Stream) -> None:
        for name, tensor in given:
            if name == "b":
                new = torch.zeros(4, 6, dtype=BF16)
                new.copy_(tensor)
                if how == "data":
                    model.p.data = new
                else:
                    model.p = torch.nn.Parameter(new, requires_grad=False)

    def make() -> torch.nn.Module:
        return model_of(p=torch.empty(4, 6, dtype=BF16))

    model = make()
    parameter, data = model.p, model.p.data_ptr()
    learned(model, load, TWO.table)
    assert model.p is parameter
    assert model.p.data_ptr() == data
    layout = check(make, load, TWO)
    assert (dict(layout.unknown), dict(layout.uncovered)) == ({}, {})
    assert [(part.name, part.parameter) for part in layout] == [("b", "p")]


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

    assert not check(make, run, weights).unknown


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
