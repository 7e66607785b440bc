"""The first step of coding blocks in Triton: changes in the order of their bands (SPEC 6.5)."""

from __future__ import annotations

import triton
import triton.language as tl

from weightcast.format.kernels.bands import MAX_BANDS
from weightcast.torch.kernels.triton import key_of, step_of
from weightcast.torch.kernels.triton_coding import TALLIES, changes_of, load_bits

_BANDS = tl.constexpr(MAX_BANDS)
_TALLIES = tl.constexpr(TALLIES)


@triton.jit
def _bit_length(x):
    """Bits of an unsigned 64-bit number, without leading zeros."""
    length = (x != 0).to(tl.int32)
    for i in tl.static_range(6):
        high = x >> (32 >> i)
        length += tl.where(high != 0, 32 >> i, 0)
        x = tl.where(high != 0, high, x)
    return length


@triton.jit
def _bands_of(was, now, at, inside, upper, WIDTH: tl.constexpr, MAGNITUDE: tl.constexpr, SHIFT: tl.constexpr,
              BIAS: tl.constexpr, SIGNED: tl.constexpr):  # fmt: skip
    """Band, key and distance of changes."""
    before, after = load_bits(was, at, inside, WIDTH), load_bits(now, at, inside, WIDTH)
    key = key_of(before, MAGNITUDE, SHIFT, BIAS)
    _, distance = step_of(before, after, WIDTH, SIGNED)
    return tl.sum((key[:, None] > upper[None, :]).to(tl.int32), 1), key, distance


@triton.jit
def one_in(band, counted):
    """Ones to add up by band: eight bands in the bytes of each of two words, so fewer than 256 can be added."""
    one = counted.to(tl.int64) << ((band & 7) * 8)
    none = tl.zeros_like(one)
    return tl.where(band < 8, one, none), tl.where(band < 8, none, one)


@triton.jit
def byte_of(low, high, band):
    return (tl.where(band < 8, low, high) >> ((band & 7) * 8)).to(tl.int32) & 255


@triton.jit
def count_by_band(band, counted, b):
    """How many of each band there are."""
    low, high = one_in(band, counted)
    return byte_of(tl.sum(low, 0), tl.sum(high, 0), b)


@triton.jit
def number_in_band(band, counted, before):
    """Each one's number in its band, from the number ``before`` the first."""
    low, high = one_in(band, counted)
    return tl.gather(before, band, 0) + byte_of(tl.cumsum(low, 0), tl.cumsum(high, 0), band) - 1


@triton.jit
def arrange(block_tile, block_tiles, ends, was, now, ranks, bands, uppers, tallies, members, far_places, far_changes,
            WIDTH: tl.constexpr, MAGNITUDE: tl.constexpr, SHIFT: tl.constexpr, BIAS: tl.constexpr,
            SIGNED: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """Count each band's changes, then list them band by band: their ranks; of far ones the place within the band's
    changes, and the place within the block's.
    """
    block = tl.program_id(0)
    low, n = changes_of(block, block_tile, block_tiles, ends)
    b = tl.arange(0, _BANDS)
    changed, far = tl.zeros((_BANDS,), tl.int32), tl.zeros((_BANDS,), tl.int32)
    lengths, keys = tl.zeros((STEP,), tl.int32), tl.zeros((STEP,), tl.int32)
    last = tl.load(bands + block).to(tl.int32) - 1
    upper = tl.where(b < last, tl.load(uppers + block * _BANDS + b).to(tl.int32), 255)
    for done in range(0, n, STEP):
        i = done + tl.arange(0, STEP)
        inside = i < n
        band, key, distance = _bands_of(was, now, low + i, inside, upper, WIDTH, MAGNITUDE, SHIFT, BIAS, SIGNED)
        distant = inside & (distance > 1)
        changed += count_by_band(band, inside, b)
        far += count_by_band(band, distant, b)
        lengths += tl.where(distant, _bit_length(distance - 2), 0)
        keys += tl.where(distant, key, 0)
    row = tallies + block * _TALLIES
    tl.store(row + b, changed)
    tl.store(row + _BANDS + b, far)
    tl.store(row + 2 * _BANDS, tl.sum(lengths, 0))
    tl.store(row + 2 * _BANDS + 1, tl.sum(keys, 0))
    begin, far_before = tl.cumsum(changed, 0) - changed, tl.cumsum(far, 0) - far
    before = tl.zeros_like(changed)
    for done in range(0, n, STEP):
        i = done + tl.arange(0, STEP)
        inside = i < n
        band, _, distance = _bands_of(was, now, low + i, inside, upper, WIDTH, MAGNITUDE, SHIFT, BIAS, SIGNED)
        distant = inside & (distance > 1)
        place = number_in_band(band, inside, before)
        tl.store(members + low + tl.gather(begin, band, 0) + place, tl.load(ranks + low + i, inside), inside)
        far_place = number_in_band(band, distant, far_before)
        tl.store(far_places + low + far_place, place, distant)
        tl.store(far_changes + low + far_place, i, distant)
        before += count_by_band(band, inside, b)
        far_before += count_by_band(band, distant, b)
