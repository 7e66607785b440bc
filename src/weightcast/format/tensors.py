"""Any tensor as unsigned integers: the weights of a model in memory, and rounding to the wire dtype (SPEC 2, 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt

from weightcast.errors import UsageError, about
from weightcast.format.kernels import cpu
from weightcast.format.spec import TensorSpec, TensorTable, dtype_named
from weightcast.format.workers import Workers

if TYPE_CHECKING:
    import torch

Bits = npt.NDArray[np.unsignedinteger[Any]]
"""A flat array of unsigned integers, one per element."""


def is_module(weights: object) -> TypeGuard[torch.nn.Module]:
    """Whether this is a torch module; torch is not imported, since it may not be installed."""
    return hasattr(weights, "named_parameters")


def refuse_no_weights(weights: object) -> None:
    """`UsageError` for an object that is not `Weights`, such as a plain dictionary of arrays."""
    if not hasattr(weights, "table") or not hasattr(weights, "read"):
        hint = "Wrap arrays as wc.Arrays({name: array}), bfloat16 ones as uint16 with dtypes={name: 'BF16'}."
        raise UsageError(
            f"expected weights (wc.Arrays, a folder or a torch module), got {type(weights).__name__}", hint=hint
        )


def bits_of(array: npt.NDArray[Any]) -> Bits:
    """A contiguous array's own memory as flat unsigned integers; nothing is copied."""
    if not array.flags.c_contiguous:
        hint = "Pass a contiguous copy and keep it: patches are written into it."
        raise UsageError("the array is not contiguous", hint=hint)
    if array.dtype.hasobject or array.dtype.itemsize not in (1, 2, 4, 8) or not array.dtype.isnative:
        raise UsageError(f"arrays of {array.dtype!r} are not supported")
    return array.reshape(-1).view(f"<u{array.dtype.itemsize}")


def refuse_other_bits(spec: TensorSpec, bits: Bits) -> None:
    """`UsageError` unless ``bits`` can be this tensor's: kernels see only the first address and the size."""
    if bits.dtype != spec.kind.word or bits.shape != (spec.elements,) or not bits.flags.c_contiguous:
        found = f"{bits.dtype} of shape {list(bits.shape)}"
        raise UsageError(f"expected {spec.elements} contiguous {spec.kind.word}, got {found}", tensor=spec.name)


NARROW = {"BF16": (7, 8), "F16": (10, 5)}
"""The dtypes that float32 can be rounded to: bits of the mantissa and of the exponent."""


def round_to(dtype: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """fp32 as the bits of BF16 or F16: to nearest, ties to even, overflow to infinity, one canonical NaN (SPEC 3)."""
    if dtype not in NARROW or values.dtype != np.float32:
        raise UsageError(f"only float32 can be rounded, to BF16 or F16; got {values.dtype} and {dtype}")
    out = np.empty(values.size, np.uint16)
    cpu.narrow(bits_of(values), *NARROW[dtype], out)
    return out.reshape(values.shape)


class Weights(Protocol):
    """The bits of every tensor of a table: arrays in memory, a checkpoint on disk, a model on a GPU."""

    @property
    def table(self) -> TensorTable: ...

    def read(self, name: str) -> Bits:
        """A tensor's bits, flat and contiguous; callers do not write to them."""
        ...


@runtime_checkable
class Target(Weights, Protocol):
    """Weights in memory that a patch can be applied to."""

    def overwrite(self, name: str, indices: npt.NDArray[np.int64], new: Bits) -> None:
        """Set the elements at ``indices``, all within the tensor, to their ``new`` bits."""
        ...

    def write(self, name: str, bits: Bits) -> None:
        """Replace all of a tensor's bits."""
        ...


@runtime_checkable
class InSpans(Protocol):
    """Weights that can be read in pieces: reading a file whole spends most of its time on fresh memory."""

    def read_span(self, name: str, first: int, out: Bits) -> None:
        """Fill ``out`` with a tensor's bits from element ``first`` on."""
        ...


def read_all(weights: Weights, names: Sequence[str], workers: Workers) -> list[Bits]:
    """Some tensors' bits; unless they are in memory already, several threads read them."""
    if isinstance(weights, Target):
        return [weights.read(name) for name in names]
    return workers.map(weights.read, names)


DTYPE_NAMES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    **{f"{kind}{width}": f"{kind[0].upper()}{width}" for kind in ("int", "uint") for width in (8, 16, 32, 64)},
    **{f"float{width}": f"F{width}" for width in (16, 32, 64)},
}
"""From numpy's and torch's names of dtypes to the format's. No packed dtypes: numpy and torch count their values
differently."""


class _InMemory:
    """Weights as flat bits by name."""

    def __init__(self, table: TensorTable, bits: dict[str, Bits]):
        self.table = table
        self._bits = bits

    def read(self, name: str) -> Bits:
        return self._bits[name]

    def overwrite(self, name: str, indices: npt.NDArray[np.int64], new: Bits) -> None:
        cpu.scatter(self._bits[name], indices, new)

    def write(self, name: str, bits: Bits) -> None:
        self._bits[name][:] = bits


class Copies(_InMemory):
    """Weights of any dtype in memory of their own, as flat bits."""

    @classmethod
    def of(cls, weights: Weights) -> Copies:
        return cls(weights.table, {spec.name: weights.read(spec.name).copy() for spec in weights.table})


class Arrays(_InMemory):
    """Weights in memory, by name. The arrays are used in place: applying a patch writes into them.

    numpy has no bfloat16 of its own: pass bit patterns as ``uint16`` and name their dtype in ``dtypes``.

    >>> weights = wc.Arrays({"w": np.ones((2, 3), np.float32), "b": np.zeros(3, np.uint16)}, dtypes={"b": "BF16"})
    >>> [(spec.name, spec.dtype, spec.shape) for spec in weights.table]
    [('b', 'BF16', (3,)), ('w', 'F32', (2, 3))]
    >>> hex(weights.read("w")[0])
    '0x3f800000'
    """

    def __init__(
        self,
        arrays: Mapping[str, npt.NDArray[Any]],
        dtypes: Mapping[str, str] | None = None,
        aliases: Mapping[str, str] | None = None,
    ):
        """``aliases`` gives tied tensors their other names: alias to name."""
        dtypes = dtypes or {}
        for name in dtypes.keys() - arrays.keys():
            raise UsageError("a dtype is given for an array that does not exist", tensor=name)
        specs = []
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray):
                hint = "A torch tensor has .numpy(); view bfloat16 as uint16 first and name it in dtypes."
                raise UsageError(f"expected a numpy array, got {type(array).__name__}", tensor=name, hint=hint)
            dtype = dtypes.get(name) or DTYPE_NAMES.get(array.dtype.name)
            if dtype is None or dtype_named(dtype).per_value != 8 * array.dtype.itemsize:
                raise UsageError(f"an array of {array.dtype} cannot hold {dtype or 'any known dtype'}", tensor=name)
            specs.append(TensorSpec(name, dtype, array.shape))
        super().__init__(TensorTable.of(specs, aliases), {})
        for name, array in arrays.items():
            with about(tensor=name):
                self._bits[name] = bits_of(array)

    @classmethod
    def copy_of(cls, weights: Weights) -> Arrays:
        """The same weights in arrays of their own; `UsageError` for packed dtypes."""
        table = weights.table
        arrays = {}
        for spec in table:
            if spec.kind.per_value < 8:
                raise UsageError(f"{spec.dtype} cannot be held in an array of its shape", tensor=spec.name)
            arrays[spec.name] = weights.read(spec.name).copy().reshape(spec.shape)
        return cls(arrays, {spec.name: spec.dtype for spec in table}, dict(table.aliases))
