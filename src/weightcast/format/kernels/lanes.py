"""The few machine instructions that the kernels need and Python cannot express.

Each is written as portable LLVM vector code, which the compiler turns into the best instructions of each CPU.
"""

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.core.config import CPU_NAME  # type: ignore[attr-defined]
from numba.extending import intrinsic

from weightcast.format.kernels.compile import kernel

LANES = 64
"""Elements per mask: one bit each in an unsigned 64-bit integer."""

# A configured CPU name asks for code that runs on other machines, too.
_BMI2 = platform.machine() in ("x86_64", "AMD64") and not CPU_NAME and binding.get_host_cpu_features().get("bmi2")

_I8, _I64 = ir.IntType(8), ir.IntType(64)


def _count(emit: Callable[[Any, Any], Any]) -> Any:
    """An instruction that counts bits of a 64-bit word."""

    @intrinsic
    def count(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit(builder, args[0])

        return types.uint64(types.uint64), codegen

    return count


_FALSE = ir.Constant(ir.IntType(1), 0)

popcount = _count(lambda builder, x: builder.ctpop(x))
"""Set bits."""

trailing_zeros = _count(lambda builder, x: builder.cttz(x, _FALSE))
"""Zero bits below the lowest set bit; 64 for zero."""

leading_zeros = _count(lambda builder, x: builder.ctlz(x, _FALSE))
"""Zero bits above the highest set bit; 64 for zero."""


def _pointer_at(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return cgutils.gep_inbounds(builder, data, offset)


@intrinsic
def load_word(typingctx: Any, data: Any, at: Any) -> Any:
    """The eight bytes ``data[at:at + 8]``, little-endian, unaligned, unchecked."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer_at(context, builder, signature.args[0], args[0], args[1])
        word = builder.load(builder.bitcast(pointer, _I64.as_pointer()))
        word.align = 1
        return word

    return types.uint64(data, types.int64), codegen


@intrinsic
def store_word(typingctx: Any, data: Any, at: Any, word: Any) -> Any:
    """Write ``word`` to ``data[at:at + 8]``, little-endian, unaligned, unchecked."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer_at(context, builder, signature.args[0], args[0], args[1])
        builder.store(args[2], builder.bitcast(pointer, _I64.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(data, types.int64, types.uint64), codegen


def _spread(builder: Any, scalar: Any, vector: Any) -> Any:
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def _load_lanes(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    width = array_type.dtype.bitwidth
    pointer = _pointer_at(context, builder, array_type, array, at)
    lanes = builder.load(builder.bitcast(pointer, ir.VectorType(ir.IntType(width), LANES).as_pointer()))
    lanes.align = width // 8
    return lanes


@intrinsic
def range_mask(typingctx: Any, keys: Any, at: Any, low: Any, span: Any) -> Any:
    """Which of ``keys[at:at + 64]`` are in ``low..low + span`` inclusive, one bit each, unchecked."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _load_lanes(context, builder, signature.args[0], args[0], args[1])
        low, span = (_spread(builder, scalar, lanes.type) for scalar in args[2:])
        return builder.bitcast(builder.icmp_unsigned("<=", builder.sub(lanes, low), span), _I64)

    return types.uint64(keys, types.int64, types.uint8, types.uint8), codegen


@intrinsic
def differ_mask(typingctx: Any, old: Any, new: Any, at: Any) -> Any:
    """Which of ``old[at:at + 64]`` and ``new[at:at + 64]`` differ, one bit each, unchecked."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = [_load_lanes(context, builder, signature.args[i], args[i], args[2]) for i in range(2)]
        return builder.bitcast(builder.icmp_unsigned("!=", *lanes), _I64)

    return types.uint64(old, new, types.int64), codegen


@intrinsic
def store_keys(typingctx: Any, bits: Any, at: Any, magnitude: Any, shift: Any, bias: Any, keys: Any) -> Any:
    """For 64 elements: ``keys[at + i] = clamp(((bits[at + i] & magnitude) >> shift) - bias, 0, 255)``, unchecked."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _load_lanes(context, builder, signature.args[0], args[0], args[1])
        lane, small = lanes.type.element, ir.VectorType(_I8, LANES)
        magnitude, shift, bias = (
            _spread(builder, scalar if lane == _I64 else builder.trunc(scalar, lane), lanes.type)
            for scalar in args[2:5]
        )
        most = _spread(builder, ir.Constant(lane, 255), lanes.type)
        exponent = builder.lshr(builder.and_(lanes, magnitude), shift)
        exponent = builder.sub(builder.select(builder.icmp_unsigned(">", exponent, bias), exponent, bias), bias)
        exponent = builder.select(builder.icmp_unsigned("<", exponent, most), exponent, most)
        pointer = _pointer_at(context, builder, signature.args[5], args[5], args[1])
        stored = builder.trunc(exponent, small) if lane != _I8 else exponent
        builder.store(stored, builder.bitcast(pointer, small.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(bits, types.int64, types.uint64, types.uint64, types.uint64, keys), codegen


@intrinsic
def _deposit_at_once(typingctx: Any, bits: Any, mask: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64, _I64])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.bmi.pdep.64"), args)

    return types.uint64(types.uint64, types.uint64), codegen


@kernel
def _deposit_in_loop(bits, mask):
    zero, one = np.uint64(0), np.uint64(1)
    out = zero
    while bits != zero:
        lowest = mask & (~mask + one)
        out |= lowest if bits & one else zero
        mask ^= lowest
        bits >>= one
    return out


deposit = _deposit_at_once if _BMI2 else _deposit_in_loop
"""The low ``bits``, in order, at the positions of the set bits of ``mask``."""
