"""Blocks read in Triton: the part that goes over all elements, or over all changes, at once.

`triton_reading` gives bits by rank within a band. Here `mark_listed` finds the elements that have those ranks, with the
members of each band counted before each tile and each part of it (`triton.tally`). `step` moves every change by one
step and lists the far ones in the order in which their distances are coded; `gain` adds up what the changes add to the
digests.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weightcast.format.kernels.bands import BLOCK, MAX_BANDS, NOTHING
from weightcast.torch.kernels.triton import TILE, address, digest_gain, key_of, load_tile, move
from weightcast.torch.kernels.triton_coding import changes_of, load_bits
from weightcast.torch.kernels.triton_order import byte_of, count_by_band, number_in_band, one_in
from weightcast.torch.kernels.triton_reading import POSITIONS

_BANDS = tl.constexpr(MAX_BANDS)
_BLOCK = tl.constexpr(BLOCK)
_NOTHING = tl.constexpr(NOTHING)
_POSITIONS = tl.constexpr(POSITIONS)
_ROW = tl.constexpr(TILE // 32)


@triton.jit
def _raw_bits(words, first, place, inside, WIDTH: tl.constexpr):
    """Elements of a raw block, whose first one is at byte ``first``."""
    at = words.to(tl.pointer_type(tl.uint8)) + first + place.to(tl.int64) * (WIDTH // 8)
    bits = tl.load(at, inside, other=0).to(tl.uint64)
    for i in tl.static_range(1, WIDTH // 8):
        bits |= tl.load(at + i, inside, other=0).to(tl.uint64) << (8 * i)
    return bits


@triton.jit
def _is_listed(bits, row, bit, code, inside):
    """Whether a set has these members: their bits in a row of bits, and the code of the set's parameters."""
    word = tl.load(bits + row + (bit >> 5), inside, other=0)
    return inside & ((code & 31) != _NOTHING) & (((word >> (bit & 31)) & 1) != (code >> 5))


@triton.jit
def mark_listed(old, sizes, tile_tensor, tile_ordinal, tile_block, block_begin, block_nbytes, block_tile, block_size,
                words, bands, band_of, codes, starts, errors, in_tile, in_sub, listed, marks, counts,
                TILE: tl.constexpr, SUB: tl.constexpr, WIDTH: tl.constexpr, MAGNITUDE: tl.constexpr,
                SHIFT: tl.constexpr, BIAS: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """One bit per element that changes, and how many there are in each tile. ``SUB`` is 64, as a word of marks is."""
    tile = tl.program_id(0)
    block = tl.load(tile_block + tile)
    count = tl.load(bands + block).to(tl.int32)
    total = count * 0
    if (tl.load(block_nbytes + block) > 0) & (tl.load(errors + block) == 0):
        tensor = tl.load(tile_tensor + tile)
        part, lane = tl.arange(0, TILE // SUB), tl.arange(0, SUB)
        place = part[:, None] * SUB + lane[None, :]
        ordinal = tl.load(tile_ordinal + tile)
        first = ordinal.to(tl.int64) * TILE
        size = tl.load(sizes + tensor)
        inside = first + place < size
        base = address(old, tensor, WIDTH, ALIGNED)
        in_block = ((ordinal * TILE) & (_BLOCK - 1)) + place
        row = tl.load(block_tile + block).to(tl.int64) * _ROW
        mine = codes + block * 2 * _BANDS
        if count == 0:
            after = _raw_bits(words, tl.load(block_begin + block) + 1, in_block, inside, WIDTH)
            differs = inside & (after != load_tile(base, first, place, size, TILE).to(tl.uint64))
        elif count == 1:  # ranks are places
            differs = _is_listed(listed, row, in_block, tl.load(mine), inside)
        else:
            key = key_of(load_tile(base, first, place, size, TILE), MAGNITUDE, SHIFT, BIAS)
            band = tl.load(band_of + block * 256 + key).to(tl.int32)
            low, high = one_in(band, inside)
            rank = byte_of(tl.cumsum(low, 1), tl.cumsum(high, 1), band) - 1
            rank += tl.load(in_tile + tile.to(tl.int64) * _BANDS + band) + tl.load(starts + block * _BANDS + band)
            parts = in_sub + tile.to(tl.int64) * (TILE // SUB * _BANDS)
            rank += tl.load(parts + part[:, None] * _BANDS + band).to(tl.int32)
            # Within the block even if another program changes the weights meanwhile.
            there = inside & (rank < tl.load(block_size + block))
            differs = _is_listed(listed, row, rank, tl.load(mine + 2 * band), there)
        tl.store(marks + tile.to(tl.int64) * (TILE // SUB) + part, tl.sum(differs.to(tl.int64) << lane[None, :], 1))
        total = tl.sum(tl.sum(differs.to(tl.int32), 1), 0)
    tl.store(counts + tile, total)


@triton.jit
def _step_raw(block, block_begin, words, indices, now, low, n, WIDTH: tl.constexpr, STEP: tl.constexpr):
    first = tl.load(block_begin + block) + 1
    for done in range(0, n, STEP):
        i = done + tl.arange(0, STEP)
        place = tl.load(indices + low + i, i < n, other=0) & (_BLOCK - 1)
        after = _raw_bits(words, first, place, i < n, WIDTH)
        tl.store(now + low + i, after.to(now.dtype.element_ty), i < n)


@triton.jit
def step(block_begin, block_tile, block_tiles, ends, indices, was, words, bands, uppers, codes, changes, fars,
         positions, far, now, far_changes, WIDTH: tl.constexpr, MAGNITUDE: tl.constexpr, SHIFT: tl.constexpr,
         BIAS: tl.constexpr, SIGNED: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """The new bits of each change as if it were one step away, or as a raw block has them; and the far changes."""
    block = tl.program_id(0)
    low, n = changes_of(block, block_tile, block_tiles, ends)
    if tl.load(bands + block) == 0:
        _step_raw(block, block_begin, words, indices, now, low, n, WIDTH, STEP)
    else:
        b = tl.arange(0, _BANDS)
        changed, distant = tl.load(changes + block * _BANDS + b), tl.load(fars + block * _BANDS + b)
        n = tl.where(n == tl.sum(changed, 0), n, 0)  # unless another program changes the weights meanwhile
        begin, far_before = tl.cumsum(changed, 0) - changed, tl.cumsum(distant, 0) - distant
        before = tl.zeros_like(changed)
        upper = tl.load(uppers + block * _BANDS + b).to(tl.int32)
        directions = tl.load(positions + block * _POSITIONS + 1)
        row = tl.load(block_tile + block).to(tl.int64) * _ROW
        for done in range(0, n, STEP):
            i = done + tl.arange(0, STEP)
            inside = i < n
            bits = load_bits(was, low + i, inside, WIDTH)
            key = key_of(bits, MAGNITUDE, SHIFT, BIAS)
            band = tl.sum((key[:, None] > upper[None, :]).to(tl.int32), 1)
            place = tl.gather(begin, band, 0) + number_in_band(band, inside, before)
            code = tl.load(codes + (block * _BANDS + band) * 2 + 1)
            is_far = _is_listed(far, row, place, code, inside & (place < n))
            far_place = number_in_band(band, is_far, far_before)
            tl.store(far_changes + low + far_place, i, is_far & (far_place < n))
            at = directions + i
            up = (tl.load(words + (at >> 6), inside, other=0) >> (at & 63)) & 1
            after = move(bits, up != 0, 1, WIDTH, SIGNED)
            tl.store(now + low + i, after.to(now.dtype.element_ty), inside)
            before += count_by_band(band, inside, b)
            far_before += count_by_band(band, is_far, b)


@triton.jit
def gain(ends, counts, indices, was, now, gains, STEP: tl.constexpr, WIDTH: tl.constexpr):
    """What a tile's changes add to its tensor's digest."""
    tile = tl.program_id(0)
    count = tl.load(counts + tile)
    total = tl.zeros((STEP,), tl.uint64)
    first = tl.load(ends + tile) - count
    for done in range(0, count, STEP):
        i = done + tl.arange(0, STEP)
        inside = i < count
        at = tl.load(indices + first + i, inside, other=0).to(tl.int64)
        before, after = load_bits(was, first + i, inside, WIDTH), load_bits(now, first + i, inside, WIDTH)
        each = digest_gain(at, before, after)
        total += tl.where(inside, each, tl.zeros_like(each))
    tl.store(gains + tile, tl.sum(total, 0).to(tl.int64, bitcast=True))
