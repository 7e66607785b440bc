"""The anatomy of a run's deltas: counted, explained and measured in one pass over the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightcast.analysis.flips import Flips, flips_of
from weightcast.analysis.floats import layout_of
from weightcast.analysis.rounding import Fit, Row, fits, rows_of
from weightcast.analysis.sizes import Measuring, Sizes
from weightcast.analysis.steps import Steps
from weightcast.disk.durable import Report, silent
from weightcast.format.spec import TensorTable, elements_of
from weightcast.format.workers import ONE, Workers


@dataclass(frozen=True)
class Explained:
    """The flips of all tensors of one dtype, and for floats what a model of rounding says about them."""

    dtype: str
    flips: Flips
    rows: tuple[Row, ...]
    """By exponent, from small to large; empty for a dtype that is not one of floats."""
    fits: tuple[Fit, ...]
    """The better one first."""


@dataclass(frozen=True)
class Anatomy:
    """What is known of the steps between successive versions."""

    table: TensorTable
    steps: int
    changed: Mapping[str, int]
    """Flips in each tensor, of all steps together."""
    dtypes: tuple[Explained, ...]
    """Those with the most weights first."""
    sizes: Sizes

    @property
    def total(self) -> int:
        return sum(self.changed.values())

    @property
    def density(self) -> float:
        """The share of the model's elements that a step changes, in the mean."""
        return self.total / max(self.table.elements * self.steps, 1)

    @property
    def flips(self) -> tuple[Flips, ...]:
        return tuple(one.flips for one in self.dtypes)


def anatomy_of(steps: Steps, workers: Workers = ONE, report: Report = silent) -> Anatomy:
    """Read every tensor once, with what each step changes of it; memory holds the history of a few at a time."""
    table, done = steps.table, 0
    measuring = Measuring(table, steps.count, workers)
    changed: dict[str, int] = {}
    by_dtype: dict[str, Flips] = {}
    for specs in workers.batches(table, elements_of):
        histories = [steps.history(spec) for spec in specs]
        changed |= zip((spec.name for spec in specs), measuring.add(histories), strict=True)
        for dtype in dict.fromkeys(spec.dtype for spec in specs):
            found = flips_of([history for history in histories if history.spec.dtype == dtype], workers)
            by_dtype[dtype] = by_dtype[dtype] + found if dtype in by_dtype else found
        done += sum(spec.nbytes for spec in specs)
        report("analyze", done, table.nbytes)
    explained = [_explained(dtype, flips) for dtype, flips in by_dtype.items()]
    explained.sort(key=lambda one: (-one.flips.elements, one.dtype))
    return Anatomy(table, steps.count, changed, tuple(explained), measuring.finish())


def _explained(dtype: str, flips: Flips) -> Explained:
    layout = layout_of(dtype)
    if layout is None or flips.exponents is None:
        return Explained(dtype, flips, (), ())
    found = fits(flips.exponents, layout)
    return Explained(dtype, flips, tuple(rows_of(flips.exponents, layout, found)), found)
