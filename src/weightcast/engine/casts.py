"""Parameters whose dtype differs from the checkpoint's: which casts an engine makes, and how to undo them."""

from __future__ import annotations

import numpy as np

from weightcast.format.tensors import Bits, round_to

WIDENED = {("BF16", "F32"), ("F16", "F32")}
ROUNDED = {("F32", "BF16"), ("F32", "F16")}


def can_cast(dtype: str, parameter: str) -> bool:
    """Whether we know how an engine turns a tensor's values into a parameter's."""
    return dtype == parameter or (dtype, parameter) in WIDENED | ROUNDED


def cast(bits: Bits, dtype: str, parameter: str) -> Bits:
    """A tensor's bits as a parameter of another dtype has them."""
    if dtype == parameter:
        return bits
    if (dtype, parameter) == ("BF16", "F32"):
        return bits.astype(np.uint32) << np.uint32(16)
    if (dtype, parameter) == ("F16", "F32"):
        return bits.view(np.float16).astype(np.float32).view(np.uint32)
    return round_to(parameter, bits.view(np.float32))


def cast_back(bits: Bits, dtype: str, parameter: str) -> Bits | None:
    """The tensor's bits from the parameter's; None if those are no cast of any, or the cast had rounded them."""
    if dtype == parameter:
        return bits
    if (dtype, parameter) in ROUNDED:
        return None
    back: Bits
    if dtype == "BF16":
        back = (bits >> np.uint32(16)).astype(np.uint16)
    else:
        back = round_to("F16", bits.view(np.float32))
        nan = (bits & np.uint32(0x7FFFFFFF)) > 0x7F800000  # rounding makes all of them one
        back[nan] = bits[nan] >> 16 & 0x8000 | 0x7C00 | bits[nan] >> 13 & 0x3FF
    return back if np.array_equal(cast(back, dtype, parameter), bits) else None
