"""Floats as bits: the exponent of a weight, the step between its neighbours, and how far two of them are apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightcast.format.spec import DTYPES, Dtype
from weightcast.format.tensors import Bits

_BIAS = {
    "F8_E5M2": 15,
    "F8_E4M3": 7,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 16,
    "F16": 15,
    "BF16": 127,
    "F32": 127,
    "F64": 1023,
}
_WITHOUT_INFINITY = ("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
"""Their largest exponent belongs to ordinary numbers, but for one NaN."""


@dataclass(frozen=True)
class FloatLayout:
    """Where sign, exponent and mantissa of a sign-magnitude float are."""

    dtype: Dtype
    mantissa: int
    bias: int

    @property
    def exponents(self) -> int:
        """How many fields of the exponent there are."""
        return 1 << (self.dtype.width - 1 - self.mantissa)

    @property
    def sign(self) -> int:
        """The bit of the sign."""
        return 1 << (self.dtype.width - 1)

    @property
    def numbers(self) -> int:
        """The fields below this one are numbers; the one at it, if there is one, infinities and NaNs."""
        return self.exponents - (self.dtype.name not in _WITHOUT_INFINITY)

    def field(self, bits: Bits) -> npt.NDArray[np.int64]:
        """The field of each weight's exponent: 0 for zeros and denormals."""
        word = bits.dtype.type
        return ((bits >> word(self.mantissa)) & word(self.exponents - 1)).astype(np.int64)

    def smallest(self, field: int) -> float:
        """The smallest magnitude with this field of the exponent: a power of two, or 0."""
        return 0.0 if field == 0 else 2.0 ** (field - self.bias)

    def ulp(self, field: int) -> float:
        """The step from a weight with this field to the next one."""
        return 2.0 ** (max(field, 1) - self.bias - self.mantissa)

    def ordinals(self, bits: Bits) -> npt.NDArray[np.int64]:
        """Each weight's place on the line of all floats, counted from zero; neighbours differ by 1."""
        magnitude = (bits & bits.dtype.type(self.sign - 1)).astype(np.int64)
        return np.where(bits & bits.dtype.type(self.sign), -magnitude, magnitude)


def layout_of(dtype: str) -> FloatLayout | None:
    """The layout of a dtype of floats; None for integers, complex numbers, packed values and bare exponents."""
    kind = DTYPES[dtype]
    if kind.mantissa is None:
        return None
    return FloatLayout(kind, kind.mantissa, _BIAS[dtype])
