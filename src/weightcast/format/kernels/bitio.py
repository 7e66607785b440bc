"""Bits in a byte buffer, least significant first, and Rice codes made of them (SPEC 6.2, 6.3).

Positions are counted in bits. Readers and writers touch up to `SLACK` bytes past the position they are given; callers
provide that much room, and compare the position with the end themselves. The state of a written stream is (at, held).
"""

import numpy as np

from weightcast.format.kernels.compile import kernel
from weightcast.format.kernels.lanes import load_word, store_word, trailing_zeros

SLACK = 32
"""Bytes that a buffer needs after its last bit."""

UNARY_LIMIT = 24
"""A quotient of this many ones is an escape: the plain value follows."""

MAX_RICE = 58
"""Largest Rice parameter: every quotient below the escape still fits 64 bits."""

_U1 = np.uint64(1)
_HALF = np.uint64(32)


@kernel
def low_bits(count):
    """A word with ``count`` low bits set, 0 to 63."""
    return (_U1 << np.uint64(count)) - _U1


@kernel
def put(data, at, held, value, count):
    """Append ``count`` <= 32 bits to a stream that ends at bit ``at``; returns its new state.

    ``held`` keeps the bits of the unfinished 32-bit word, so that memory is never read back.
    """
    filled = at & 31
    held |= np.uint64(value) << np.uint64(filled)
    store_word(data, at >> 5 << 2, held)
    return at + count, held >> np.uint64((filled + count) & 32)  # no branch: it would be mispredicted


@kernel
def put_wide(data, at, held, value, count):
    """Append ``count`` <= 64 bits."""
    if count <= 32:
        return put(data, at, held, value, count)
    at, held = put(data, at, held, value & low_bits(32), 32)
    return put(data, at, held, value >> _HALF, count - 32)


@kernel
def get(data, at, count):
    """Read ``count`` <= 56 bits at bit ``at``."""
    return (load_word(data, at >> 3) >> np.uint64(at & 7)) & low_bits(count)


@kernel
def get_wide(data, at, count):
    """Read ``count`` <= 64 bits."""
    if count <= 32:
        return get(data, at, count)
    return get(data, at, 32) | (get(data, at + 32, count - 32) << _HALF)


@kernel
def put_rice(data, at, held, value, parameter, plain):
    """Append ``value`` with a Rice ``parameter``, or escaped as ``plain`` bits."""
    value = np.uint64(value)
    quotient = value >> np.uint64(parameter)
    if quotient >= np.uint64(UNARY_LIMIT):
        at, held = put(data, at, held, low_bits(UNARY_LIMIT), UNARY_LIMIT)
        return put_wide(data, at, held, value, plain)
    unary, low = np.int64(quotient) + 1, value & low_bits(parameter)
    if unary + parameter <= 32:
        return put(data, at, held, low_bits(quotient) | (low << np.uint64(unary)), unary + parameter)
    at, held = put(data, at, held, low_bits(quotient), unary)
    return put_wide(data, at, held, low, parameter)


@kernel
def get_rice(data, at, parameter, plain):
    """Read a value written by `put_rice`; returns it and the next position."""
    word = load_word(data, at >> 3) >> np.uint64(at & 7)
    ones = np.int64(trailing_zeros(~word))
    if ones >= UNARY_LIMIT:
        return get_wide(data, at + UNARY_LIMIT, plain), at + UNARY_LIMIT + plain
    if parameter <= 24:
        low = (word >> np.uint64(ones + 1)) & low_bits(parameter)
    else:
        low = get_wide(data, at + ones + 1, parameter)
    return (np.uint64(ones) << np.uint64(parameter)) | low, at + ones + 1 + parameter


@kernel
def rice_length(value, parameter, plain):
    """Bits that `put_rice` writes."""
    quotient = np.uint64(value) >> np.uint64(parameter)
    if quotient < np.uint64(UNARY_LIMIT):
        return np.int64(quotient) + 1 + np.int64(parameter)
    return np.int64(UNARY_LIMIT + plain)
