"""`decode(encode(p)) == p` for arbitrary bits of every dtype and density, and nothing costs more than it must."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases import DENSITIES, PACKED_DTYPES, VALUE_DTYPES, Bag, changes, gaussian, moved, one, random_bits
from hypothesis import given
from hypothesis import strategies as st

import weightcast as wc
from weightcast.errors import UsageError
from weightcast.format.codec import CODECS
from weightcast.format.codec.blocks import Window, decode_in_windows, some_blocks
from weightcast.format.codec.ranks import rank_tensors
from weightcast.format.kernels.bands import BLOCK
from weightcast.format.kernels.tasks import RAW
from weightcast.format.patch import TensorPatch
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import BytesSource
from weightcast.format.spec import DTYPES
from weightcast.format.tensors import Bits
from weightcast.format.workers import ONE

codecs = pytest.mark.parametrize("codec", list(CODECS))


def round_trip(old: Bag, new: Bag, codec: str) -> bytes:
    patch = wc.diff(old, new)
    data = wc.encode(patch, codec, old)
    assert wc.decode(data, old) == patch
    return data


@codecs
@given(changes())
def test_any_bits_round_trip(codec: str, pair: tuple[Bag, Bag]) -> None:
    round_trip(*pair, codec)


@codecs
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("dtype", VALUE_DTYPES + PACKED_DTYPES)
def test_every_dtype_at_every_density(codec: str, density: float, dtype: str) -> None:
    rng = np.random.default_rng(0)
    old = random_bits(rng, wc.TensorSpec("w", dtype, (2400,)))
    for furthest in (1, 40, 2**62):
        round_trip(one(old, dtype), one(moved(rng, old, density, furthest), dtype), codec)


@codecs
def test_all_bf16_patterns_against_sampled_partners(codec: str) -> None:
    rng = np.random.default_rng(1)
    every = np.arange(1 << 16, dtype=np.uint16)
    special = np.array([0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x7F7F, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF], np.uint16)
    for partner in (*special, *rng.integers(0, 1 << 16, 8).astype(np.uint16)):
        round_trip(one(every), one(np.full_like(every, partner)), codec)
        round_trip(one(np.full_like(every, partner)), one(every), codec)
    round_trip(one(every), one(rng.permutation(every)), codec)


@codecs
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"])
def test_zeros_nans_infinities_and_denormals(codec: str, dtype: str) -> None:
    width, mantissa = DTYPES[dtype].width, DTYPES[dtype].mantissa
    assert mantissa is not None
    top, infinity = 1 << (width - 1), ((1 << (width - 1 - mantissa)) - 1) << mantissa
    bits = [0, 1, 2, (1 << mantissa) - 1, 1 << mantissa, infinity - 1, infinity, infinity + 1, top - 1]
    pool = np.array(bits + [top | b for b in bits], DTYPES[dtype].word)
    a, b = (grid.reshape(-1).copy() for grid in np.meshgrid(pool, pool))
    round_trip(one(a, dtype), one(b, dtype), codec)


@codecs
@pytest.mark.parametrize("size", [0, 1, 2, 63, 64, 65, 4095, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 17])
def test_changes_at_block_edges_round_trip(codec: str, size: int) -> None:
    rng = np.random.default_rng(size)
    old = gaussian(rng, size)
    new = moved(rng, old, 0.01)
    if size:
        new[[0, -1]] ^= np.uint16(1)
    round_trip(one(old), one(new), codec)


@codecs
def test_threads_do_not_change_the_bytes(codec: str) -> None:
    rng = np.random.default_rng(2)
    old = gaussian(rng, 10 * BLOCK)
    before, after = one(old), one(moved(rng, old, 0.01))
    patch = wc.diff(before, after)
    with wc.Workers(4) as workers:
        data = wc.encode(patch, codec, before, workers)
        assert data == wc.encode(patch, codec, before)
        assert wc.decode(data, before, workers) == patch


@codecs
def test_unchanged_blocks_cost_nothing(codec: str) -> None:
    old = gaussian(np.random.default_rng(3), 40 * BLOCK)
    new = old.copy()
    new[31 * BLOCK + 5] ^= np.uint16(1)
    assert len(round_trip(one(old), one(new), codec)) < 1000


@codecs
def test_patch_without_changes_round_trips(codec: str) -> None:
    old = one(gaussian(np.random.default_rng(4), 1000))
    assert len(round_trip(old, old, codec)) < 700


@pytest.mark.parametrize("codec", ["gap", "banded"])
def test_random_bits_are_stored_raw_at_their_own_size(codec: str) -> None:
    rng = np.random.default_rng(5)
    old, new = (random_bits(rng, wc.TensorSpec("w", "BF16", (3 * BLOCK,))) for _ in range(2))
    data = round_trip(one(old), one(new), codec)
    assert len(data) < old.nbytes + 1000
    reader = PatchReader(BytesSource(data))
    stream = reader.coded(reader.rows[0]).streams["blocks"]
    assert stream[0] == RAW


def test_plain_is_dense_where_indices_would_cost_more() -> None:
    rng = np.random.default_rng(6)
    old = gaussian(rng, 10_000)
    data = round_trip(one(old), one(moved(rng, old, 0.8)), "plain")
    assert len(data) < old.nbytes + 700


def test_banded_beats_gap_beats_plain_on_training_like_changes() -> None:
    rng = np.random.default_rng(7)
    master = (rng.standard_normal(1 << 20) * 0.03).astype(np.float32)
    old = wc.round_to("BF16", master)
    new = wc.round_to("BF16", master + (rng.standard_normal(master.size) * 4e-7).astype(np.float32))
    sizes = [len(round_trip(one(old), one(new), codec)) for codec in ("banded", "gap", "plain")]
    assert sizes[0] * 1.3 < sizes[1]
    assert sizes[1] * 4 < sizes[2]


def test_half_of_the_weights_moved_still_costs_far_less_than_16_bits() -> None:
    rng = np.random.default_rng(8)
    old = gaussian(rng, 1 << 18)
    data = round_trip(one(old), one(moved(rng, old, 0.5, 1)), "banded")
    assert 8 * len(data) / old.size < 2.2


@given(st.integers(0, 2**32), st.sampled_from(DENSITIES))
def test_composed_patch_can_be_coded_without_its_base(seed: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    old = gaussian(rng, 3000)
    middle = moved(rng, old, density, 2**14)
    new = moved(rng, middle, density, 2**14)
    composed = wc.compose(wc.diff(one(old), one(middle)), wc.diff(one(middle), one(new)))
    data = wc.encode(composed, "gap")
    assert wc.decode(data, one(old)) == composed


def test_banded_without_the_old_tensor_is_refused() -> None:
    rng = np.random.default_rng(9)
    old = gaussian(rng, 100)
    patch = wc.diff(one(old), one(moved(rng, old, 0.5)))
    with pytest.raises(UsageError, match="whole old tensor"):
        wc.encode(patch, "banded")
    with pytest.raises(UsageError, match="old tensor"):
        wc.decode(wc.encode(patch, "gap"))


# -- patches that no diff made -------------------------------------------------------------------------------------

WRONG_PATCHES = {
    "unsorted": {"indices": np.array([5, 3])},
    "repeated": {"indices": np.array([3, 3])},
    "negative": {"indices": np.array([-1, 3])},
    "outside": {"indices": np.array([3, BLOCK + 100])},
    "of another type": {"indices": np.array([3, 5], np.int32)},
    "with other bits": {"new": np.array([1, 2], np.uint32)},
    "with too few bits": {"new": np.array([1], np.uint16)},
}


@pytest.mark.parametrize("codec", ["gap", "banded"])
@pytest.mark.parametrize("wrong", WRONG_PATCHES.values(), ids=WRONG_PATCHES)
def test_patch_made_by_hand_is_checked_before_kernels_use_it(codec: str, wrong: dict[str, np.ndarray]) -> None:
    old = one(np.zeros(BLOCK + 100, np.uint16))
    (spec,) = old.table
    good = TensorPatch(spec, np.array([3, 5]), np.array([1, 2], np.uint16), np.zeros(2, np.uint16), 0)
    with pytest.raises(UsageError):
        CODECS[codec].encode([(replace(good, **wrong), old.read(spec.name))], ONE)
    assert CODECS[codec].encode([(good, old.read(spec.name))], ONE)


def test_ranks_of_other_changes_are_refused() -> None:
    old = one(np.zeros(100, np.uint16))
    (spec,) = old.table
    patches = [TensorPatch(spec, np.arange(n), np.ones(n, np.uint16), np.zeros(n, np.uint16), 0) for n in (2, 3)]
    listed = [(patch.indices, patch.old, patch.new) for patch in patches]
    (ranks,) = rank_tensors([spec], listed[:1], [old.read(spec.name)], ONE)
    assert CODECS["banded"].encode([(patches[0], ranks)], ONE)
    with pytest.raises(UsageError, match="ranks"):
        CODECS["banded"].encode([(patches[1], ranks)], ONE)


# -- more elements than 32 bits can number ------------------------------------------------------------------------


@pytest.fixture
def huge(tmp_path: Path) -> Bits:
    """2**33 elements of nothing: a sparse file, mapped; no page of it is ever written."""
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(1 << 33)
    return np.asarray(np.memmap(path, np.uint8, "r+"))


@codecs
def test_tensors_over_2_to_32_elements(codec: str, huge: Bits) -> None:
    places = np.array([0, 5, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**33 - 1], np.int64)
    spec = wc.TensorSpec("w", "U8", (1 << 33,))
    patch = TensorPatch(spec, places, np.arange(1, 8, dtype=np.uint8), np.zeros(7, np.uint8), 0)
    (coded,) = CODECS[codec].encode([(patch, huge)], ONE)
    assert CODECS[codec].decode([(coded, huge)], ONE) == [patch]
    assert sum(stream.nbytes for stream in coded.streams.values()) < 200
    if codec == "plain":
        assert coded.streams["indices"].dtype == np.int64


def test_changes_are_found_past_2_to_32() -> None:
    from weightcast.format.kernels import cpu

    old, new = np.zeros(200, np.uint16), np.zeros(200, np.uint16)
    new[[3, 199]] = 1
    indices, was, now = np.empty(200, np.int64), np.empty(200, np.uint16), np.empty(200, np.uint16)
    assert cpu.changes(old, new, 2**33, indices, was, now) == 2
    assert indices[:2].tolist() == [2**33 + 3, 2**33 + 199]


@pytest.mark.parametrize("codec", ["gap", "banded"])
def test_some_blocks_are_decoded_within_a_window_of_the_old_elements(codec: str) -> None:
    old = gaussian(np.random.default_rng(2), 4 * BLOCK + 100)
    new = moved(np.random.default_rng(3), old, 0.01)
    data = wc.encode(wc.diff(one(old), one(new)), codec, one(old))
    reader = PatchReader(BytesSource(data))
    coded = reader.coded(reader.rows[0])
    whole = wc.decode(data, one(old)).tensors[0]
    for chosen, begin, end in (([1, 2], BLOCK, 3 * BLOCK), ([1, 3], BLOCK, 4 * BLOCK), ([3, 4], 3 * BLOCK, old.size)):
        some = some_blocks(coded, np.isin(np.arange(5), chosen))
        (patch,) = decode_in_windows([(some, Window(begin, old[begin:end].copy()))], ONE)
        wanted = np.isin(whole.indices // BLOCK, chosen)
        assert np.array_equal(patch.indices, whole.indices[wanted])
        assert np.array_equal(patch.new, whole.new[wanted])
        assert np.array_equal(patch.old, whole.old[wanted])
        for first, last in ((begin + 1, end), (begin, end - 1)):
            with pytest.raises(UsageError, match="outside of the old elements"):
                decode_in_windows([(some, Window(first, old[first:last].copy()))], ONE)
