"""Why so few flip: how often a small update moves a weight to the next float, predicted and compared with what did.

An update moves a weight by s; the float's neighbours are one ulp away, and ulp(w) is between |w|/256 and |w|/128 for
bf16. The model has one parameter, the largest update L: the sizes of updates are spread evenly between 0 and L, as
those of Adam roughly are, below its learning rate. What an update then does depends on where it is added:

- **masters**: weights are kept in higher precision and rounded for publishing. The distance to the next midpoint is
  spread evenly, too, so an update of size s flips with probability min(1, s / ulp).
- **direct**: the weights themselves are rounded after each update. They lie on the grid, so an update flips if it is
  larger than half a step, ulp / 2, and is lost otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from weightcast.analysis.flips import Exponents
from weightcast.analysis.floats import FloatLayout

Kind = Literal["masters", "direct"]
KINDS: tuple[Kind, ...] = ("masters", "direct")

_PER_OCTAVE = 64
"""Values of L that are tried between two powers of two: L is found to within 1 %."""


@dataclass(frozen=True)
class Row:
    """One exponent: how many weights have it, how many flipped, and how many the model says would."""

    field: int
    smallest: float
    """The smallest magnitude with this exponent; the largest is just below twice that."""
    ulp: float
    weights: int
    flips: int
    predicted: float | None
    """None for infinities and NaNs, and where no model was fitted."""


@dataclass(frozen=True)
class Fit:
    """The largest update that explains the flips best, for one kind of training."""

    kind: Kind
    largest: float
    misplaced: float
    """The share of flips that the model puts at another exponent than they were found at, or does not predict."""

    @property
    def mean(self) -> float:
        """The mean size of an update: the effective step."""
        return self.largest / 2


def probability(kind: Kind, largest: float, ulp: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """How often a weight whose neighbours are ``ulp`` away flips under updates of up to ``largest``.

    >>> probability("masters", 1.0, np.array([4.0, 0.5])).tolist()
    [0.125, 0.75]
    >>> probability("direct", 1.0, np.array([4.0, 0.5])).tolist()
    [0.0, 0.75]
    """
    large = 1 - ulp / (2 * largest)
    if kind == "direct":
        return np.maximum(large, 0.0)
    return np.where(ulp >= largest, largest / (2 * ulp), large)


def fits(found: Exponents, layout: FloatLayout) -> tuple[Fit, ...]:
    """The best fit of either kind, the better one first; none if nothing flipped."""
    fields = np.flatnonzero(found.weights[: layout.numbers])
    weights, flips = found.weights[fields].astype(float), found.flips[fields].astype(float)
    if not flips.sum():
        return ()
    ulps = np.array([layout.ulp(int(at)) for at in fields])
    lowest, highest = np.floor(np.log2(ulps.min())) - 12, np.ceil(np.log2(ulps.max())) + 12
    tried = np.exp2(np.arange(lowest, highest, 1 / _PER_OCTAVE))

    def misplaced(kind: Kind) -> list[float]:
        return [
            float(np.abs(weights * probability(kind, largest, ulps) - flips).sum() / flips.sum()) for largest in tried
        ]

    best = []
    for kind in KINDS:
        missed = misplaced(kind)
        at = int(np.argmin(missed))
        best.append(Fit(kind, float(tried[at]), missed[at]))
    return tuple(sorted(best, key=lambda fit: fit.misplaced))


def rows_of(found: Exponents, layout: FloatLayout, fit: Fit | None) -> list[Row]:
    """Every exponent that a weight has, from small to large, with what ``fit`` predicts."""
    rows = []
    for at in np.flatnonzero(found.weights).tolist():
        ulp, weights = layout.ulp(at), int(found.weights[at])
        predicted = None
        if fit is not None and at < layout.numbers:
            predicted = weights * float(probability(fit.kind, fit.largest, np.array([ulp]))[0])
        rows.append(Row(at, layout.smallest(at), ulp, weights, int(found.flips[at]), predicted))
    return rows


def visible_share(rows: Sequence[Row], largest: float) -> float:
    """The share of weights of which half a step is smaller than the largest update: the others cannot flip directly."""
    total = sum(row.weights for row in rows)
    return sum(row.weights for row in rows if row.ulp / 2 < largest) / max(total, 1)
