"""Parts of tensors in Triton: elements that nested loops visit, in a tensor and in memory (SPEC 4).

A table has for each part its loops, innermost first: the count, the step in the tensor, the step in memory. A part's
elements are numbered in the order of its loops.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weightcast.torch.kernels.triton import address, digest_gain, load_tile, mix
from weightcast.torch.kernels.triton_coding import load_bits


@triton.jit
def _visit(number, loops, LOOPS: tl.constexpr):
    """Where an element is, in the tensor and in memory, seen from the part's first one."""
    there, here = tl.zeros(number.shape, tl.int64), tl.zeros(number.shape, tl.int64)
    rest = number
    for k in tl.static_range(LOOPS):
        count = tl.load(loops + 3 * k).to(rest.dtype)
        along = rest
        if k < LOOPS - 1:
            rest = along // count
            along -= rest * count
        there += along.to(tl.int64) * tl.load(loops + 3 * k + 1)
        here += along.to(tl.int64) * tl.load(loops + 3 * k + 2)
    return there, here


@triton.jit
def digest_parts(firsts, sources, sizes, loops, tile_part, tile_ordinal, sums, TILE: tl.constexpr, BITS: tl.constexpr,
                 LOOPS: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """What each tile of a part adds to its tensor's digest. ``LOOPS`` is 0 for elements without gaps on both sides."""
    tile = tl.program_id(0)
    part = tl.load(tile_part + tile)
    first = tl.load(tile_ordinal + tile).to(tl.int64) * TILE
    size = tl.load(sizes + part)
    lane = tl.arange(0, TILE)
    inside = first + lane < size
    base, source = address(firsts, part, BITS, ALIGNED), tl.load(sources + part)
    if LOOPS == 0:
        at = source + first + lane
        bits = load_tile(base, first, lane, size, TILE)
    else:
        number = first + lane
        if not WIDE:  # a division of 64 bits costs several times as much
            number = number.to(tl.int32)
        there, here = _visit(number, loops + part * (3 * LOOPS), LOOPS)
        at = source + there
        bits = tl.load(base + here, inside, other=0)
    mixed = mix(at, bits)
    tl.store(sums + tile, tl.sum(tl.where(inside, mixed, tl.zeros_like(mixed)), 0).to(tl.int64, bitcast=True))


@triton.jit
def gain_in_boxes(tile_tensor, ends, counts, indices, was, now, sources, loops, gains, STEP: tl.constexpr,
                  WIDTH: tl.constexpr, LOOPS: tl.constexpr):  # fmt: skip
    """What a tile's changes add to the digest of the tensor of which the batch's one is a box."""
    tile = tl.program_id(0)
    count = tl.load(counts + tile)
    total = tl.zeros((STEP,), tl.uint64)
    tensor = tl.load(tile_tensor + tile)
    source, first = tl.load(sources + tensor), tl.load(ends + tile) - count
    for done in range(0, count, STEP):
        i = done + tl.arange(0, STEP)
        inside = i < count
        number = tl.load(indices + first + i, inside, other=0).to(tl.int64)
        there, _ = _visit(number, loops + tensor * (3 * LOOPS), LOOPS)
        before, after = load_bits(was, first + i, inside, WIDTH), load_bits(now, first + i, inside, WIDTH)
        each = digest_gain(source + there, before, after)
        total += tl.where(inside, each, tl.zeros_like(each))
    tl.store(gains + tile, tl.sum(total, 0).to(tl.int64, bitcast=True))


@triton.jit
def put_in_parts(tile_tensor, ends, counts, indices, values, firsts, loops, STEP: tl.constexpr, WIDTH: tl.constexpr,
                 LOOPS: tl.constexpr):  # fmt: skip
    """Write a tile's changes to where its tensor's elements are in memory."""
    tile = tl.program_id(0)
    count = tl.load(counts + tile)
    if count > 0:
        tensor = tl.load(tile_tensor + tile)
        base = address(firsts, tensor, WIDTH, False)
        first = tl.load(ends + tile) - count
        for done in range(0, count, STEP):
            i = done + tl.arange(0, STEP)
            inside = i < count
            number = tl.load(indices + first + i, inside, other=0).to(tl.int64)
            _, here = _visit(number, loops + tensor * (3 * LOOPS), LOOPS)
            value = tl.load(values + first + i, inside).to(base.dtype.element_ty, bitcast=True)
            tl.store(base + here, value, inside)
