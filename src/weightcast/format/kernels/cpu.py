"""Compare, scatter, digest and round on the CPU. Each call uses one thread, without the interpreter lock."""

import numpy as np

from weightcast.format.kernels.bands import key_of
from weightcast.format.kernels.compile import kernel
from weightcast.format.kernels.lanes import LANES, differ_mask, store_keys, trailing_zeros

_U1 = np.uint64(1)
INDEX_SALT = np.uint64(0x9E3779B97F4A7C15)
BITS_SALT = np.uint64(0xD1B54A32D192ED03)


@kernel
def changes(old, new, first, indices, was, now):
    """Find where ``old`` and ``new`` differ; fills flat indices from ``first``, old and new bits; returns how many."""
    used = 0
    for word in range(old.size // LANES):
        mask = differ_mask(old, new, word * LANES)
        while mask:
            i = word * LANES + np.int64(trailing_zeros(mask))
            indices[used], was[used], now[used] = first + i, old[i], new[i]
            used += 1
            mask &= mask - _U1
    for i in range(old.size // LANES * LANES, old.size):
        if old[i] != new[i]:
            indices[used], was[used], now[used] = first + i, old[i], new[i]
            used += 1
    return used


@kernel
def band_keys(old, magnitude, shift, bias, keys):
    """The band key of every element."""
    for word in range(old.size // LANES):
        store_keys(old, word * LANES, magnitude, shift, np.uint64(bias), keys)
    for i in range(old.size // LANES * LANES, old.size):
        keys[i] = key_of(np.uint64(old[i]), magnitude, shift, bias)


@kernel
def gather(bits, indices, first, out):
    for i in range(indices.size):
        out[i] = bits[indices[i] - first]


@kernel
def scatter(bits, indices, values):
    for i in range(indices.size):
        bits[indices[i]] = values[i]


@kernel
def are_places(indices, size):
    """Whether ``indices`` are below ``size`` and in order, none of them twice."""
    last = np.int64(-1)
    good = True
    for i in range(indices.size):
        good &= indices[i] > last
        last = np.int64(indices[i])
    return good and last < size


@kernel
def mix64(x):
    """A bijection of 64-bit words in which every input bit affects every output bit (SPEC 4.1)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@kernel
def mix(index, bits):
    """What one element adds to its tensor's digest."""
    return mix64(mix64(np.uint64(index) + INDEX_SALT) ^ mix64(np.uint64(bits) + BITS_SALT))


@kernel
def digest_runs(bits, starts):
    """Digest of equally long runs of elements; run k starts at flat index ``starts[k]``."""
    total = np.uint64(0)
    length = bits.size // starts.size
    for k in range(starts.size):
        run = bits[k * length : (k + 1) * length]
        start = starts[k]
        for i in range(length):
            total += mix(start + i, run[i])
    return total


@kernel
def digest_change(indices, was, now):
    """What overwriting ``was`` by ``now`` adds to the digest."""
    total = np.uint64(0)
    for i in range(indices.size):
        place = mix64(np.uint64(indices[i]) + INDEX_SALT)
        total += mix64(place ^ mix64(np.uint64(now[i]) + BITS_SALT))
        total -= mix64(place ^ mix64(np.uint64(was[i]) + BITS_SALT))
    return total


@kernel
def checksum(bits, first):
    """A weighted sum of elements from flat index ``first`` on, a tenth of a digest's work.

    It shows that a tensor was edited, and nothing more: who wants to can find other bits with the same sum.
    """
    total = np.uint64(0)
    for i in range(bits.size):
        total += np.uint64(bits[i]) * np.uint64(2 * (first + i) + 1)
    return total


@kernel
def checksum_change(indices, was, now):
    """What overwriting ``was`` by ``now`` adds to the checksum."""
    total = np.uint64(0)
    for i in range(indices.size):
        total += (np.uint64(now[i]) - np.uint64(was[i])) * np.uint64(2 * indices[i] + 1)
    return total


@kernel
def narrow(values, mantissa, exponent_bits, out):
    """IEEE binary32 bits to a narrower binary format: to nearest, ties to even, one canonical NaN (SPEC 3)."""
    if exponent_bits == 8:
        _shorten(values, mantissa, out)
        return
    top_exponent = (1 << exponent_bits) - 1
    drop = 23 - mantissa
    rebias = 127 - (top_exponent >> 1)
    for i in range(values.size):
        bits = np.int64(values[i])
        sign = (bits >> 31) << (mantissa + exponent_bits)
        magnitude = bits & 0x7FFFFFFF
        if magnitude > 0x7F800000:
            out[i] = (top_exponent << mantissa) | (1 << (mantissa - 1))
            continue
        exponent = (magnitude >> 23) - rebias
        shift = drop
        if exponent <= 0:  # subnormal in the narrow format: the hidden one becomes explicit, further to the right
            shift = min(drop + 1 - exponent, 40)
            magnitude = (magnitude & 0x7FFFFF) | (0x800000 if magnitude >> 23 else 0)
        elif magnitude < 0x7F800000:
            magnitude -= rebias << 23
        rounded = (magnitude + (1 << (shift - 1)) - 1 + ((magnitude >> shift) & 1)) >> shift
        out[i] = sign | min(rounded, top_exponent << mantissa)


@kernel
def _shorten(values, mantissa, out):
    """`narrow` to a format with the exponents of binary32: only bits of the mantissa are dropped."""
    drop = 23 - mantissa
    half, nan = (1 << (drop - 1)) - 1, (0xFF << mantissa) | (1 << (mantissa - 1))
    for i in range(values.size):
        bits = np.int64(values[i])
        rounded = (bits + half + ((bits >> drop) & 1)) >> drop
        out[i] = nan if bits & 0x7FFFFFFF > 0x7F800000 else rounded
