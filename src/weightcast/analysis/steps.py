"""Successive states of weights, tensor by tensor: the bits of the first, and what each step overwrites."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weightcast.format.patchfile import PatchReader
from weightcast.format.spec import TensorSpec, TensorTable
from weightcast.format.tensors import Bits, Weights, refuse_other_bits


@dataclass(frozen=True, eq=False)
class Overwrite:
    """What one step writes into a tensor: bits at sorted flat indices, or the whole tensor."""

    indices: npt.NDArray[np.signedinteger] | None
    bits: Bits

    def onto(self, state: Bits) -> None:
        if self.indices is None:
            state[:] = self.bits
        else:
            state[self.indices] = self.bits

    def span(self, first: int, last: int) -> Overwrite:
        """The part of it between two elements, with indices counted from the first."""
        if self.indices is None:
            return Overwrite(None, self.bits[first:last])
        low, high = np.searchsorted(self.indices, (first, last))
        return Overwrite(self.indices[low:high] - self.indices.dtype.type(first), self.bits[low:high])


@dataclass(frozen=True, eq=False)
class History:
    """A tensor at the first version, and the overwrites of each step; None where a step leaves it as it is.

    Memory holds the tensor and what the steps change of it, at most one tensor more for each step.
    """

    spec: TensorSpec
    base: Bits
    steps: Sequence[Overwrite | None]

    def states(self, each: int = 1) -> Iterator[Bits]:
        """The tensor at the first version and after every ``each`` steps, in memory of its own each time."""
        state = self.base.copy()
        yield state
        for begin in range(0, len(self.steps) - each + 1, each):
            state = state.copy()
            for step in self.steps[begin : begin + each]:
                if step is not None:
                    step.onto(state)
            yield state

    def span(self, first: int, last: int) -> npt.NDArray[np.unsignedinteger]:
        """The elements from ``first`` to before ``last`` at every version, one row for each."""
        rows = np.empty((len(self.steps) + 1, last - first), self.base.dtype)
        rows[0] = self.base[first:last]
        for i, step in enumerate(self.steps):
            rows[i + 1] = rows[i]
            if step is not None:
                step.span(first, last).onto(rows[i + 1])
        return rows


class Steps(Protocol):
    """Weights at successive versions."""

    @property
    def table(self) -> TensorTable: ...

    @property
    def count(self) -> int:
        """How many steps there are; versions are one more."""
        ...

    def history(self, spec: TensorSpec) -> History: ...


class Pair:
    """Two states of the weights: one step. Their tables are the same."""

    count = 1

    def __init__(self, old: Weights, new: Weights):
        self.table, self._old, self._new = old.table, old, new

    def history(self, spec: TensorSpec) -> History:
        old, new = self._old.read(spec.name), self._new.read(spec.name)
        refuse_other_bits(spec, old)
        refuse_other_bits(spec, new)
        return History(spec, old, (Overwrite(None, new),))


class Patched:
    """Weights and the patches of successive steps, verified before and kept as `plain` files."""

    def __init__(self, base: Weights, patches: Sequence[PatchReader]):
        self.table, self._base = base.table, base
        self._patches = [(patch, {row.spec.name: row for row in patch.rows}) for patch in patches]

    @property
    def count(self) -> int:
        return len(self._patches)

    def history(self, spec: TensorSpec) -> History:
        steps: list[Overwrite | None] = []
        for patch, rows in self._patches:
            row = rows.get(spec.name)
            streams = patch.coded(row).streams if row is not None else None
            steps.append(None if streams is None else Overwrite(streams.get("indices"), streams["values"]))
        return History(spec, self._base.read(spec.name), steps)
