"""Patches: which elements get which bits, and which weights they lead from and to (SPEC 2)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from weightcast.errors import BaseError, ResultError, UsageError
from weightcast.format.digest import MODULUS, Fingerprint, tensor_digest
from weightcast.format.kernels import cpu
from weightcast.format.spec import TensorSpec, TensorTable
from weightcast.format.tasks import Found
from weightcast.format.tensors import Bits, Target, refuse_other_bits

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TensorPatch:
    """Overwrites of one tensor: sorted flat ``indices``, their ``new`` bits and, if known, their ``old`` bits."""

    spec: TensorSpec
    indices: Indices
    new: Bits
    old: Bits | None
    digest: int
    """Of the whole tensor after the overwrites."""
    _gain: int | None = field(default=None, init=False)
    """What the overwrites add to the tensor's digest, if they came with it; a copy by `replace` does not have it."""

    @property
    def changed(self) -> int:
        return int(self.indices.size)

    def digest_change(self) -> int:
        """What the overwrites add to the tensor's digest."""
        if self._gain is not None:
            return self._gain
        if self.old is None:
            raise UsageError("the old bits are unknown", tensor=self.spec.name, hint="Decode the patch with `old`.")
        return int(cpu.digest_change(self.indices, self.old, self.new))

    def scatter(self, bits: Bits) -> None:
        """Write the new bits. A second time changes nothing."""
        cpu.scatter(bits, self.indices, self.new)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorPatch):
            return NotImplemented
        return (
            (self.spec, self.digest) == (other.spec, other.digest)
            and np.array_equal(self.indices, other.indices)
            and np.array_equal(self.new, other.new)
            and (self.old is None or other.old is None or np.array_equal(self.old, other.old))
        )


def patch_of(spec: TensorSpec, found: Found, digest: int) -> TensorPatch:
    """The changes that a compiled call found, with what it computed from their bits."""
    patch = TensorPatch(spec, found.indices, found.now, found.was, digest)
    object.__setattr__(patch, "_gain", found.gain)
    return patch


@dataclass(frozen=True)
class ModelSize:
    """The size of the whole model that a patch belongs to."""

    tensors: int
    elements: int
    nbytes: int

    @classmethod
    def of(cls, table: TensorTable) -> ModelSize:
        return cls(len(table), table.elements, table.nbytes)


@dataclass(frozen=True)
class Patch:
    """Overwrites that lead from weights with the digest ``base`` to weights with the digest ``result``.

    Without a base it holds every element of every tensor.
    """

    base: str | None
    result: str
    model: ModelSize
    tensors: tuple[TensorPatch, ...]
    """Changed tensors only, in the order of the table."""

    @property
    def changed(self) -> int:
        return sum(tensor.changed for tensor in self.tensors)

    def apply(self, target: Target, fingerprint: Fingerprint) -> Fingerprint:
        """Verify the patch, then overwrite the ``target``; returns the target's new fingerprint.

        ``fingerprint`` is the target's current one, from `weightcast.fingerprint` or the last `apply`. `BaseError` or
        `ResultError`, and nothing is written, if the patch does not lead from it to the stated result. A target that
        is at the result already is left as it is.

        >>> target, new = (wc.Arrays({"w": np.full(4, value, np.float32)}) for value in (0, 1))
        >>> patch, before = wc.diff(target, new), wc.fingerprint(target)
        >>> after = patch.apply(target, before)
        >>> after == wc.fingerprint(target) == wc.fingerprint(new)
        True
        >>> patch.apply(target, wc.Fingerprint(target.table, (7,)))
        Traceback (most recent call last):
        weightcast.errors.BaseError: the weights are at ..., the patch begins at ...
        """
        if not isinstance(target, Target):
            hint = "Use apply_in_place for a checkpoint on disk."
            raise UsageError(f"expected weights in memory, got {type(target).__name__}", hint=hint)
        if target.table != fingerprint.table:
            raise UsageError("the target is not the weights whose fingerprint was given")
        if fingerprint.digest == self.result:
            return fingerprint
        reached = advance(fingerprint, self)
        for tensor in self.tensors:
            bits = target.read(tensor.spec.name)
            refuse_other_bits(tensor.spec, bits)
            if not bits.flags.writeable:
                raise UsageError("the array is read-only", tensor=tensor.spec.name, hint="Pass a copy of it.")
        for tensor in self.tensors:
            target.overwrite(tensor.spec.name, tensor.indices, tensor.new)
        return reached


def advance(fingerprint: Fingerprint, patch: Patch) -> Fingerprint:
    """The fingerprint that ``patch`` leads to from ``fingerprint``, computed from its bits; nothing is written.

    `BaseError` if it begins elsewhere, `ResultError` if it does not lead to the result it states.
    """
    start = start_of_patch(fingerprint, patch.base, {tensor.spec.name for tensor in patch.tensors})
    digests = {tensor.spec.name: verify_tensor(start, patch.base, tensor) for tensor in patch.tensors}
    reached = start.with_digests(digests)
    verify_result(reached, patch.result)
    return reached


def verify_tensor(start: Fingerprint, base: str | None, tensor: TensorPatch) -> int:
    """The tensor's digest after its patch, computed from the bits; `ResultError` if the patch states another."""
    name = tensor.spec.name
    refuse_other_tensor(start.table, tensor.spec)
    found = tensor_digest(tensor.new) if base is None else (start[name] + tensor.digest_change()) % MODULUS
    if found != tensor.digest:
        raise ResultError(
            "the patch does not lead to the tensor digest it states",
            expected=f"{tensor.digest:016x}",
            found=f"{found:016x}",
            tensor=name,
            hint="The patch is damaged: fetch or make it again.",
        )
    return found


def verify_result(reached: Fingerprint, result: str) -> None:
    """`ResultError` unless ``reached`` has the digest that the patch states."""
    if reached.digest != result:
        raise ResultError(
            f"the patch leads to {reached.digest[:12]}, not to its stated result {result[:12]}",
            expected=result,
            found=reached.digest,
            hint="The patch is damaged: fetch or make it again.",
        )


def refuse_other_tensor(table: TensorTable, spec: TensorSpec) -> None:
    """`UsageError` unless the weights have this tensor, with its dtype and shape."""
    if spec.name not in table or table[spec.name] != spec:
        raise UsageError(
            "the patch changes a tensor that the weights do not have, or have with another dtype or shape",
            tensor=spec.name,
            hint="The patch was made for another model.",
        )


def refuse_left_out(table: TensorTable, names: Collection[str]) -> None:
    """`UsageError` unless a patch without a base, which holds every element, has all tensors."""
    for spec in table:
        if spec.elements and spec.name not in names:
            raise UsageError("a patch without a base leaves a tensor out", tensor=spec.name)


def start_of_patch(fingerprint: Fingerprint, base: str | None, names: Collection[str]) -> Fingerprint:
    """The fingerprint that a patch of tensors ``names`` starts from; `BaseError` if the weights are not at ``base``.

    A patch without a base holds every element, so it starts from digests of zero.
    """
    if base is None:
        refuse_left_out(fingerprint.table, names)
        return Fingerprint(fingerprint.table, (0,) * len(fingerprint.table))
    if fingerprint.digest != base:
        raise BaseError(
            f"the weights are at {fingerprint.digest[:12]}, the patch begins at {base[:12]}",
            expected=base,
            found=fingerprint.digest,
            hint="Apply the patches that lead there first, or use a patch that was made from these weights.",
        )
    return fingerprint


def compose(first: Patch, second: Patch) -> Patch:
    """One patch for ``first`` followed by ``second``; elements that return to their old bits are dropped."""
    if first.result != second.base:
        raise UsageError(f"the first patch ends at {first.result[:12]}, the second begins at {str(second.base)[:12]}")
    merged = {tensor.spec.name: tensor for tensor in first.tensors}
    for tensor in second.tensors:
        before = merged.get(tensor.spec.name)
        merged[tensor.spec.name] = tensor if before is None else compose_tensor(before, tensor)
    in_order = sorted(merged.values(), key=lambda tensor: tensor.spec.name.encode())
    return replace(second, base=first.base, tensors=tuple(tensor for tensor in in_order if tensor.changed))


def compose_tensor(first: TensorPatch, second: TensorPatch) -> TensorPatch:
    """`compose` for one tensor; where old bits are unknown, no element drops out."""
    indices = np.union1d(first.indices, second.indices)
    at_first, at_second = (np.searchsorted(indices, patch.indices) for patch in (first, second))
    new = np.empty(indices.size, first.new.dtype)
    new[at_first] = first.new
    new[at_second] = second.new
    if first.old is None or second.old is None:
        return TensorPatch(first.spec, indices, new, None, second.digest)
    old = np.empty_like(new)
    old[at_second] = second.old
    old[at_first] = first.old
    kept = old != new
    return TensorPatch(first.spec, indices[kept], new[kept], old[kept], second.digest)
