"""Blocks of `gap` and `banded` read in Triton: the part that goes code by code, a program of one warp for each block.

Changes and errors are those of `weightcast.format.kernels.reader`. `read_header` reads bands and parameters; with the
sizes of the bands, `read_lists` reads which members changed and which changes are far. `triton_marking` finds their
places, and then `read_distances` reads how far they went. For any bytes, every loop ends and stays in bounds: a list
ends at the end of its block, at the latest, and the bytes have `SLACK` after them.

Positions are counted in bits from the first block's first. Tables have a row for each block:

`codes`: for each band the parameters of its changed set and of its far set, 32 added if it is inverted.
`starts`: where each band's ranks begin if those of all bands are in one row.
`changes`, `fars`: how many changes each band has, and how many far ones.
`positions`: the end of the header, the first direction, the end of the last list.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weightcast.format.kernels import reader
from weightcast.format.kernels.bands import MAX_BANDS, MAX_GAP_RICE, NOTHING, RANK_BITS, REACH_BITS
from weightcast.format.kernels.bitio import UNARY_LIMIT
from weightcast.format.kernels.tasks import OTHER_BASE
from weightcast.torch.kernels.triton import TILE, key_of, move
from weightcast.torch.kernels.triton_coding import changes_of, load_bits, rice_of

POSITIONS = 3
"""Entries of a block in this table."""

_BANDS = tl.constexpr(MAX_BANDS)
_POSITIONS = tl.constexpr(POSITIONS)
_MAX_GAP_RICE = tl.constexpr(MAX_GAP_RICE)
_NOTHING = tl.constexpr(NOTHING)
_RANK_BITS = tl.constexpr(RANK_BITS)
_REACH_BITS = tl.constexpr(REACH_BITS)
_REACH_MASK = tl.constexpr((1 << REACH_BITS) - 1)
_UNARY_LIMIT = tl.constexpr(UNARY_LIMIT)
_ESCAPE = tl.constexpr(1 << UNARY_LIMIT)
_ROW = tl.constexpr(TILE // 32)

_ENDED = tl.constexpr(reader.ENDED)
_IMPOSSIBLE_BANDS = tl.constexpr(reader.BANDS)
_PARAMETER = tl.constexpr(reader.PARAMETER)
_RANK = tl.constexpr(reader.RANK)
_DISTANCE = tl.constexpr(reader.DISTANCE)
_TRAILING = tl.constexpr(reader.TRAILING)
_EMPTY = tl.constexpr(reader.EMPTY)
_RAW_SIZE = tl.constexpr(reader.RAW_SIZE)
_OTHER_BASE = tl.constexpr(OTHER_BASE)


# -- bits and Rice codes -----------------------------------------------------------------------------------------------


@triton.jit
def peek(words, at):
    """The 64 bits from bit ``at`` on. Loads must be aligned, so it takes two."""
    place, shift = words + (at >> 6), (at & 63).to(tl.uint64)
    low = tl.load(place).to(tl.uint64, bitcast=True)
    high = tl.load(place + 1).to(tl.uint64, bitcast=True)
    return (low >> shift) | ((high << 1) << (63 - shift))


@triton.jit
def _low_bits(word, count):
    """The lowest bits of a word, 0 to 64 of them."""
    mask = (tl.full(count.shape, 1, tl.uint64) << (count & 63).to(tl.uint64)) - 1
    return tl.where(count < 64, word & mask, word)


@triton.jit
def _ones(word):
    """How many one bits a word begins with, up to the limit."""
    zeros = ~word.to(tl.uint32) | _ESCAPE
    lowest = zeros & (~zeros + 1)
    # A power of two is its own exponent as a float.
    return (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _short_rice(word, parameter, plain):
    """The value of a Rice code that a word begins with and holds, and the code's length."""
    ones = _ones(word)
    escaped = ones == _UNARY_LIMIT
    before, count = tl.where(escaped, ones, ones + 1), tl.where(escaped, plain, parameter)
    rest = _low_bits(word >> before.to(tl.uint64), count).to(tl.int32)
    return tl.where(escaped, rest, (ones << parameter) | rest), before + count


@triton.jit
def _long_rice(words, at, parameter, plain: tl.constexpr):
    """The same for a code that may be longer than a word."""
    ones = _ones(peek(words, at))
    escaped = ones == _UNARY_LIMIT
    before, count = tl.where(escaped, ones, ones + 1), tl.where(escaped, plain, parameter)
    rest = _low_bits(peek(words, at + before), count)
    return tl.where(escaped, rest, (ones.to(tl.uint64) << parameter.to(tl.uint64)) | rest), before + count


# -- the header --------------------------------------------------------------------------------------------------------


@triton.jit
def _read_uppers(words, at, end, bands, error):
    """The highest key of each band, the next position, and an error or 0."""
    lane = tl.arange(0, _BANDS)
    upper = tl.full((_BANDS,), 255, tl.int32)
    before, b = bands * 0, bands * 0
    while (b < bands - 1) & (error == 0):
        word = peek(words, at)
        skipped, length = _short_rice(word, b * 0, 8)
        value = tl.where(b == 0, (word & 255).to(tl.int32), before + 1 + skipped)
        at += tl.where(b == 0, 8, length)
        error = tl.where(at > end, _ENDED, tl.where(value >= 255, _IMPOSSIBLE_BANDS, 0))
        upper = tl.where(lane == b, value, upper)
        before = value
        b += 1
    return upper, at, error


@triton.jit
def _read_parameters(words, at, end, bands, error):
    """The row of `codes`, the next position, and an error or 0."""
    lane = tl.arange(0, 2 * _BANDS)
    codes = tl.full((2 * _BANDS,), _NOTHING, tl.int32)
    i = bands * 0
    while (i < 2 * bands) & (error == 0):
        word = peek(words, at)
        parameter = (word & 31).to(tl.int32)
        there = parameter != _NOTHING
        at += 5
        error = tl.where(at > end, _ENDED, tl.where(there & (parameter > _MAX_GAP_RICE), _PARAMETER, 0))
        at += tl.where(there, 1, 0)
        error = tl.where((error == 0) & (at > end), _ENDED, error)
        codes = tl.where(lane == i, tl.where(there, (word & 63).to(tl.int32), parameter), codes)
        i += 1
    return codes, at, error


@triton.jit
def read_header(block_begin, block_nbytes, block_size, words, bands, tallied, uppers, band_of, codes, positions, errors,
                WIDTH: tl.constexpr):  # fmt: skip
    """Bands and parameters of each block that is there; raw blocks have no bands, nor have those with an error."""
    block = tl.program_id(0)
    nbytes = tl.load(block_nbytes + block)
    begin = tl.load(block_begin + block) * 8
    end = begin + nbytes * 8
    count = tl.where(nbytes > 0, (peek(words, begin) & 255).to(tl.int32), 0)
    whole = 1 + tl.load(block_size + block).to(tl.int64) * (WIDTH // 8)
    error = tl.where((nbytes > 0) & (count == 0) & (nbytes != whole), _RAW_SIZE, 0)
    error = tl.where(count > _BANDS, _IMPOSSIBLE_BANDS, error)
    upper, at, error = _read_uppers(words, begin + 8, end, count, error)
    code, at, error = _read_parameters(words, at, end, count, error)
    count = tl.where(error == 0, count, 0)
    b, key = tl.arange(0, _BANDS), tl.arange(0, 256)
    band = tl.sum((key[:, None] > upper[None, :]).to(tl.int32), 1)
    tl.store(bands + block, count.to(tl.uint8))
    tl.store(tallied + block, tl.where(count > 1, count, 0).to(tl.uint8))
    tl.store(uppers + block * _BANDS + b, upper.to(tl.uint8))
    tl.store(band_of + block * 256 + key, band.to(tl.uint8))
    tl.store(codes + block * 2 * _BANDS + tl.arange(0, 2 * _BANDS), code)
    tl.store(positions + block * _POSITIONS, at)
    tl.store(errors + block, error)


# -- lists -------------------------------------------------------------------------------------------------------------


@triton.jit
def _read_list(words, at, end, code, total, out, first, last, held):
    """Set a bit of ``out``, from bit ``first`` on, for each number of a list; returns how many members its set has.

    ``held`` are the bits of the word ``last`` so far, which the list before may have begun. The next position and an
    error or 0 are returned, too.
    """
    parameter = code & 31
    rank, listed = total * 0 - 1, total * 0
    there = parameter != _NOTHING
    going = there
    while going:
        gap, length = _short_rice(peek(words, at), parameter, _RANK_BITS)
        at += length
        rank += gap + 1
        going = (at <= end) & (rank < total)
        bit = first + rank
        here = going.to(tl.uint32) << (bit & 31).to(tl.uint32)  # the closing gap leads to no member
        held = tl.where(bit >> 5 == last, held | here, here)
        last = bit >> 5
        tl.store(out + last, held.to(tl.int32, bitcast=True), going)
        listed += going.to(tl.int32)
    error = tl.where(there, tl.where(at > end, _ENDED, tl.where(rank == total, 0, _RANK)), 0)
    members = tl.where(there, tl.where(code >= 32, total - listed, listed), 0)
    return members, at, error, last, held


@triton.jit
def _read_sets(words, at, end, codes, totals, bands, error, out):
    """The lists of one set of each band, one after the other; returns how many members each has."""
    b = tl.arange(0, _BANDS)
    members = tl.zeros((_BANDS,), tl.int32)
    band, first = bands * 0, bands * 0
    last, held = bands * 0 - 1, tl.full(bands.shape, 0, tl.uint32)
    while (band < bands) & (error == 0):
        total = tl.sum(tl.where(b == band, totals, 0), 0)
        code = tl.load(codes + 2 * band)
        found, at, error, last, held = _read_list(words, at, end, code, total, out, first, last, held)
        members = tl.where(b == band, found, members)
        first += total
        band += 1
    return members, at, error


@triton.jit
def read_lists(block_begin, block_nbytes, block_size, block_tile, words, bands, codes, sizes, positions, starts,
               changes, fars, listed, far, errors):  # fmt: skip
    """Which ranks of each band a block lists, and which of its changes as far: a bit each."""
    block = tl.program_id(0)
    count = tl.load(bands + block).to(tl.int32)
    if count > 0:
        end = (tl.load(block_begin + block) + tl.load(block_nbytes + block)) * 8
        at = tl.load(positions + block * _POSITIONS)
        row = tl.load(block_tile + block).to(tl.int64) * _ROW
        b = tl.arange(0, _BANDS)
        total = tl.load(sizes + block * _BANDS + b, b < tl.where(count > 1, count, 0), other=0)
        total = tl.where((count == 1) & (b == 0), tl.load(block_size + block), total)
        mine = codes + block * 2 * _BANDS
        changed, at, error = _read_sets(words, at, end, mine, total, count, count * 0, listed + row)
        n = tl.sum(changed, 0)
        error = tl.where((error == 0) & (n == 0), _EMPTY, error)
        tl.store(positions + block * _POSITIONS + 1, at)
        at += n
        error = tl.where((error == 0) & (at > end), _ENDED, error)
        distant, at, error = _read_sets(words, at, end, mine + 1, changed, count, error, far + row)
        tl.store(positions + block * _POSITIONS + 2, at)
        tl.store(starts + block * _BANDS + b, tl.cumsum(total, 0) - total)
        tl.store(changes + block * _BANDS + b, changed)
        tl.store(fars + block * _BANDS + b, distant)
        tl.store(errors + block, error)


# -- distances ---------------------------------------------------------------------------------------------------------


@triton.jit
def _read_far(words, at, end, directions, low, n, fars, was, now, far_changes, WIDTH: tl.constexpr,
              MAGNITUDE: tl.constexpr, SHIFT: tl.constexpr, BIAS: tl.constexpr, SIGNED: tl.constexpr):  # fmt: skip
    """The new bits of a block's far changes; returns the next position, and an error or 0."""
    word = peek(words, at)
    sloped, reach = (word & 1) != 0, ((word >> 1) & _REACH_MASK).to(tl.int32)
    at += tl.where(fars > 0, 1 + _REACH_BITS, 0)
    error = tl.where((fars > 0) & (at > end), _ENDED, 0)
    furthest = (tl.full(n.shape, 1, tl.uint64) << (WIDTH - 1)) - 2
    j = fars * 0
    while (j < fars) & (error == 0):
        # Within the block even if another program changes the weights meanwhile.
        i = tl.minimum(tl.maximum(tl.load(far_changes + low + j), 0), n - 1)
        before = load_bits(was, low + i, i >= 0, WIDTH)
        parameter = rice_of(reach, sloped, key_of(before, MAGNITUDE, SHIFT, BIAS))
        beyond, length = _long_rice(words, at, parameter, WIDTH)
        at += length
        error = tl.where(at > end, _ENDED, tl.where(beyond > furthest, _DISTANCE, 0))
        up = (peek(words, directions + i) & 1) != 0
        after = move(before, up, beyond + 2, WIDTH, SIGNED)
        tl.store(now + low + i, after.to(now.dtype.element_ty), error == 0)
        j += 1
    return at, error


@triton.jit
def read_distances(block_begin, block_nbytes, block_tile, block_tiles, ends, was, words, bands, changes, fars,
                   positions, now, far_changes, errors, WIDTH: tl.constexpr, MAGNITUDE: tl.constexpr,
                   SHIFT: tl.constexpr, BIAS: tl.constexpr, SIGNED: tl.constexpr):  # fmt: skip
    """The new bits of far changes, and the last checks of each block."""
    block = tl.program_id(0)
    nbytes = tl.load(block_nbytes + block)
    if (nbytes > 0) & (tl.load(errors + block) == 0):
        low, n = changes_of(block, block_tile, block_tiles, ends)
        b = tl.arange(0, _BANDS)
        raw = tl.load(bands + block) == 0
        expected = tl.sum(tl.load(changes + block * _BANDS + b), 0)
        error = tl.where(n == 0, _EMPTY, 0)
        if (n > 0) & (raw == 0):
            error = tl.where(n == expected, 0, _OTHER_BASE)
            if n == expected:
                end = (tl.load(block_begin + block) + nbytes) * 8
                at = tl.load(positions + block * _POSITIONS + 2)
                directions = tl.load(positions + block * _POSITIONS + 1)
                distant = tl.sum(tl.load(fars + block * _BANDS + b), 0)
                at, error = _read_far(words, at, end, directions, low, n, distant, was, now, far_changes, WIDTH,
                                      MAGNITUDE, SHIFT, BIAS, SIGNED)  # fmt: skip
                rest = tl.minimum(tl.maximum(end - at, 0), 64)
                trailing = (rest > 7) | (_low_bits(peek(words, at), rest) != 0)
                error = tl.where((error == 0) & trailing, _TRAILING, error)
        tl.store(errors + block, error)
