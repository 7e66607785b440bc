"""Names, dtypes and shapes: the tensors of a model without their bits (SPEC 2).

An *element* is the unit that patches address: one value, or one byte of a packed dtype. Nothing here imports numpy, so
that reading a channel's records does not, either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from weightcast.errors import UsageError, VersionError

if TYPE_CHECKING:
    import numpy as np

MAX_RANK = 64
MAX_ELEMENTS = 1 << 48
"""Limits on a shape that comes from outside."""


@dataclass(frozen=True)
class Dtype:
    """A safetensors dtype as bits: ``width`` of an element; ``mantissa`` bits of a sign-magnitude float, else None."""

    name: str
    width: int
    mantissa: int | None
    per_value: int
    """Bits of one value; below 8 for packed dtypes, whose elements are bytes."""

    @cached_property
    def word(self) -> np.dtype[Any]:
        """Unsigned little-endian integer of an element's width."""
        import numpy as np

        return np.dtype(f"<u{self.width // 8}")


def _dtype(name: str, bits: int, mantissa: int | None = None) -> tuple[str, Dtype]:
    return name, Dtype(name, max(bits, 8), mantissa, bits)


DTYPES: Mapping[str, Dtype] = dict(
    [
        _dtype("BOOL", 8),
        _dtype("F4", 4),
        _dtype("F6_E2M3", 6),
        _dtype("F6_E3M2", 6),
        _dtype("U8", 8),
        _dtype("I8", 8),
        _dtype("F8_E5M2", 8, 2),
        _dtype("F8_E4M3", 8, 3),
        _dtype("F8_E8M0", 8),
        _dtype("F8_E4M3FNUZ", 8, 3),
        _dtype("F8_E5M2FNUZ", 8, 2),
        _dtype("I16", 16),
        _dtype("U16", 16),
        _dtype("F16", 16, 10),
        _dtype("BF16", 16, 7),
        _dtype("I32", 32),
        _dtype("U32", 32),
        _dtype("F32", 32, 23),
        _dtype("C64", 64),
        _dtype("F64", 64, 52),
        _dtype("I64", 64),
        _dtype("U64", 64),
    ]
)


def dtype_named(name: str) -> Dtype:
    """The dtype of that safetensors name; `VersionError` if there is none."""
    try:
        return DTYPES[name]
    except (KeyError, TypeError):
        raise VersionError(f"unknown dtype {name!r}", hint=f"This release knows {', '.join(DTYPES)}.") from None


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor of the checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def kind(self) -> Dtype:
        return dtype_named(self.dtype)

    @cached_property
    def elements(self) -> int:
        """Addressable elements: values, or bytes where values are packed."""
        return self.nbytes * 8 // self.kind.width

    @cached_property
    def nbytes(self) -> int:
        bits = math.prod(self.shape) * self.kind.per_value
        if bits % 8:
            problem = f"{self.dtype} values of shape {list(self.shape)} do not fill whole bytes"
            raise UsageError(problem, tensor=self.name)
        return bits // 8


def elements_of(spec: TensorSpec) -> int:
    return spec.elements


@dataclass(frozen=True)
class TensorTable:
    """The tensors of a model, sorted by the bytes of their names, and the other names of tied ones."""

    specs: tuple[TensorSpec, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    """(alias, name) pairs, sorted; an alias has no bits of its own."""

    @classmethod
    def of(cls, specs: Iterable[TensorSpec], aliases: Mapping[str, str] | None = None) -> TensorTable:
        """Sort and check; `UsageError` for a duplicate name, or an alias of a tensor that does not exist."""
        ordered = tuple(sorted(specs, key=lambda spec: spec.name.encode()))
        names = {spec.name for spec in ordered}
        if len(names) != len(ordered):
            twice = next(a.name for a, b in pairwise(ordered) if a.name == b.name)
            raise UsageError("two tensors have the same name", tensor=twice)
        pairs = tuple(sorted((aliases or {}).items(), key=lambda pair: pair[0].encode()))
        for alias, name in pairs:
            if alias in names or name not in names:
                problem = f"alias {alias!r} is a tensor" if alias in names else f"alias {alias!r} of an unknown tensor"
                raise UsageError(problem, tensor=name)
        return cls(ordered, pairs)

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    @cached_property
    def _ordinals(self) -> dict[str, int]:
        return {spec.name: i for i, spec in enumerate(self.specs)}

    def ordinal(self, name: str) -> int:
        """The index of ``name`` in the table; `KeyError` if it is not there."""
        return self._ordinals[name]

    def __contains__(self, name: object) -> bool:
        return name in self._ordinals

    def __getitem__(self, name: str) -> TensorSpec:
        return self.specs[self._ordinals[name]]

    @property
    def elements(self) -> int:
        return sum(spec.elements for spec in self.specs)

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)
