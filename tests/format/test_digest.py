"""Digests add up, follow every change, and do not collide where mistakes are made."""

import itertools

import numpy as np
import pytest
from cases import Bag, changes, gaussian, moved, one
from hypothesis import given
from hypothesis import strategies as st

import weightcast as wc
from weightcast.errors import UsageError
from weightcast.format.diff import diff_tensors
from weightcast.format.digest import MODULUS, tensor_digest
from weightcast.format.kernels import cpu

MASK = MODULUS - 1


def mix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def reference(start: int, bits: list[int]) -> int:
    """SPEC 4.2 in plain integers."""
    salts = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
    terms = (mix64(mix64((start + i + salts[0]) & MASK) ^ mix64((b + salts[1]) & MASK)) for i, b in enumerate(bits))
    return sum(terms) & MASK


@pytest.mark.parametrize("word", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("start", [0, 2**32 - 3, 2**40 + 1, 2**48 - 70])
def test_digest_is_the_specified_sum_4_2(word: type, start: int) -> None:
    bits = np.random.default_rng(1).integers(0, np.iinfo(word).max, 70, word, endpoint=True)
    assert int(cpu.digest_runs(bits, np.array([start]))) == reference(start, bits.tolist())


@given(changes())
def test_incremental_digest_equals_a_full_one(pair: tuple[Bag, Bag]) -> None:
    old, new = pair
    for spec in old.table:
        before, after = old.read(spec.name), new.read(spec.name)
        (patch,) = diff_tensors([spec], [before], [after], [tensor_digest(before)])
        assert patch.digest == tensor_digest(after)


def test_threads_do_not_change_a_digest() -> None:
    bits = gaussian(np.random.default_rng(0), 3_000_001)
    with wc.Workers(3) as workers:
        assert tensor_digest(bits, workers) == tensor_digest(bits)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 2**32), st.data())
def test_boxes_add_up(shape: list[int], seed: int, data: st.DataObject) -> None:
    tensor = np.random.default_rng(seed).integers(0, 1 << 16, shape).astype(np.uint16)
    cuts = [sorted({0, size, data.draw(st.integers(0, size))}) for size in shape]
    total = 0
    for corner in itertools.product(*(itertools.pairwise(cut) for cut in cuts)):
        box = tensor[tuple(slice(low, high) for low, high in corner)]
        total += wc.box_digest(box, [low for low, _ in corner], shape)
    assert total % MODULUS == tensor_digest(tensor.reshape(-1))


def test_box_outside_its_tensor_is_refused() -> None:
    with pytest.raises(UsageError, match="not inside"):
        wc.box_digest(np.zeros((2, 2), np.uint16), [3, 0], [4, 4])


def test_nearby_indices_and_bits_do_not_collide() -> None:
    """mix(i, b) of a whole neighbourhood, with the swaps that a plain xor or shift would confuse."""
    terms = {
        int(cpu.mix(np.int64(i), np.uint64(b)))
        for i in itertools.chain(range(300), range(2**16 - 5, 2**16 + 5), range(2**32 - 5, 2**32 + 5))
        for b in itertools.chain(range(300), range(2**15 - 5, 2**15 + 5), range(2**16 - 5, 2**16))
    }
    assert len(terms) == 320 * 315


def test_swapped_neighbours_and_shifted_tensors_differ() -> None:
    bits = gaussian(np.random.default_rng(2), 1000)
    seen = {tensor_digest(bits)}
    for i in range(999):
        swapped = bits.copy()
        swapped[i], swapped[i + 1] = bits[i + 1], bits[i]
        if bits[i] != bits[i + 1]:
            seen.add(tensor_digest(swapped))
    seen.add(tensor_digest(np.roll(bits, 1)))
    assert len(seen) == 2 + int((bits[:-1] != bits[1:]).sum())


def test_position_depends_on_names_dtypes_shapes_aliases_and_bits() -> None:
    bits = np.arange(6, dtype=np.uint16)
    spec = wc.TensorSpec("w", "BF16", (6,))
    variants = [
        Bag({spec: bits}),
        Bag({spec: bits + np.uint16(1)}),
        Bag({wc.TensorSpec("v", "BF16", (6,)): bits}),
        Bag({wc.TensorSpec("w", "F16", (6,)): bits}),
        Bag({wc.TensorSpec("w", "BF16", (2, 3)): bits}),
        Bag({spec: bits}, {"tied": "w"}),
        Bag({}),
    ]
    assert len({wc.fingerprint(weights).digest for weights in variants}) == len(variants)


def test_moved_element_changes_the_position() -> None:
    rng = np.random.default_rng(3)
    old = gaussian(rng, 500)
    assert wc.fingerprint(one(old)) != wc.fingerprint(one(moved(rng, old, 0.01)))
