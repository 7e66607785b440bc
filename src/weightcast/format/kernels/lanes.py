"""The few machine instructions the kernels need and Python has no word for.

Each is written as portable LLVM vector code, so every CPU gets its own best instructions.
"""

import platform
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.core.config import CPU_NAME  # type: ignore[attr-defined]
from numba.extending import intrinsic

LANES = 64
"""Elements per mask: one bit each in an unsigned 64-bit integer."""

# A set CPU name means code for another machine than this one.
_BMI2 = platform.machine() in ("x86_64", "AMD64") and not CPU_NAME and binding.get_host_cpu_features().get("bmi2")

_I8, _I64 = ir.IntType(8), ir.IntType(64)


@intrinsic
def popcount(typingctx: Any, x: Any) -> Any:
    """Set bits of ``x``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), codegen


@intrinsic
def trailing_zeros(typingctx: Any, x: Any) -> Any:
    """Zero bits below the lowest set bit of ``x``; 64 for zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), codegen


@intrinsic
def leading_zeros(typingctx: Any, x: Any) -> Any:
    """Zero bits above the highest set bit of ``x``; 64 for zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), codegen


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
    """Which of ``keys[at:at + 64]`` lie in ``low..low + span`` inclusive, one bit each, unchecked."""

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
def deposit(typingctx: Any, bits: Any, mask: Any) -> Any:
    """The low ``bits``, in order, at the places that ``mask`` has set."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _BMI2:
            pdep = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_I64, [_I64, _I64]), "llvm.x86.bmi.pdep.64"
            )
            return builder.call(pdep, args)
        return _deposit_in_loop(builder, *args)

    return types.uint64(types.uint64, types.uint64), codegen


def _deposit_in_loop(builder: Any, bits: Any, mask: Any) -> Any:
    """One turn per place until no bit is left."""
    zero, one = ir.Constant(_I64, 0), ir.Constant(_I64, 1)
    left, places, out = (cgutils.alloca_once_value(builder, value) for value in (bits, mask, zero))
    test, turn, done = (builder.append_basic_block(name) for name in ("test", "turn", "done"))
    builder.branch(test)
    builder.position_at_end(test)
    builder.cbranch(builder.icmp_unsigned("!=", builder.load(left), zero), turn, done)
    builder.position_at_end(turn)
    now, at = builder.load(left), builder.load(places)
    lowest = builder.and_(at, builder.neg(at))
    taken = builder.select(builder.trunc(now, ir.IntType(1)), lowest, zero)
    builder.store(builder.or_(builder.load(out), taken), out)
    builder.store(builder.xor(at, lowest), places)
    builder.store(builder.lshr(now, one), left)
    builder.branch(test)
    builder.position_at_end(done)
    return builder.load(out)
