"""The second half of coding blocks in Triton: bits into words, once all sizes are known (SPEC 6.2 to 6.5)."""

from __future__ import annotations

import triton
import triton.language as tl

from weightcast.format.kernels.bands import MAX_BANDS, RANK_BITS, REACH_BITS
from weightcast.format.kernels.bitio import UNARY_LIMIT
from weightcast.torch.kernels.triton import step_of
from weightcast.torch.kernels.triton_coding import (
    PLAN,
    TALLIES,
    changes_of,
    far_steps,
    gap_of,
    listed_of,
    load_bits,
    place_of,
    rice_length,
    rice_of,
    upper_codes,
)

_BANDS = tl.constexpr(MAX_BANDS)
_TALLIES = tl.constexpr(TALLIES)
_PLAN = tl.constexpr(PLAN)
_RANK_BITS = tl.constexpr(RANK_BITS)
_REACH_BITS = tl.constexpr(REACH_BITS)
_UNARY_LIMIT = tl.constexpr(UNARY_LIMIT)


@triton.jit
def _put(words, at, value, inside):
    """Add up to 64 bits to the words at bit ``at``, which other programs write to as well.

    A word that gets no set bit is not touched: it may be past the last one.
    """
    word, shift = words + (at >> 5), (at & 31).to(tl.uint64)
    low = value << shift
    _or(word, low, inside)
    _or(word + 1, low >> 32, inside)
    _or(word + 2, (value >> 32) >> (32 - shift), inside)


@triton.jit
def _or(word, bits, inside):
    part = bits.to(tl.uint32)
    tl.atomic_or(word, part.to(tl.int32, bitcast=True), inside & (part != 0), sem="relaxed")


@triton.jit
def _low_bits(count):
    """Words with so many low bits set, 0 to 63."""
    return (tl.full(count.shape, 1, tl.uint64) << count.to(tl.uint64)) - 1


@triton.jit
def _put_list(words, at, members, count, total, parameter, STEP: tl.constexpr):
    listed = listed_of(count, total)
    for done in range(0, listed + 1, STEP):
        i = done + tl.arange(0, STEP)
        inside = i <= listed
        gap = tl.where(inside, gap_of(members, count, total, i), 0)
        length = tl.where(inside, rice_length(gap, parameter, _RANK_BITS), 0)
        quotient = tl.minimum(gap >> parameter, _UNARY_LIMIT)
        low = gap & ((1 << parameter) - 1)
        escaped = quotient == _UNARY_LIMIT
        rest, after = tl.where(escaped, gap, low), tl.where(escaped, quotient, quotient + 1)
        code = _low_bits(quotient) | (rest.to(tl.uint64) << after.to(tl.uint64))
        _put(words, at + (tl.cumsum(length, 0) - length), code, inside)
        at += tl.sum(length, 0)


@triton.jit
def write_bands(block_tile, block_tiles, ends, was, now, sizes, tallies, members, far_places, far_changes, plan,
                block_begin, words, WIDTH: tl.constexpr, MAGNITUDE: tl.constexpr, SHIFT: tl.constexpr,
                BIAS: tl.constexpr, SIGNED: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """A program for each band: its lists and its distances."""
    block, b = tl.program_id(0) // _BANDS, tl.program_id(0) % _BANDS
    changed = tl.load(tallies + block * _TALLIES + b)
    row = plan + block * _PLAN
    if (changed > 0) & (tl.load(row + 5 * _BANDS + 3) == 0):
        low, _ = changes_of(block, block_tile, block_tiles, ends)
        begin, far_begin = place_of(tallies, block, b)
        total, far = tl.load(sizes + block * _BANDS + b), tl.load(tallies + block * _TALLIES + _BANDS + b)
        base = tl.load(block_begin + block) * 8
        _put_list(words, base + tl.load(row + b), members + low + begin, changed, total, tl.load(row + _BANDS + b),
                  STEP)  # fmt: skip
        if far > 0:
            _put_list(words, base + tl.load(row + 2 * _BANDS + b), far_places + low + far_begin, far, changed,
                      tl.load(row + 3 * _BANDS + b), STEP)  # fmt: skip
            at = base + tl.load(row + 4 * _BANDS + b)
            reach, sloped = tl.load(row + 5 * _BANDS + 1), tl.load(row + 5 * _BANDS + 2) != 0
            for done in range(0, far, STEP):
                i = done + tl.arange(0, STEP)
                key, value = far_steps(was, now, low, far_changes + low + far_begin, i, i < far, WIDTH, MAGNITUDE,
                                        SHIFT, BIAS, SIGNED)  # fmt: skip
                parameter = rice_of(reach, sloped, key)
                length = tl.where(i < far, rice_length(value, parameter, WIDTH), 0)
                place = at + (tl.cumsum(length, 0) - length)
                quotient = value >> parameter.to(tl.uint64)
                escaped = quotient >= _UNARY_LIMIT
                ones = tl.where(escaped, _UNARY_LIMIT, quotient.to(tl.int32))
                _put(words, place, _low_bits(ones), i < far)
                rest = tl.where(escaped, value, value & _low_bits(parameter))
                _put(words, place + tl.where(escaped, ones, ones + 1), rest, i < far)
                at += tl.sum(length, 0)


@triton.jit
def write_rest(sizes, block_tile, block_tiles, ends, was, now, bands, uppers, tallies, plan, block_begin, words,
               WIDTH: tl.constexpr, SIGNED: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """A program for each block: its bands, parameters and directions; or all of it, if it is raw."""
    block = tl.program_id(0)
    low, n = changes_of(block, block_tile, block_tiles, ends)
    row = plan + block * _PLAN
    base = tl.load(block_begin + block) * 8
    place = tl.arange(0, ROWS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    if tl.load(row + 5 * _BANDS + 3) != 0:
        for done in range(0, n, ROWS * 32):
            i = done + place
            after = load_bits(now, low + i, i < n, WIDTH).to(tl.uint64)
            _put(words, base + 8 + i.to(tl.int64) * WIDTH, after, i < n)
    elif n > 0:
        _put_header(sizes, bands, uppers, tallies, row, block, base, words)
        at = base + tl.load(row + 5 * _BANDS)
        for done in range(0, n, ROWS * 32):
            i = done + place
            before, after = load_bits(was, low + i, i < n, WIDTH), load_bits(now, low + i, i < n, WIDTH)
            up, _ = step_of(before, after, WIDTH, SIGNED)
            flags = tl.sum((up & (i < n)).to(tl.uint32) << tl.arange(0, 32)[None, :].to(tl.uint32), 1)
            first = done + tl.arange(0, ROWS) * 32
            _put(words, at + first, flags.to(tl.uint64), first < n)


@triton.jit
def _put_header(sizes, bands, uppers, tallies, row, block, base, words):
    b = tl.arange(0, _BANDS)
    count = tl.load(bands + block).to(tl.int32)
    _put(words, base + b * 0, (b * 0 + count).to(tl.uint64), b == 0)
    code, length = upper_codes(uppers, block, count)
    _put(words, base + 8 + tl.cumsum(length, 0) - length, code, length > 0)
    at = base + 8 + tl.sum(length, 0)

    changed, total = tl.load(tallies + block * _TALLIES + b), tl.load(sizes + block * _BANDS + b)
    far = tl.load(tallies + block * _TALLIES + _BANDS + b)
    there, far_there = (changed > 0).to(tl.int32), (far > 0).to(tl.int32)
    code = tl.load(row + _BANDS + b) + there * ((2 * changed > total).to(tl.int32) << 5)
    code |= (tl.load(row + 3 * _BANDS + b) + far_there * ((2 * far > changed).to(tl.int32) << 5)) << (5 + there)
    length = tl.where(b < count, 10 + there + far_there, 0)
    _put(words, at + tl.cumsum(length, 0) - length, code.to(tl.uint64), length > 0)

    if tl.sum(far, 0) > 0:
        reach = tl.load(row + 5 * _BANDS + 2) | (tl.load(row + 5 * _BANDS + 1) << 1)
        begin = base + tl.load(row + 4 * _BANDS) - (1 + _REACH_BITS)
        _put(words, begin + b * 0, (b * 0 + reach).to(tl.uint64), b == 0)
