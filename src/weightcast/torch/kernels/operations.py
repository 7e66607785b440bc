"""Kernels in plain torch operations: for devices without Triton, and as the tests' reference for the others."""

from __future__ import annotations

from itertools import accumulate

import torch

from weightcast.format.codec.ranks import band_cost
from weightcast.format.kernels.bands import BAND_COST, BLOCK, MAX_BANDS
from weightcast.format.spec import Dtype
from weightcast.format.tasks import traits
from weightcast.torch.batch import WORDS, Batch, Copied
from weightcast.torch.kernels.device import DeviceFlips, DeviceKernels, DeviceRanks

_MOST = (1 << 63) - 1


class PlainKernels(DeviceKernels[DeviceFlips]):
    """Kernels in torch operations, tensor by tensor."""

    def take(self, batch: Batch) -> Copied:
        copied = Copied.room(batch)
        for words, room in zip(batch.words(), copied.words(), strict=True):
            room.copy_(_wire(batch, words))
        return copied

    def differ(self, batch: Batch, old: Copied) -> DeviceFlips:
        olds = old.words()
        indices = [
            (_wire(batch, words) != before).nonzero().reshape(-1)
            for words, before in zip(batch.words(), olds, strict=True)
        ]
        was = [before[at] for before, at in zip(olds, indices, strict=True)]
        return DeviceFlips([0, *accumulate(at.numel() for at in indices)], torch.cat(indices), torch.cat(was))

    def _flips(self, batch: Batch, bounds: list[int], indices: torch.Tensor, was: torch.Tensor) -> DeviceFlips:
        return DeviceFlips(bounds, indices, was)

    def _put(self, copied: Copied, flips: DeviceFlips, values: torch.Tensor) -> None:
        for i, target in enumerate(copied.words()):
            mine = _slice(flips, i)
            target[flips.indices[mine]] = values[mine]

    def _gather(self, batch: Batch, flips: DeviceFlips) -> tuple[torch.Tensor, torch.Tensor]:
        now = torch.cat([_wire(batch, words[flips.indices[_slice(flips, i)]]) for i, words in enumerate(batch.words())])
        gains = torch.stack([
            (mix(flips.indices[mine], now[mine]) - mix(flips.indices[mine], flips.was[mine])).sum()
            for mine in (_slice(flips, i) for i in range(len(batch.sizes)))
        ])  # fmt: skip
        return now, gains

    def _rank(self, batch: Batch, old: Copied, flips: DeviceFlips, now: torch.Tensor) -> DeviceRanks:
        found = [
            _rank_tensor(batch.kind, words, flips.indices[mine].to(torch.int64), flips.was[mine], now[mine])
            for words, mine in zip(old.words(), (_slice(flips, i) for i in range(len(batch.sizes))), strict=True)
        ]
        return DeviceRanks(*(torch.cat(column) for column in zip(*found, strict=True)))

    def digests(self, batch: Batch) -> torch.Tensor:
        sums = []
        for words in batch.words():
            bits = _wire(batch, words)
            sums.append(mix(torch.arange(bits.numel(), device=bits.device), bits).sum())
        return torch.stack(sums)


def _slice(flips: DeviceFlips, i: int) -> slice:
    return slice(flips.bounds[i], flips.bounds[i + 1])


# -- arithmetic --------------------------------------------------------------------------------------------------------


def _unsigned(bits: torch.Tensor) -> torch.Tensor:
    """Words as 64-bit integers of the same unsigned value."""
    wide = bits.to(torch.int64)
    return wide if bits.element_size() == 8 else wide & ((1 << (8 * bits.element_size())) - 1)


def _wire(batch: Batch, words: torch.Tensor) -> torch.Tensor:
    if batch.narrow is None:
        return words
    bits = _unsigned(words)
    sign, magnitude = bits >> 31, bits & 0x7FFFFFFF
    if batch.narrow == "BF16":
        rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        narrow = torch.where(magnitude > 0x7F800000, 0x7FC0, (sign << 15) | rounded)
    else:
        exponent = (magnitude >> 23) - 112
        small = exponent <= 0
        shift = torch.where(small, (14 - exponent).clamp(max=40), 13)
        visible = (magnitude & 0x7FFFFF) | torch.where(magnitude >> 23 > 0, 0x800000, 0)
        rebased = torch.where(magnitude < 0x7F800000, magnitude - (112 << 23), magnitude)
        value = torch.where(small, visible, rebased)
        rounded = (value + (torch.ones_like(value) << (shift - 1)) - 1 + ((value >> shift) & 1)) >> shift
        narrow = torch.where(magnitude > 0x7F800000, 0x7E00, (sign << 15) | rounded.clamp(max=0x7C00))
    return narrow.to(WORDS[2])


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _down(x: torch.Tensor, by: int) -> torch.Tensor:
    """A shift that brings in zeros."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix64(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _down(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _down(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _down(x, 31)


def mix(index: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    place = _mix64(index.to(torch.int64) + _signed(0x9E3779B97F4A7C15))
    return _mix64(place ^ _mix64(_unsigned(bits) + _signed(0xD1B54A32D192ED03)))


# -- bands and ranks ---------------------------------------------------------------------------------------------------


def _keys(bits: torch.Tensor, kind: Dtype) -> torch.Tensor:
    dtype = traits(kind)
    exponent = ((_unsigned(bits) & int(dtype.magnitude)) >> int(dtype.shift)) - dtype.bias
    return exponent.clamp(0, 255)


def _far(was: torch.Tensor, now: torch.Tensor, kind: Dtype) -> torch.Tensor:
    top, mask = _signed(1 << (kind.width - 1)), _signed((1 << kind.width) - 1)
    old, new = _unsigned(was), _unsigned(now)
    if kind.mantissa is not None:
        old, new = (torch.where(bits & top != 0, ~bits & mask, bits | top) for bits in (old, new))
    step = (new - old) & mask
    return (step != 1) & (step != mask)


def _rank_tensor(
    kind: Dtype, old: torch.Tensor, indices: torch.Tensor, was: torch.Tensor, now: torch.Tensor
) -> DeviceRanks:
    keys, blocks = _keys(old, kind), -(-old.numel() // BLOCK)
    at = torch.arange(old.numel(), device=old.device)
    block = at // BLOCK
    stride = (torch.clamp(old.numel() - torch.arange(blocks, device=old.device) * BLOCK, max=BLOCK) >> 14) | 1
    members = _tally(block, keys, blocks, (at % BLOCK) % stride[block] == 0) * stride[:, None]
    changed = _tally(block[indices], keys[indices], blocks, torch.ones_like(indices, dtype=torch.bool))
    far = _tally(block[indices], keys[indices], blocks, _far(was, now, kind))
    members = torch.maximum(members, changed) * (changed.sum(1, keepdim=True) > 0)
    band_of, bands, uppers = _choose(members, changed, far)
    bin_of = block * MAX_BANDS + band_of[block, keys]
    order = torch.argsort(bin_of, stable=True)
    sizes = torch.bincount(bin_of, minlength=blocks * MAX_BANDS)
    rank = torch.empty_like(order)
    rank[order] = at - (sizes.cumsum(0) - sizes)[bin_of[order]]
    sizes = torch.where(bands.repeat_interleave(MAX_BANDS) > 0, sizes, 0)
    return DeviceRanks(rank[indices].to(torch.int32), bands, uppers.reshape(-1), sizes.to(torch.int32))


def _tally(block: torch.Tensor, keys: torch.Tensor, blocks: int, counted: torch.Tensor) -> torch.Tensor:
    return torch.bincount((block * 256 + keys)[counted], minlength=blocks * 256).reshape(blocks, 256)


def _choose(
    members: torch.Tensor, changed: torch.Tensor, far: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each block: the band of each key, the number of bands, and the highest key of each band."""
    cost, key = torch.from_numpy(band_cost()).to(members.device), torch.arange(256, device=members.device)
    row = torch.arange(members.shape[0], device=members.device)
    active = members > 0

    def bits_of(counts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        m, c, f = counts
        return cost[m] - cost[m - c] - cost[f] - cost[c - f]

    while True:
        following = torch.where(active, key, 256).flip(1).cummin(1).values.flip(1)
        follower = torch.cat([following[:, 1:], torch.full_like(following[:, :1], 256)], 1)
        paired, other = active & (follower < 256), follower.clamp(max=255)
        counts = members, changed, far
        both = tuple(torch.where(paired, count + count.gather(1, other), 0) for count in counts)
        bits = bits_of(counts)
        loss = torch.where(paired, bits_of(both) - bits - bits.gather(1, other), _MOST)
        least = loss.min(1).values
        best = torch.where(loss == least[:, None], key, 256).min(1).values
        left = active.sum(1)
        going = (left > 1) & ((left > MAX_BANDS) | (least < BAND_COST))
        if not going.any():
            break
        r, b = row[going], best[going]
        into = other[r, b]
        members, changed, far = (count.clone() for count in counts)
        for count, sums in zip((members, changed, far), both, strict=True):
            count[r, into] = sums[r, b]
        active = active.clone()
        active[r, b] = False
    bands = active.sum(1)
    number = active.cumsum(1) - 1
    uppers = torch.zeros(members.shape[0], MAX_BANDS, dtype=torch.uint8, device=members.device)
    at, upper = active.nonzero(as_tuple=True)
    last = number[at, upper] == bands[at] - 1
    uppers[at, number[at, upper]] = torch.where(last, 255, upper).to(torch.uint8)
    below = number - active.to(number.dtype) + 1  # bands that end before this key
    return torch.minimum(below, (bands - 1).clamp(min=0)[:, None]), bands.to(torch.uint8), uppers
