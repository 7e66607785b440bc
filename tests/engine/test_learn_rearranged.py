"""Tensors that a loader concatenates, picks, interleaves or repeats are found in several parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from loaders import One, check, learned  # noqa: E402
from sharded_engine import BF16, Stream, weights_of  # noqa: E402

from weightcast.engine.learn import learn  # noqa: E402
from weightcast.format.spec import TensorSpec, TensorTable  # noqa: E402


def through_room(p: torch.Tensor, x: torch.Tensor) -> None:
    room = torch.empty(4, 6, dtype=x.dtype, device=x.device)
    room[:, :3], room[:, 3:] = x[:, 3:], x[:, :3]
    p.copy_(room)


def padded_room(x: torch.Tensor) -> torch.Tensor:
    room = torch.empty(6, 6, dtype=x.dtype)
    room.zero_()
    room[1:5] = x
    room[5].fill_(0)
    return room


def interleave(heads: int, kinds: int, size: int) -> Callable[..., None]:
    """Queries, keys and values of each head become all queries, all keys, all values, as for BLOOM and GPT-NeoX."""

    def load(p: torch.Tensor, x: torch.Tensor, mine: slice = slice(None)) -> None:
        apart = x.view(heads, kinds, size, *x.shape[1:]).transpose(0, 1).reshape(x.shape)
        apart = apart.view(kinds, heads * size, *x.shape[1:])[:, mine] if mine != slice(None) else apart
        p.copy_(apart.reshape(p.shape))

    return load


def grouped(groups: int, queries: int, size: int) -> Callable[..., None]:
    """The same for heads in groups that share a key and a value, as Falcon has them."""

    def load(p: torch.Tensor, x: torch.Tensor) -> None:
        apart = x.view(groups, queries + 2, size, *x.shape[1:])
        kinds = apart.narrow(1, 0, queries), apart.narrow(1, queries, 1), apart.narrow(1, queries + 1, 1)
        p.copy_(torch.cat([kind.reshape(-1, *x.shape[1:]) for kind in kinds]))

    return load


# Per loader, into how many parts a tensor falls.
IN_PARTS = {
    "concatenated": (2, One(lambda p, x: p.copy_(torch.cat([x[2:], x[:2]])))),
    "concatenated columns": (2, One(lambda p, x: p.copy_(torch.cat([x[:, 2:], x[:, :2]], dim=1)))),
    "concatenated and narrowed": (2, One(lambda p, x: p.copy_(torch.cat([x[2:], x[:2]])[1:3]), p=("BF16", (2, 6)))),
    "concatenated and transposed": (2, One(lambda p, x: p.copy_(torch.cat([x[2:], x[:2]]).t()), p=("BF16", (6, 4)))),
    "concatenated and a slice of columns": (
        2, One(lambda p, x: p.copy_(torch.cat([x[2:], x[:2]])[:, 2:5]), p=("BF16", (4, 3)))
    ),
    "concatenated with nothing": (1, One(lambda p, x: p.copy_(torch.cat([x, x[:0]])))),
    "concatenated and widened": (2, One(lambda p, x: p.copy_(torch.cat([x[2:], x[:2]]).float()), p=("F32", (4, 6)))),
    "widened and concatenated": (2, One(lambda p, x: p.copy_(torch.cat([x[2:].float(), x[:2].float()])),
                                        p=("F32", (4, 6)))),
    "twice concatenated": (2, One(lambda p, x: p.copy_(torch.cat([torch.cat([x[3:], x[:1]]), x[1:3]])))),
    "concatenated again as it was": (1, One(lambda p, x: p.copy_(torch.cat([x[:2], x[2:]])))),
    "padded by concatenation": (1, One(lambda p, x: p.copy_(torch.cat([x, torch.zeros(2, 6, dtype=BF16)])),
                                       p=("BF16", (6, 6)))),
    "padded": (1, One(lambda p, x: p.copy_(torch.nn.functional.pad(x, (0, 2, 1, 1))), p=("BF16", (6, 8)))),
    "stacked": (2, One(lambda p, x: p.copy_(torch.stack([x[2:], x[:2]])), p=("BF16", (2, 2, 6)))),
    "stacked last": (2, One(lambda p, x: p.copy_(torch.stack([x[:, 3:], x[:, :3]], dim=-1)), p=("BF16", (4, 3, 2)))),
    "picked": (4, One(lambda p, x: p.copy_(x[torch.tensor([3, 2, 1, 0])]))),
    "every other row first": (2, One(lambda p, x: p.copy_(x[torch.tensor([0, 2, 1, 3])]))),
    "picked columns": (2, One(lambda p, x: p.copy_(x[:, torch.tensor([1, 3, 5, 0, 2, 4])]))),
    "index_select": (2, One(lambda p, x: p.copy_(x.index_select(0, torch.tensor([2, 3, 0, 1]))))),
    "flipped": (4, One(lambda p, x: p.copy_(x.flip(0)))),
    "rolled": (2, One(lambda p, x: p.copy_(x.roll(1, 0)))),
    "through a room": (2, One(through_room)),
    "through a padded room": (1, One(lambda p, x: p.copy_(padded_room(x)), p=("BF16", (6, 6)))),
    "interleaved": (6, One(interleave(2, 3, 4), x=("BF16", (24, 5)), p=("BF16", (24, 5)))),
    "interleaved bias": (6, One(interleave(2, 3, 4), x=("BF16", (24,)), p=("BF16", (24,)))),
    "interleaved and sharded": (6, One(lambda p, x: interleave(2, 3, 4)(p, x, slice(2, 6)), x=("BF16", (24, 5)),
                                       p=("BF16", (12, 5)))),
    "one head of interleaved ones": (1, One(lambda p, x: interleave(2, 3, 4)(p, x, slice(4, 8)), x=("BF16", (24, 5)),
                                            p=("BF16", (12, 5)))),
    "grouped and concatenated": (6, One(grouped(2, 3, 4), x=("BF16", (40, 5)), p=("BF16", (40, 5)))),
    "grouped bias": (6, One(grouped(2, 3, 4), x=("BF16", (40,)), p=("BF16", (40,)))),
    "broadcast": (4, One(lambda p, x: p.copy_(x), x=("BF16", (6,)))),
    "repeated": (4, One(lambda p, x: p.copy_(x.expand(4, 6)), x=("BF16", (1, 6)))),
    "repeated heads": (2, One(lambda p, x: p.copy_(x.repeat(2, 1)), x=("BF16", (4, 3)), p=("BF16", (8, 3)))),
    "shuffled": (2, One(lambda p, x: p.copy_(x.view(2, 12).t().reshape(24)), x=("BF16", (24,)), p=("BF16", (24,)))),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PARTS)
def test_rearranged_tensor_falls_into_parts(name: str) -> None:
    count, one = IN_PARTS[name]
    layout = check(one.make, one.run, weights_of({"x": one.x}, finite=one.finite))
    assert not layout.unknown
    assert len(layout.locate("x")) == count


@pytest.mark.parametrize("name", ["concatenated", "interleaved", "grouped bias", "padded", "through a padded room"])
def test_default_device_of_the_engine_is_not_used_for_numbers(name: str) -> None:
    count, one = IN_PARTS[name]

    def run(model: torch.nn.Module, given: Stream) -> None:
        with torch.device("meta"):
            one.run(model, given)

    layout = learned(one.make(), run, weights_of({"x": one.x}).table)
    assert not layout.unknown
    assert len(layout.locate("x")) == count


def test_rows_of_a_big_matrix_are_numbered_and_not_its_elements() -> None:
    def load(model: torch.nn.Module, given: Stream) -> None:
        for _, x in given:
            interleave(128, 3, 128)(model.p.data, x)

    rows, columns = 3 * 128 * 128, 1 << 17  # 13 GB of weights
    model = torch.nn.Module()
    model.p = torch.nn.Parameter(torch.empty(rows, columns, dtype=BF16, device="meta"), requires_grad=False)
    layout = learn(model, lambda given: load(model, given), TensorTable.of([TensorSpec("x", "BF16", (rows, columns))]))
    assert (dict(layout.unknown), dict(layout.uncovered)) == ({}, {})
    assert len(layout.locate("x")) == 3 * 128


# -- any moves ---------------------------------------------------------------------------------------------------------


def moved(x: torch.Tensor, kind: str, a: int, b: int, c: int) -> torch.Tensor:
    """One operation that moves elements, drawn as numbers that fit whatever shape they meet."""
    dim = a % x.ndim
    size = x.shape[dim]
    cut = b % (size + 1)
    head, tail = x.narrow(dim, 0, cut), x.narrow(dim, cut, size - cut)
    if kind == "cat":
        return torch.cat([tail, torch.zeros(head.shape, dtype=x.dtype), head][:: 1 + c % 2], dim)
    if kind == "stack":
        return torch.stack([x, x.flip(dim)], c % (x.ndim + 1)).flatten(0, 1)
    if kind == "pick":
        order = torch.randperm(size, generator=torch.Generator().manual_seed(c))
        return x.index_select(dim, order) if b % 2 else x[(slice(None),) * dim + (order,)]
    if kind == "room":
        room = torch.zeros(x.shape, dtype=x.dtype)
        room.narrow(dim, 0, size - cut).copy_(tail)
        room.narrow(dim, size - cut, cut)[...] = head
        return room
    if kind == "roll":
        return x.roll(c, dim)
    if kind == "pad":
        return torch.nn.functional.pad(x, (b % 3, c % 2))
    if kind == "regroup":
        divisor = next(n for n in range(1 + b % size, 0, -1) if size % n == 0) if size else 1
        return x.unflatten(dim, (divisor, -1 if size else 0)).transpose(dim, dim + 1).flatten(dim, dim + 1)
    return x.transpose(dim, c % x.ndim)


@given(st.data())
def test_any_moves_put_the_same_bits_where_the_loader_does(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    kinds = ["cat", "stack", "pick", "room", "roll", "pad", "regroup", "transpose"]
    chain = data.draw(st.lists(st.tuples(st.sampled_from(kinds), *[st.integers(0, 11)] * 3), min_size=1, max_size=4))

    def rearranged(x: torch.Tensor) -> torch.Tensor:
        for kind, a, b, c in chain:
            x = moved(x, kind, a, b, c)
        return x

    x = "I16", shape
    target = tuple(rearranged(torch.zeros(shape, dtype=torch.int16)).shape)
    one = One(lambda p, x: p.copy_(rearranged(x)), x=x, p=("I16", target))
    layout = check(one.make, one.run, weights_of({"x": x}))
    assert (dict(layout.unknown), dict(layout.uncovered)) == ({}, {})
