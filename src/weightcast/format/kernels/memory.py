"""Arrays at addresses, and turns that threads take: one compiled call per thread works on any number of tensors.

Python starts each thread once, not once for each piece of work: sixteen threads would queue for the interpreter lock.
"""

from typing import Any

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

from weightcast.format.kernels.compile import kernel
from weightcast.format.kernels.cpu import band_keys, changes, narrow

TURN, ROOM = 0, 1
"""Counters that threads share: the next task, and how much of the common room is taken."""


@intrinsic
def take(typingctx: Any, counters: Any, which: Any, amount: Any) -> Any:
    """Add to a counter, atomically; returns what it was before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", cgutils.gep_inbounds(builder, data, args[1]), args[2], "monotonic")

    return types.int64(counters, types.int64, types.int64), codegen


@intrinsic
def _pointer(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.uint64), codegen


@kernel
def bytes_at(address, size):
    return carray(_pointer(address), (size,), np.uint8)


@kernel
def words16_at(address, size):
    return carray(_pointer(address), (size,), np.uint16)


@kernel
def words32_at(address, size):
    return carray(_pointer(address), (size,), np.uint32)


@kernel
def words64_at(address, size):
    return carray(_pointer(address), (size,), np.uint64)


@kernel
def indices_at(address, size):
    return carray(_pointer(address), (size,), np.int64)


@kernel
def ranks_at(address, size):
    return carray(_pointer(address), (size,), np.int32)


@kernel
def keys_at(address, word, size, dtype, keys):
    """The band keys of ``size`` elements."""
    magnitude, shift, bias = dtype.magnitude, dtype.shift, dtype.bias
    if word == 2:
        band_keys(words16_at(address, size), magnitude, shift, bias, keys)
    elif word == 4:
        band_keys(words32_at(address, size), magnitude, shift, bias, keys)
    elif word == 1:
        band_keys(bytes_at(address, size), magnitude, shift, bias, keys)
    else:
        band_keys(words64_at(address, size), magnitude, shift, bias, keys)


@kernel
def changes_at(old, new, word, size, indices, was, now):
    """`changes` of two arrays at addresses."""
    if word == 2:
        return changes(words16_at(old, size), words16_at(new, size), 0, indices, was, now)
    if word == 4:
        return changes(words32_at(old, size), words32_at(new, size), 0, indices, was, now)
    if word == 1:
        return changes(bytes_at(old, size), bytes_at(new, size), 0, indices, was, now)
    return changes(words64_at(old, size), words64_at(new, size), 0, indices, was, now)


@kernel
def rounded_changes_at(old, new, mantissa, exponent_bits, size, rounded, indices, was, now):
    """`changes` of an array of 16 bits and one of binary32 that is rounded, as many at a time as ``rounded`` has."""
    n = 0
    for first in range(0, size, rounded.size):
        some = rounded[: min(rounded.size, size - first)]
        narrow(words32_at(new + np.uint64(4 * first), some.size), mantissa, exponent_bits, some)
        before = words16_at(old + np.uint64(2 * first), some.size)
        n += changes(before, some, first, indices[n:], was[n:], now[n:])
    return n


@kernel
def _pick(bits, places, out):
    for i in range(places.size):
        out[i] = bits[places[i]]


@kernel
def gather_at(address, word, size, places, out):
    """The elements at ``places``, widened to 64 bits."""
    if word == 2:
        _pick(words16_at(address, size), places, out)
    elif word == 4:
        _pick(words32_at(address, size), places, out)
    elif word == 1:
        _pick(bytes_at(address, size), places, out)
    else:
        _pick(words64_at(address, size), places, out)


@kernel
def _put(bits, places, values):
    for i in range(places.size):
        bits[places[i]] = values[i]


@kernel
def scatter_at(address, word, size, places, values):
    """Write 64-bit ``values`` to ``places``, narrowed to the word."""
    if word == 2:
        _put(words16_at(address, size), places, values)
    elif word == 4:
        _put(words32_at(address, size), places, values)
    elif word == 1:
        _put(bytes_at(address, size), places, values)
    else:
        _put(words64_at(address, size), places, values)


@kernel
def _copy(source, target):
    for i in range(target.size):
        target[i] = source[i]


@kernel
def load_at(address, word, first, out):
    """Consecutive elements from the ``first`` on, widened to 64 bits."""
    start = address + np.uint64(first * word)
    if word == 2:
        _copy(words16_at(start, out.size), out)
    elif word == 4:
        _copy(words32_at(start, out.size), out)
    elif word == 1:
        _copy(bytes_at(start, out.size), out)
    else:
        _copy(words64_at(start, out.size), out)


@kernel
def store_at(address, word, first, values):
    """Write 64-bit ``values`` as consecutive elements, narrowed to the word."""
    start = address + np.uint64(first * word)
    if word == 2:
        _copy(values, words16_at(start, values.size))
    elif word == 4:
        _copy(values, words32_at(start, values.size))
    elif word == 1:
        _copy(values, bytes_at(start, values.size))
    else:
        _copy(values, words64_at(start, values.size))
