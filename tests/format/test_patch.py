"""What patches promise: exact, idempotent, provable, composable."""

from pathlib import Path

import numpy as np
import pytest
from cases import DENSITIES, Bag, changes, gaussian, moved, one, same_bits, write_file
from hypothesis import given
from hypothesis import strategies as st

import weightcast as wc
from weightcast.errors import BaseError, ResultError, UsageError


@given(changes())
def test_applying_a_diff_gives_the_new_bits(pair: tuple[Bag, Bag]) -> None:
    old, new = pair
    patch = wc.diff(old, new)
    target = old.copy()
    reached = patch.apply(target, wc.fingerprint(old))
    assert same_bits(target, new)
    assert reached == wc.fingerprint(new)
    assert reached.digest == patch.result


@given(changes())
def test_applying_twice_changes_nothing(pair: tuple[Bag, Bag]) -> None:
    old, new = pair
    patch, target = wc.diff(old, new), old.copy()
    for _ in range(2):
        for tensor in patch.tensors:
            tensor.scatter(target.read(tensor.spec.name))
    assert same_bits(target, new)


def test_patch_holds_only_what_changed_in_order() -> None:
    rng = np.random.default_rng(0)
    old = gaussian(rng, 5000)
    new = moved(rng, old, 0.02)
    (tensor,) = wc.diff(one(old), one(new)).tensors
    assert np.array_equal(tensor.indices, np.flatnonzero(old != new))
    assert np.array_equal(tensor.new, new[old != new])
    assert np.array_equal(tensor.old, old[old != new])


def test_signed_zeros_and_nan_payloads_are_changes_and_equal_nans_are_not() -> None:
    old = np.array([0x0000, 0x8000, 0x7FC0, 0x7FC0, 0xFFC1, 0x7F80], np.uint16)
    new = np.array([0x8000, 0x0000, 0x7FC0, 0x7FC1, 0x7FC1, 0x7F80], np.uint16)
    (tensor,) = wc.diff(one(old), one(new)).tensors
    assert tensor.indices.tolist() == [0, 1, 3, 4]


def test_threads_do_not_change_a_patch() -> None:
    rng = np.random.default_rng(1)
    old = gaussian(rng, 3_000_000)
    pair = one(old), one(moved(rng, old, 0.01))
    with wc.Workers(3) as workers:
        assert wc.diff(*pair, workers=workers) == wc.diff(*pair)


def test_diff_without_a_change_is_an_empty_patch() -> None:
    weights = one(gaussian(np.random.default_rng(0), 100))
    patch = wc.diff(weights, weights)
    assert patch.tensors == ()
    assert patch.base == patch.result


def test_different_tables_are_refused_with_the_tensors_name() -> None:
    bits = np.zeros(4, np.uint16)
    with pytest.raises(UsageError, match="one side only") as error:
        wc.diff(one(bits, name="a"), one(bits, name="b"))
    assert error.value.tensor == "a"
    with pytest.raises(UsageError, match=r"BF16 \[4\] on one side and F16 \[4\]"):
        wc.diff(one(bits), one(bits, "F16"))


# -- proof -----------------------------------------------------------------------------------------------------------


def test_wrong_base_is_refused_and_nothing_is_touched() -> None:
    rng = np.random.default_rng(2)
    first = gaussian(rng, 1000)
    second, third = moved(rng, first, 0.1), moved(rng, first, 0.2)
    patch, target = wc.diff(one(first), one(second)), one(third.copy())
    with pytest.raises(BaseError, match="begins at") as error:
        patch.apply(target, wc.fingerprint(target))
    assert error.value.expected == patch.base
    assert np.array_equal(target.read("w"), third)


@pytest.mark.parametrize("what", ["new", "indices", "digest", "result"])
def test_false_patch_is_refused(what: str) -> None:
    from dataclasses import replace

    rng = np.random.default_rng(3)
    old = gaussian(rng, 1000)
    patch = wc.diff(one(old), one(moved(rng, old, 0.1)))
    (tensor,) = patch.tensors
    lies = {
        "new": {"new": tensor.new ^ np.uint16(1)},
        "indices": {"indices": tensor.indices[::-1].copy()},
        "digest": {"digest": tensor.digest ^ 1},
        "result": {},
    }
    lying = replace(patch, tensors=(replace(tensor, **lies[what]),))
    if what == "result":
        lying = replace(patch, result="0" * 64)
    with pytest.raises(ResultError):
        wc.advance(wc.fingerprint(one(old)), lying)


def test_anchor_is_a_patch_without_a_base() -> None:
    weights = Bag(
        {
            wc.TensorSpec("a", "BF16", (10, 10)): gaussian(np.random.default_rng(4), 100),
            wc.TensorSpec("empty", "F32", (0,)): np.empty(0, np.uint32),
            wc.TensorSpec("scalar", "F32", ()): np.array([7], np.uint32),
        }
    )
    blank = Bag({spec: np.zeros(spec.elements, spec.kind.word) for spec in weights.table})
    patch = wc.decode(wc.encode(wc.anchor(weights), "plain"), blank)
    assert patch.base is None
    assert patch.apply(blank, wc.fingerprint(blank)).digest == wc.fingerprint(weights).digest
    assert same_bits(blank, weights)


# -- compose ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.sampled_from(DENSITIES), st.sampled_from(DENSITIES))
def test_composing_equals_applying_in_order(seed: int, first: float, second: float) -> None:
    rng = np.random.default_rng(seed)
    states = [gaussian(rng, 400)]
    for density in (first, second):
        states.append(moved(rng, states[-1], density))
    a, b, c = (one(state) for state in states)
    assert wc.compose(wc.diff(a, b), wc.diff(b, c)) == wc.diff(a, c)


def test_elements_back_at_their_old_bits_are_dropped() -> None:
    old = gaussian(np.random.default_rng(5), 100)
    there = old.copy()
    there[[3, 50]] += np.uint16(1)
    back = there.copy()
    back[3] = old[3]
    composed = wc.compose(wc.diff(one(old), one(there)), wc.diff(one(there), one(back)))
    assert composed.tensors[0].indices.tolist() == [50]
    everything = wc.compose(wc.diff(one(old), one(there)), wc.diff(one(there), one(old)))
    assert everything.tensors == ()


def test_composing_keeps_tensors_that_only_one_patch_has() -> None:
    specs = [wc.TensorSpec(name, "U8", (2,)) for name in "ab"]
    states = [
        Bag({s: np.full(2, v, np.uint8) for s, v in zip(specs, values, strict=True)})
        for values in ([0, 0], [1, 0], [1, 2])
    ]
    composed = wc.compose(wc.diff(states[0], states[1]), wc.diff(states[1], states[2]))
    assert composed == wc.diff(states[0], states[2])


def test_patches_that_do_not_connect_are_refused() -> None:
    rng = np.random.default_rng(6)
    states = [one(gaussian(rng, 10)) for _ in range(4)]
    with pytest.raises(UsageError, match="ends at"):
        wc.compose(wc.diff(states[0], states[1]), wc.diff(states[2], states[3]))


# -- targets ---------------------------------------------------------------------------------------------------------


def test_arrays_are_overwritten_in_place() -> None:
    old = np.zeros(100, np.float32)
    weights, after = wc.Arrays({"w": old}), wc.Arrays({"w": np.ones(100, np.float32)})
    wc.diff(weights, after).apply(weights, wc.fingerprint(weights))
    assert (old == 1.0).all()


def test_target_that_cannot_be_overwritten_is_an_error(tmp_path: Path) -> None:
    fixed = np.zeros(100, np.float32)
    weights, after = wc.Arrays({"w": fixed}), wc.Arrays({"w": np.ones(100, np.float32)})
    patch = wc.diff(weights, after)
    write_file(tmp_path / "weights", weights)
    with wc.Checkpoint(tmp_path / "weights") as checkpoint, pytest.raises(UsageError, match="apply_in_place"):
        patch.apply(checkpoint, wc.fingerprint(checkpoint))
    fixed.flags.writeable = False
    frozen = wc.Arrays({"w": fixed})
    with pytest.raises(UsageError, match="read-only"):
        patch.apply(frozen, wc.fingerprint(weights))


def test_target_with_a_false_fingerprint_is_refused() -> None:
    small, large = one(np.zeros(10, np.uint16)), one(np.zeros(10**6, np.uint16))
    patch = wc.diff(large, one(np.ones(10**6, np.uint16)))
    with pytest.raises(UsageError, match="not the weights whose fingerprint"):
        patch.apply(small, wc.fingerprint(large))


def test_read_only_array_is_found_before_any_is_overwritten() -> None:
    first, second = np.zeros(10, np.float32), np.zeros(10, np.float32)
    second.flags.writeable = False
    target = wc.Arrays({"a": first, "b": second})
    before = wc.Arrays({"a": np.zeros(10, np.float32), "b": np.zeros(10, np.float32)})
    after = wc.Arrays({"a": np.ones(10, np.float32), "b": np.ones(10, np.float32)})
    with pytest.raises(UsageError, match="read-only"):
        wc.diff(before, after).apply(target, wc.fingerprint(before))
    assert not first.any()


def test_target_at_the_result_is_left_unchanged() -> None:
    rng = np.random.default_rng(7)
    old = gaussian(rng, 100)
    patch, target = wc.diff(one(old), one(moved(rng, old, 0.5))), one(old.copy())
    reached = patch.apply(target, wc.fingerprint(target))
    assert patch.apply(target, reached) == reached


@pytest.mark.parametrize("codec", ["plain", "gap", "banded"])
def test_encoding_against_weights_updated_in_place_is_refused(codec: str) -> None:
    rng = np.random.default_rng(8)
    old = gaussian(rng, 1000)
    new = moved(rng, old, 0.8)
    with pytest.raises(UsageError, match="not the base of this patch"):
        wc.encode(wc.diff(one(old), one(new)), codec, old=one(new))
    with pytest.raises(UsageError, match="another dtype or shape"):
        wc.encode(wc.diff(one(old), one(new)), codec, old=one(old[:10].copy()))


def test_strided_bits_are_refused() -> None:
    bits = np.zeros(20, np.uint16)
    strided = Bag({wc.TensorSpec("w", "BF16", (10,)): bits[::2]})
    with pytest.raises(UsageError, match="contiguous"):
        wc.diff(strided, strided, wc.fingerprint(one(bits[:10].copy())))


def test_anchor_is_encoded_only_as_plain() -> None:
    with pytest.raises(UsageError, match="without a base"):
        wc.encode(wc.anchor(one(np.empty(0, np.uint16))), "banded")


def test_patches_decoded_without_their_base_compose_and_apply_once_decoded_against_it() -> None:
    rng = np.random.default_rng(9)
    states = [one(bits := gaussian(rng, 100)), *(one(bits := moved(rng, bits, 0.1)) for _ in range(2))]
    first, second = (wc.decode(wc.encode(wc.diff(*states[i : i + 2]), "plain")) for i in range(2))
    whole = wc.compose(first, second)
    assert whole.tensors[0].old is None
    target = one(states[0].read("w").copy())
    with pytest.raises(UsageError, match=r"the old bits are unknown.*Decode the patch with"):
        whole.apply(target, wc.fingerprint(target))
    assert same_bits(target, states[0])
    wc.decode(wc.encode(whole, "plain"), target).apply(target, wc.fingerprint(target))
    assert same_bits(target, states[2])
