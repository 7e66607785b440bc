"""Blocks of `gap` and `banded` in Triton, byte for byte those of `weightcast.format.kernels.writer` (SPEC 6.5).

Each launch covers all blocks of a batch. `arrange` (`triton_order`) puts a block's changes into the order of its bands.
Here `measure` adds up the lengths of each band's codes, for every parameter that may be chosen; `lay_out` chooses, and
says where in the block each part begins. Once the size of every block is known, `write_bands` and `write_rest`
(`triton_writing`) add the bits to words that were zero. Tables have a row of `MAX_BANDS` for each block:

`tallies`: changes of each band; far ones; in the third row the bits and the keys of all far distances, added up.
`plan`: where the list of each band's changed set begins, and its Rice parameter; the same for its far set; where its
distances begin; in the sixth row where the directions begin, reach, sloped, whether the block is raw.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weightcast.format.kernels.bands import BLOCK, MAX_BANDS, MAX_GAP_RICE, NOTHING, RANK_BITS, REACH_BITS
from weightcast.format.kernels.bitio import MAX_RICE, UNARY_LIMIT
from weightcast.torch.kernels.triton import key_of, step_of

TALLIES, PLAN = 3 * MAX_BANDS, 6 * MAX_BANDS
"""Entries of a block in these tables."""
LENGTHS = 32
"""Entries of a band: bits of its changed set for three parameters, of its far set, and, from 16 on, of its distances
for six reaches, flat and (from 24 on) sloped."""

_BLOCK = tl.constexpr(BLOCK)
_BANDS = tl.constexpr(MAX_BANDS)
_TALLIES = tl.constexpr(TALLIES)
_PLAN = tl.constexpr(PLAN)
_LENGTHS = tl.constexpr(LENGTHS)
_MAX_GAP_RICE = tl.constexpr(MAX_GAP_RICE)
_NOTHING = tl.constexpr(NOTHING)
_RANK_BITS = tl.constexpr(RANK_BITS)
_REACH_BITS = tl.constexpr(REACH_BITS)
_MAX_RICE = tl.constexpr(MAX_RICE)
_UNARY_LIMIT = tl.constexpr(UNARY_LIMIT)
_MOST = tl.constexpr(0x7FFFFFFF)


# -- what a block's parts are made of ----------------------------------------------------------------------------------


@triton.jit
def changes_of(block, block_tile, block_tiles, ends):
    """Where a block's changes begin, and how many there are."""
    tile = tl.load(block_tile + block)
    low = tl.load(ends + tile)
    return low, (tl.load(ends + tile + tl.load(block_tiles + block)) - low).to(tl.int32)


@triton.jit
def load_bits(source, at, inside, WIDTH: tl.constexpr):
    words = tl.load(source + at, inside, other=0)
    if WIDTH == 8:
        bits = words.to(tl.uint8, bitcast=True)
    elif WIDTH == 16:
        bits = words.to(tl.uint16, bitcast=True)
    elif WIDTH == 32:
        bits = words.to(tl.uint32, bitcast=True)
    else:
        bits = words.to(tl.uint64, bitcast=True)
    return bits


@triton.jit
def place_of(tallies, block, b):
    """The changes of bands before this one: where its own begin in the order of bands. The same for far ones."""
    lane = tl.arange(0, _BANDS)
    row = tallies + block * _TALLIES + lane
    before = lane < b
    return tl.sum(tl.load(row, before, other=0), 0), tl.sum(tl.load(row + _BANDS, before, other=0), 0)


@triton.jit
def listed_of(members, total):
    """How many numbers the list of a set has: the members, or the others if those are fewer."""
    return tl.where(2 * members > total, total - members, members)


@triton.jit
def _rice_near(members, total):
    """The parameter that the search for the cheapest begins at; the gaps of a list add up to what it does not name."""
    listed = listed_of(members, total)
    unnamed, gaps = (total - listed).to(tl.int64), (listed + 1).to(tl.int64)
    near = listed * 0
    for k in tl.static_range(_MAX_GAP_RICE):
        near += (7 * unnamed > 10 * ((2 << k) - 1) * gaps).to(tl.int32)
    return near


@triton.jit
def _members_up_to(members, count, other):
    """How many members are below the given one of those that are not in the set, found by halving."""
    found = tl.zeros_like(other)
    for i in range(_RANK_BITS):
        probe = found + (_BLOCK >> i)
        member = tl.load(members + probe - 1, probe <= count, other=_MOST)
        found = tl.where((probe <= count) & (member - (probe - 1) <= other), probe, found)
    return found


@triton.jit
def gap_of(members, count, total, i):
    """Gap ``i`` in the list of a set, whose last one closes it (SPEC 6.4)."""
    if 2 * count > total:
        gap = _members_up_to(members, count, i) - _members_up_to(members, count, i - 1)
    else:
        here = tl.load(members + i, i < count, other=0)
        last = tl.load(members + i - 1, (i > 0) & (i <= count), other=0)
        gap = tl.where(i < count, here, total) - tl.where(i > 0, last, -1) - 1
    return gap


@triton.jit
def rice_length(value, parameter, plain):
    quotient = value >> parameter.to(value.dtype)
    # Compared before it is narrowed: it may have 64 bits.
    return tl.where(quotient < _UNARY_LIMIT, quotient.to(tl.int32) + 1 + parameter, _UNARY_LIMIT + plain)


@triton.jit
def rice_of(reach, sloped, key):
    return tl.minimum(tl.maximum(reach - tl.where(sloped, key, 0), 0), _MAX_RICE)


@triton.jit
def far_steps(was, now, low, changes, i, inside, WIDTH: tl.constexpr, MAGNITUDE: tl.constexpr, SHIFT: tl.constexpr,
               BIAS: tl.constexpr, SIGNED: tl.constexpr):  # fmt: skip
    """Keys of far changes, and what is coded of their distances."""
    at = low + tl.load(changes + i, inside, other=0)
    before, after = load_bits(was, at, inside, WIDTH), load_bits(now, at, inside, WIDTH)
    _, distance = step_of(before, after, WIDTH, SIGNED)
    return key_of(before, MAGNITUDE, SHIFT, BIAS), tl.where(inside, distance - 2, 0)


# -- measure -----------------------------------------------------------------------------------------------------------


@triton.jit
def _list_lengths(members, count, total, STEP: tl.constexpr):
    """Bits of a set's list with the parameters before, at and after the likely one; a fourth is not used."""
    k = tl.maximum(_rice_near(count, total) - 1 + tl.arange(0, 4), 0)
    listed = listed_of(count, total)
    bits = tl.zeros((4,), tl.int32)
    for done in range(0, listed + 1, STEP):
        i = done + tl.arange(0, STEP)
        gap = gap_of(members, count, total, i)
        each = rice_length(gap[:, None], k[None, :], _RANK_BITS)
        bits += tl.sum(tl.where(i[:, None] <= listed, each, 0), 0)
    return bits


@triton.jit
def _reaches(tallies, block):
    """The reaches that are tried, the last eight of them sloped; negative ones are not."""
    b, t = tl.arange(0, _BANDS), tl.arange(0, 16)
    row = tallies + block * _TALLIES
    fars = tl.sum(tl.load(row + _BANDS + b), 0)
    lengths, keys = tl.load(row + 2 * _BANDS), tl.load(row + 2 * _BANDS + 1)
    mean = (lengths + tl.where(t >= 8, keys, 0)) // tl.maximum(fars, 1)
    return tl.where((t & 7) < 6, mean - 3 + (t & 7), -1)


@triton.jit
def measure(block_tile, block_tiles, ends, was, now, sizes, tallies, members, far_places, far_changes, lengths,
            WIDTH: tl.constexpr, MAGNITUDE: tl.constexpr, SHIFT: tl.constexpr, BIAS: tl.constexpr,
            SIGNED: tl.constexpr, STEP: tl.constexpr, FAR_STEP: tl.constexpr):  # fmt: skip
    """A program for each band: the bits of its lists and distances, for each parameter that may be chosen."""
    block, b = tl.program_id(0) // _BANDS, tl.program_id(0) % _BANDS
    changed = tl.load(tallies + block * _TALLIES + b)
    if changed > 0:
        low, _ = changes_of(block, block_tile, block_tiles, ends)
        begin, far_begin = place_of(tallies, block, b)
        total, far = tl.load(sizes + block * _BANDS + b), tl.load(tallies + block * _TALLIES + _BANDS + b)
        row = lengths + tl.program_id(0) * _LENGTHS
        few = tl.arange(0, 4)
        tl.store(row + few, _list_lengths(members + low + begin, changed, total, STEP))
        if far > 0:
            tl.store(row + 4 + few, _list_lengths(far_places + low + far_begin, far, changed, STEP))
            t = tl.arange(0, 16)
            reach, sloped = _reaches(tallies, block)[None, :], t[None, :] >= 8
            bits = tl.zeros((16,), tl.int32)
            for done in range(0, far, FAR_STEP):
                i = done + tl.arange(0, FAR_STEP)
                key, value = far_steps(was, now, low, far_changes + low + far_begin, i, i < far, WIDTH, MAGNITUDE,
                                        SHIFT, BIAS, SIGNED)  # fmt: skip
                each = rice_length(value[:, None], rice_of(reach, sloped, key[:, None]), WIDTH)
                bits += tl.sum(tl.where(i[:, None] < far, each, 0), 0)
            tl.store(row + 16 + t, bits)


# -- lay out -----------------------------------------------------------------------------------------------------------


@triton.jit
def _chosen_rice(row, members, total):
    """The cheapest parameter of each band's set, and the bits of its list."""
    there = members > 0
    near = _rice_near(members, total)
    below = tl.load(row, there, other=0)
    bits = tl.load(row + 1, there, other=0)
    above = tl.load(row + 2, there, other=0)
    up = (above < bits) & (near + 1 <= _MAX_GAP_RICE)
    parameter = tl.where(below < bits, tl.maximum(near - 1, 0), tl.where(up, near + 1, near))
    bits = tl.where(below < bits, below, tl.where(up, above, bits))
    return tl.where(there, parameter, _NOTHING), tl.where(there, bits, 0)


@triton.jit
def upper_codes(uppers, block, bands):
    """The codes of the bands' highest keys, and their lengths (SPEC 6.5, item 2)."""
    b = tl.arange(0, _BANDS)
    upper = tl.load(uppers + block * _BANDS + b).to(tl.int32)
    before = tl.load(uppers + block * _BANDS + b - 1, b > 0, other=0).to(tl.int32)
    skipped = tl.maximum(upper - before - 1, 0)
    escaped = skipped >= _UNARY_LIMIT
    ones = (1 << tl.minimum(skipped, _UNARY_LIMIT).to(tl.int64)) - 1
    code = tl.where(escaped, ones | (skipped.to(tl.int64) << _UNARY_LIMIT), ones)
    code = tl.where(b == 0, upper.to(tl.int64), code)
    length = tl.where(b == 0, 8, tl.where(escaped, _UNARY_LIMIT + 8, skipped + 1))
    return code.to(tl.uint64), tl.where(b < bands - 1, length, 0)


@triton.jit
def lay_out(sizes, block_size, block_tile, block_tiles, ends, bands, uppers, tallies, lengths, plan, nbytes,
            WIDTH: tl.constexpr):  # fmt: skip
    """Choose each block's parameters, and say where its parts begin and how many bytes it has."""
    block = tl.program_id(0)
    _, n = changes_of(block, block_tile, block_tiles, ends)
    b, t = tl.arange(0, _BANDS), tl.arange(0, 16)
    count = tl.load(bands + block).to(tl.int32)
    changed = tl.load(tallies + block * _TALLIES + b)
    far = tl.load(tallies + block * _TALLIES + _BANDS + b)
    row = lengths + (block * _BANDS + b) * _LENGTHS
    rice, bits = _chosen_rice(row, changed, tl.load(sizes + block * _BANDS + b))
    far_rice, far_bits = _chosen_rice(row + 4, far, changed)

    by_reach = tl.load(row[:, None] + 16 + t[None, :], far[:, None] > 0, other=0)
    reaches = _reaches(tallies, block)
    all_bits = tl.where(reaches >= 0, tl.sum(by_reach, 0), _MOST)
    best = tl.min(tl.where(all_bits == tl.min(all_bits, 0), t, 16), 0)
    distance_bits = tl.sum(tl.where(t[None, :] == best, by_reach, 0), 1)

    _, upper_lengths = upper_codes(uppers, block, count)
    parameters = tl.where(b < count, 10 + (changed > 0).to(tl.int32) + (far > 0).to(tl.int32), 0)
    at = 8 + tl.sum(upper_lengths, 0) + tl.sum(parameters, 0)
    row = plan + block * _PLAN
    tl.store(row + b, at + tl.cumsum(bits, 0) - bits)
    tl.store(row + _BANDS + b, rice)
    directions = at + tl.sum(bits, 0)
    at = directions + n
    tl.store(row + 2 * _BANDS + b, at + tl.cumsum(far_bits, 0) - far_bits)
    tl.store(row + 3 * _BANDS + b, far_rice)
    at += tl.sum(far_bits, 0) + tl.where(tl.sum(far, 0) > 0, 1 + _REACH_BITS, 0)
    tl.store(row + 4 * _BANDS + b, at + tl.cumsum(distance_bits, 0) - distance_bits)
    at += tl.sum(distance_bits, 0)

    size = tl.load(block_size + block)
    whole = 1 + size * (WIDTH // 8)
    coded = (at + 7) >> 3
    raw = (n == size) & (coded > whole)
    reach = tl.sum(tl.where(t == best, reaches, 0), 0)
    tl.store(row + 5 * _BANDS, directions)
    tl.store(row + 5 * _BANDS + 1, reach)
    tl.store(row + 5 * _BANDS + 2, (best >= 8).to(tl.int32))
    tl.store(row + 5 * _BANDS + 3, raw.to(tl.int32))
    tl.store(nbytes + block, tl.where(n > 0, tl.where(raw, whole, coded), 0))
