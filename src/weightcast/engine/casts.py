"""Casts between a checkpoint's dtype and a parameter's: those that an engine makes, and how to undo them."""

from __future__ import annotations

import numpy as np

from weightcast.format.tensors import Bits, round_to

WIDENED = {("BF16", "F32"), ("F16", "F32")}
ROUNDED = {("F32", "BF16"), ("F32", "F16")}


def can_cast(dtype: str, parameter: str) -> bool:
    """Whether the cast that an engine makes is known exactly."""
    return dtype == parameter or (dtype, parameter) in WIDENED | ROUNDED


def cast(bits: Bits, dtype: str, parameter: str) -> Bits:
    """A tensor's bits, cast to a parameter's dtype."""
    if dtype == parameter:
        return bits
    if (dtype, parameter) == ("BF16", "F32"):
        return bits.astype(np.uint32) << np.uint32(16)
    if (dtype, parameter) == ("F16", "F32"):
        return bits.view(np.float16).astype(np.float32).view(np.uint32)
    return round_to(parameter, bits.view(np.float32))


def cast_back(bits: Bits, dtype: str, parameter: str) -> Bits | None:
    """The tensor's bits from the parameter's; None if the cast rounds, or the parameter's bits are not its result."""
    if dtype == parameter:
        return bits
    if (dtype, parameter) in ROUNDED:
        return None
    back: Bits
    if dtype == "BF16":
        back = (bits >> np.uint32(16)).astype(np.uint16)
    else:
        back = round_to("F16", bits.view(np.float32))
        nan = (bits & np.uint32(0x7FFFFFFF)) > 0x7F800000  # rounding would lose their payload
        back[nan] = bits[nan] >> 16 & 0x8000 | 0x7C00 | bits[nan] >> 13 & 0x3FF
    return back if np.array_equal(cast(back, dtype, parameter), bits) else None
