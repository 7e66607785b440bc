"""The kernels of this package in Triton: each goes over all tensors of a batch in one launch (SPEC 3, 4, 6).

A tensor is cut into tiles of `TILE` elements; a launch has one program per tile. Tables of addresses say where each
tensor is, `tile_tensor` which one a tile belongs to, `tile_ordinal` its number within that tensor. Tiles never cross
the codec's blocks. `weightcast.format.kernels` has the same kernels for the CPU; tests compare their bits.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from weightcast.format.kernels.bands import BAND_COST, BLOCK, MAX_BANDS

TILE = 4096
SUB = 64
"""Elements over which a rank is counted one by one; sums cover those before them."""

_BAND_COST = tl.constexpr(BAND_COST)
_BLOCK = tl.constexpr(BLOCK)
_TILES_PER_BLOCK = tl.constexpr(BLOCK // TILE)
_BANDS = tl.constexpr(MAX_BANDS)


@triton.jit
def address(table, tensor, BITS: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to a tensor's first element. Without the hint, every element would be loaded by itself."""
    place = tl.load(table + tensor)
    if BITS == 8:
        pointer = place.to(tl.pointer_type(tl.uint8))
    elif BITS == 16:
        pointer = place.to(tl.pointer_type(tl.uint16))
    elif BITS == 32:
        pointer = place.to(tl.pointer_type(tl.uint32))
    else:
        pointer = place.to(tl.pointer_type(tl.uint64))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def load_tile(base, first, place, size, TILE: tl.constexpr):
    """A tile from element ``first`` on, with zeros after the end. Only loads without a mask are wide."""
    if first + TILE <= size:
        values = tl.load(base + first + place)
    else:
        values = tl.load(base + first + place, first + place < size, other=0)
    return values


@triton.jit
def _round_bf16(bits):
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def _round_f16(bits):
    sign = (bits >> 31) << 15
    magnitude = (bits & 0x7FFFFFFF).to(tl.int32)
    exponent = (magnitude >> 23) - 112
    visible = (magnitude & 0x7FFFFF) | tl.where((magnitude >> 23) > 0, 0x800000, 0)
    small = exponent <= 0
    shift = tl.where(small, tl.minimum(14 - exponent, 30), 13)
    rebased = tl.where(magnitude < 0x7F800000, magnitude - (112 << 23), magnitude)
    value = tl.where(small, visible, rebased)
    half = (tl.full(value.shape, 1, tl.int32) << (shift - 1)) - 1
    rounded = (value + half + ((value >> shift) & 1)) >> shift
    narrow = sign.to(tl.int32) | tl.minimum(rounded, 0x7C00)
    return tl.where(magnitude > 0x7F800000, 0x7E00, narrow).to(tl.uint16)


@triton.jit
def _wire(values, NARROW: tl.constexpr):
    if NARROW == 1:
        return _round_bf16(values)
    elif NARROW == 2:  # noqa: RET505
        return _round_f16(values)
    else:
        return values


@triton.jit
def take(source, target, sizes, tile_tensor, tile_ordinal, TILE: tl.constexpr, BITS: tl.constexpr,
         WIDTH: tl.constexpr, NARROW: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0)
    tensor = tl.load(tile_tensor + tile)
    first = tl.load(tile_ordinal + tile).to(tl.int64) * TILE
    size = tl.load(sizes + tensor)
    at = first + tl.arange(0, TILE)
    base, out = address(source, tensor, BITS, ALIGNED), address(target, tensor, WIDTH, ALIGNED)
    if first + TILE <= size:
        tl.store(out + at, _wire(tl.load(base + at), NARROW))
    else:
        tl.store(out + at, _wire(tl.load(base + at, at < size), NARROW), at < size)


@triton.jit
def mark(old, source, sizes, tile_tensor, tile_ordinal, marks, counts, TILE: tl.constexpr, BITS: tl.constexpr,
         WIDTH: tl.constexpr, NARROW: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """One bit per element that differs, and how many there are in each tile."""
    tile = tl.program_id(0)
    tensor = tl.load(tile_tensor + tile)
    place = tl.arange(0, TILE // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    first = tl.load(tile_ordinal + tile).to(tl.int64) * TILE
    size = tl.load(sizes + tensor)
    before = load_tile(address(old, tensor, WIDTH, ALIGNED), first, place, size, TILE)
    after = _wire(load_tile(address(source, tensor, BITS, ALIGNED), first, place, size, TILE), NARROW)
    differs = (before != after).to(tl.uint32)
    words = tl.sum(differs << tl.arange(0, 32)[None, :].to(tl.uint32), 1)
    tl.store(marks + tile.to(tl.int64) * (TILE // 32) + tl.arange(0, TILE // 32), words.to(tl.int32, bitcast=True))
    tl.store(counts + tile, tl.sum(tl.sum(differs, 1), 0).to(tl.int32))


@triton.jit
def _bits_in(words):
    """Set bits of each word."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    return ((((words + (words >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def extract(old, tile_tensor, tile_ordinal, marks, ends, counts, indices, was, TILE: tl.constexpr,
            WIDTH: tl.constexpr):  # fmt: skip
    """The marked places, in order, and the old bits there: one from each word of marks at a time."""
    tile = tl.program_id(0)
    count = tl.load(counts + tile)
    if count > 0:
        base = address(old, tl.load(tile_tensor + tile), WIDTH, False)
        start = tl.load(tile_ordinal + tile).to(tl.int64) * TILE
        row = tl.arange(0, TILE // 32)
        words = tl.load(marks + tile.to(tl.int64) * (TILE // 32) + row).to(tl.uint32, bitcast=True)
        mine = _bits_in(words)
        slot = tl.load(ends + tile) - count + tl.cumsum(mine, 0) - mine
        for _ in range(tl.max(mine, 0)):
            chosen = words != 0
            lowest = words & (~words + 1)
            # A power of two is its own exponent as a float.
            bit = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            at = start + row * 32 + bit
            tl.store(indices + slot, at.to(indices.dtype.element_ty), chosen)
            before = tl.load(base + at, chosen, other=0)
            tl.store(was + slot, before.to(was.dtype.element_ty, bitcast=True), chosen)
            words ^= lowest
            slot += 1


@triton.jit
def put(target, tile_tensor, ends, counts, indices, values, STEP: tl.constexpr, WIDTH: tl.constexpr):
    """Write values to the places of a tile's changes."""
    tile = tl.program_id(0)
    count = tl.load(counts + tile)
    if count > 0:
        base = address(target, tl.load(tile_tensor + tile), WIDTH, False)
        first = tl.load(ends + tile) - count
        for done in range(0, count, STEP):
            i = done + tl.arange(0, STEP)
            inside = i < count
            at = tl.load(indices + first + i, inside).to(tl.int64)
            value = tl.load(values + first + i, inside).to(base.dtype.element_ty, bitcast=True)
            tl.store(base + at, value, inside)


@triton.jit
def mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mix_place(at):
    return mix64(at.to(tl.uint64) + 0x9E3779B97F4A7C15)


@triton.jit
def _mix_bits(bits):
    return mix64(bits.to(tl.uint64) + 0xD1B54A32D192ED03)


@triton.jit
def mix(at, bits):
    """What an element adds to the digest (SPEC 4)."""
    return mix64(_mix_place(at) ^ _mix_bits(bits))


@triton.jit
def digest_gain(at, before, after):
    """What changes add to the digest."""
    place = _mix_place(at)
    return mix64(place ^ _mix_bits(after)) - mix64(place ^ _mix_bits(before))


@triton.jit
def gather(source, tile_tensor, ends, counts, indices, was, now, gains, STEP: tl.constexpr, BITS: tl.constexpr,
           WIDTH: tl.constexpr, NARROW: tl.constexpr):  # fmt: skip
    """The new bits where a tile changed, and what they add to the digest."""
    tile = tl.program_id(0)
    count = tl.load(counts + tile)
    total = tl.zeros((STEP,), tl.uint64)
    if count > 0:
        base = address(source, tl.load(tile_tensor + tile), BITS, False)
        first = tl.load(ends + tile) - count
        for done in range(0, count, STEP):
            i = done + tl.arange(0, STEP)
            inside = i < count
            at = tl.load(indices + first + i, inside, other=0).to(tl.int64)
            after = _wire(tl.load(base + at, inside, other=0), NARROW)
            tl.store(now + first + i, after.to(now.dtype.element_ty, bitcast=True), inside)
            before = tl.load(was + first + i, inside, other=0).to(after.dtype, bitcast=True)
            gain = digest_gain(at, before, after)
            total += tl.where(inside, gain, tl.zeros_like(gain))
    tl.store(gains + tile, tl.sum(total, 0).to(tl.int64, bitcast=True))


@triton.jit
def digest(source, sizes, tile_tensor, tile_ordinal, sums, TILE: tl.constexpr, BITS: tl.constexpr,
           NARROW: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """What each tile adds to its tensor's digest."""
    tile = tl.program_id(0)
    tensor = tl.load(tile_tensor + tile)
    first = tl.load(tile_ordinal + tile).to(tl.int64) * TILE
    size = tl.load(sizes + tensor)
    at = first + tl.arange(0, TILE)
    bits = _wire(load_tile(address(source, tensor, BITS, ALIGNED), first, tl.arange(0, TILE), size, TILE), NARROW)
    mixed = mix(at, bits)
    tl.store(sums + tile, tl.sum(tl.where(at < size, mixed, tl.zeros_like(mixed)), 0).to(tl.int64, bitcast=True))


# -- bands and ranks ---------------------------------------------------------------------------------------------------


@triton.jit
def key_of(bits, MAGNITUDE: tl.constexpr, SHIFT: tl.constexpr, BIAS: tl.constexpr):
    """The band key (SPEC 6.1)."""
    if BIAS == 0:  # then 32 bits hold it, and 64 would cost twice
        return ((bits.to(tl.uint32) & MAGNITUDE) >> SHIFT).to(tl.int32)
    else:  # noqa: RET505
        exponent = ((bits.to(tl.uint64) & MAGNITUDE) >> SHIFT).to(tl.int32) - BIAS
        return tl.minimum(tl.maximum(exponent, 0), 255)


@triton.jit
def step_of(before, after, WIDTH: tl.constexpr, SIGNED: tl.constexpr):
    """Direction (up?) and distance of a change, in steps of the order of numbers (SPEC 6.6)."""
    old, new = before.to(tl.uint64), after.to(tl.uint64)
    top = tl.full(old.shape, 1, tl.uint64) << (WIDTH - 1)
    mask = top | (top - 1)
    if SIGNED:
        old = tl.where((old & top) != 0, ~old & mask, old | top)
        new = tl.where((new & top) != 0, ~new & mask, new | top)
    step = (new - old) & mask
    up = step <= top
    return up, tl.where(up, step, mask - step + 1)


@triton.jit
def move(bits, up, distance, WIDTH: tl.constexpr, SIGNED: tl.constexpr):
    """The bits that are so many steps up or down: what `step_of` undoes."""
    old = bits.to(tl.uint64)
    top = tl.full(old.shape, 1, tl.uint64) << (WIDTH - 1)
    mask = top | (top - 1)
    if SIGNED:
        old = tl.where((old & top) != 0, ~old & mask, old | top)
    new = tl.where(up, old + distance, old - distance) & mask
    if SIGNED:
        new = tl.where((new & top) != 0, new ^ top, ~new & mask)
    return new


@triton.jit
def _lower(a, b):
    return tl.minimum(a, b)


@triton.jit
def _cost_of(cost, members, changed, far, inside):
    a = tl.load(cost + members, inside, other=0) - tl.load(cost + (members - changed), inside, other=0)
    return a - tl.load(cost + far, inside, other=0) - tl.load(cost + (changed - far), inside, other=0)


@triton.jit
def choose(old, sizes, block_tensor, block_ordinal, block_tile, ends, counts, was, now, cost, bands, uppers, band_of,
           TILE: tl.constexpr, WIDTH: tl.constexpr, MAGNITUDE: tl.constexpr, SHIFT: tl.constexpr, BIAS: tl.constexpr,
           SIGNED: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """Split each block's keys into bands, as `weightcast.format.kernels.bands.choose_bands` does."""
    block = tl.program_id(0)
    tensor = tl.load(block_tensor + block)
    start = tl.load(block_ordinal + block).to(tl.int64) * _BLOCK
    size = tl.minimum(tl.load(sizes + tensor) - start, _BLOCK).to(tl.int32)
    first_tile = tl.load(block_tile + block)
    last_tile = first_tile + (size + TILE - 1) // TILE - 1
    low = tl.load(ends + first_tile) - tl.load(counts + first_tile)
    n = (tl.load(ends + last_tile) - low).to(tl.int32)
    if n > 0:
        lane = tl.arange(0, 256)
        members, changed, far = tl.zeros((256,), tl.int32), tl.zeros((256,), tl.int32), tl.zeros((256,), tl.int32)
        base = address(old, tensor, WIDTH, False) + start
        stride = (size >> 14) | 1
        samples = (size + stride - 1) // stride
        for done in range(0, samples, STEP):
            i = done + tl.arange(0, STEP)
            inside = i < samples
            key = key_of(tl.load(base + i * stride, inside, other=0), MAGNITUDE, SHIFT, BIAS)
            surplus = STEP - tl.minimum(samples - done, STEP)
            members += tl.histogram(tl.where(inside, key, 0), 256) - tl.where(lane == 0, surplus, 0)
        for done in range(0, n, STEP):
            i = done + tl.arange(0, STEP)
            inside = i < n
            before = tl.load(was + low + i, inside, other=0).to(base.dtype.element_ty, bitcast=True)
            after = tl.load(now + low + i, inside, other=0).to(base.dtype.element_ty, bitcast=True)
            key = key_of(before, MAGNITUDE, SHIFT, BIAS)
            surplus = STEP - tl.minimum(n - done, STEP)
            changed += tl.histogram(tl.where(inside, key, 0), 256) - tl.where(lane == 0, surplus, 0)
            _, distance = step_of(before, after, WIDTH, SIGNED)
            distant = inside & (distance != 1)
            near = STEP - tl.sum(distant.to(tl.int32), 0)
            far += tl.histogram(tl.where(distant, key, 0), 256) - tl.where(lane == 0, near, 0)
        members = tl.maximum(members * stride, changed)

        active = members > 0
        left = tl.sum(active.to(tl.int32), 0)
        bits = _cost_of(cost, members, changed, far, active)
        going = left > 1
        while going:
            following = tl.associative_scan(tl.where(active, lane, 256), 0, _lower, reverse=True)
            follower = tl.where(lane < 255, tl.gather(following, tl.minimum(lane + 1, 255), 0), 256)
            paired = active & (follower < 256)
            other = tl.minimum(follower, 255)
            both = members + tl.gather(members, other, 0)
            both_changed = changed + tl.gather(changed, other, 0)
            both_far = far + tl.gather(far, other, 0)
            together = _cost_of(cost, both, both_changed, both_far, paired)
            loss = tl.where(paired, together - bits - tl.gather(bits, other, 0), 0x7FFFFFFFFFFFFFFF)
            least = tl.min(loss, 0)
            if (left <= _BANDS) & (least >= _BAND_COST):
                going = left < 0
            else:
                best = tl.min(tl.where(loss == least, lane, 256), 0)
                mine = lane == best
                into = lane == tl.sum(tl.where(mine, other, 0), 0)
                members = tl.where(into, tl.sum(tl.where(mine, both, 0), 0), members)
                changed = tl.where(into, tl.sum(tl.where(mine, both_changed, 0), 0), changed)
                far = tl.where(into, tl.sum(tl.where(mine, both_far, 0), 0), far)
                bits = tl.where(into, tl.sum(tl.where(mine, together, 0), 0), bits)
                active = active & (lane != best)
                left -= 1
                going = left > 1
        number = tl.cumsum(active.to(tl.int32), 0) - 1
        upper = tl.where(number == left - 1, 255, lane)
        tl.store(uppers + block * _BANDS + number, upper.to(tl.uint8), active)
        tl.store(bands + block, left.to(tl.uint8))
        below = tl.cumsum(active.to(tl.int32), 0) - active.to(tl.int32)  # bands that end before this key
        tl.store(band_of + block * 256 + lane, tl.minimum(below, left - 1).to(tl.uint8))


@triton.jit
def tally(old, sizes, tile_tensor, tile_ordinal, tile_block, bands, band_of, in_tile, in_sub, TILE: tl.constexpr,
          SUB: tl.constexpr, WIDTH: tl.constexpr, MAGNITUDE: tl.constexpr, SHIFT: tl.constexpr, BIAS: tl.constexpr,
          ALIGNED: tl.constexpr):  # fmt: skip
    """The members of each band in each tile, and within a tile before each of its parts of ``SUB`` elements."""
    tile = tl.program_id(0)
    block = tl.load(tile_block + tile)
    if tl.load(bands + block) > 0:
        tensor = tl.load(tile_tensor + tile)
        part = tl.arange(0, TILE // SUB)
        place = part[:, None] * SUB + tl.arange(0, SUB)[None, :]
        first = tl.load(tile_ordinal + tile).to(tl.int64) * TILE
        size = tl.load(sizes + tensor)
        bits = load_tile(address(old, tensor, WIDTH, ALIGNED), first, place, size, TILE)
        band = tl.load(band_of + block * 256 + key_of(bits, MAGNITUDE, SHIFT, BIAS)).to(tl.int32)
        # Eight bands are counted in the bytes of one word: a part has fewer elements than a byte can count.
        one = tl.where(first + place < size, 1, 0).to(tl.int64) << ((band & 7) * 8)
        none = tl.zeros_like(one)
        low = tl.sum(tl.where(band < 8, one, none), 1)
        high = tl.sum(tl.where(band < 8, none, one), 1)
        b = tl.arange(0, _BANDS)
        packed = tl.where(b[None, :] < 8, low[:, None], high[:, None])
        members = ((packed >> ((b[None, :] & 7) * 8)) & 255).to(tl.int32)
        before = tl.cumsum(members, 0) - members
        tl.store(
            in_sub + (tile.to(tl.int64) * (TILE // SUB) + part[:, None]) * _BANDS + b[None, :], before.to(tl.int16)
        )
        tl.store(in_tile + tile.to(tl.int64) * _BANDS + b, tl.sum(members, 0))


@triton.jit
def add_up(block_tile, block_tiles, bands, in_tile, band_sizes):
    """The members of each band in a block before each tile, in place, and in all."""
    block = tl.program_id(0)
    if tl.load(bands + block) > 0:
        tile = tl.arange(0, _TILES_PER_BLOCK)
        b = tl.arange(0, _BANDS)
        place = (tl.load(block_tile + block).to(tl.int64) + tile[:, None]) * _BANDS + b[None, :]
        inside = (tile[:, None] < tl.load(block_tiles + block)) & (b[None, :] < tl.load(bands + block).to(tl.int32))
        members = tl.load(in_tile + place, inside, other=0)
        tl.store(in_tile + place, tl.cumsum(members, 0) - members, inside)
        tl.store(band_sizes + block * _BANDS + b, tl.sum(members, 0))


@triton.jit
def rank(old, sizes, tile_tensor, tile_ordinal, tile_block, ends, counts, indices, was, uppers, band_of, in_tile,
         in_sub, ranks, TILE: tl.constexpr, SUB: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
         MAGNITUDE: tl.constexpr, SHIFT: tl.constexpr, BIAS: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """The rank of each change within its band."""
    tile = tl.program_id(0)
    count = tl.load(counts + tile)
    if count > 0:
        tensor = tl.load(tile_tensor + tile)
        block = tl.load(tile_block + tile)
        base = address(old, tensor, WIDTH, ALIGNED)
        size = tl.load(sizes + tensor)
        start = tl.load(tile_ordinal + tile).to(tl.int64) * TILE
        first = tl.load(ends + tile) - count
        for done in range(0, count, STEP):
            i = done + tl.arange(0, STEP)
            inside = i < count
            at = tl.where(inside, tl.load(indices + first + i, inside, other=0).to(tl.int64), start)
            before = tl.load(was + first + i, inside, other=0).to(base.dtype.element_ty, bitcast=True)
            key = key_of(before, MAGNITUDE, SHIFT, BIAS)
            band = tl.load(band_of + block * 256 + key).to(tl.int32)
            highest = tl.load(uppers + block * _BANDS + band).to(tl.int32)
            lowest = tl.load(uppers + block * _BANDS + band - 1, band > 0, other=0).to(tl.int32)
            lowest = tl.where(band > 0, lowest + 1, 0)
            part = (at - start) // SUB
            place = part[:, None] * SUB + tl.arange(0, SUB)[None, :]
            keys = key_of(load_tile(base, start, place, size, TILE), MAGNITUDE, SHIFT, BIAS)
            same = (start + place < at[:, None]) & (keys >= lowest[:, None]) & (keys <= highest[:, None])
            rank_ = tl.sum(same.to(tl.int32), 1)
            rank_ += tl.load(in_tile + tile.to(tl.int64) * _BANDS + band, inside, other=0)
            sub = (tile.to(tl.int64) * (TILE // SUB) + part) * _BANDS + band
            rank_ += tl.load(in_sub + sub, inside, other=0).to(tl.int32)
            tl.store(ranks + first + i, rank_, inside)


def launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Run a kernel with this many programs, if any, on the device of its first argument."""
    if not programs:
        return
    device = arguments[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[(programs,)](*arguments, **options)
