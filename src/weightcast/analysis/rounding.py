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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from weightcast.analysis.flips import Exponents
from weightcast.analysis.floats import FloatLayout

Kind = Literal["masters", "direct"]
KINDS: tuple[Kind, ...] = ("masters", "direct")

Verdict = Literal["masters", "direct", "either", "neither"]

POOR = 0.25
"""A model that misplaces more of the flips than this explains nothing."""

_CLEAR, _TIMES = 0.05, 4
"""The worse model must misplace at least this share of the flips, and so many times what the better one does."""

_COARSE, _FINE = 4, 64
"""Values of L between two powers of two that are tried, everywhere, then near the best: it is found within 1 %."""

_LOWEST, _HIGHEST = -1060, 1020
"""Powers of two that are tried: with all smaller and larger ones, F64 ends."""


@dataclass(frozen=True)
class Row:
    """One exponent: how many weights have it, how many flipped, and how many would by each kind of training."""

    field: int
    smallest: float
    """The smallest magnitude with this exponent; the largest is just below twice that."""
    ulp: float
    weights: int
    flips: int
    predicted: Mapping[Kind, float]
    """By the best fit of each kind; nothing for infinities and NaNs, and where nothing flipped."""


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
    with np.errstate(over="ignore"):  # an infinity is as unlikely to be crossed as any large number
        steps = ulp / largest
    if kind == "direct":
        return np.maximum(1 - steps / 2, 0.0)
    return np.where(steps >= 1, 0.5 / np.maximum(steps, 1.0), 1 - steps / 2)


def fits(found: Exponents, layout: FloatLayout) -> tuple[Fit, ...]:
    """The best fit of either kind, the better one first; none if nothing flipped."""
    fields = np.flatnonzero(found.weights[: layout.numbers])
    weights, flips = found.weights[fields].astype(float), found.flips[fields].astype(float)
    if not flips.sum():
        return ()
    ulps = np.array([layout.ulp(int(at)) for at in fields])
    around = np.log2(ulps[flips > 0])
    ends = max(np.floor(around.min()) - 12, _LOWEST), min(np.ceil(around.max()) + 12, _HIGHEST)

    def misplaced(kind: Kind, largest: float) -> float:
        return float(np.abs(weights * probability(kind, largest, ulps) - flips).sum() / flips.sum())

    def best(kind: Kind) -> Fit:
        at = _least(lambda power: misplaced(kind, 2.0**power), *ends, _COARSE)
        at = _least(lambda power: misplaced(kind, 2.0**power), at - 1 / _COARSE, at + 1 / _COARSE, _FINE)
        return Fit(kind, 2.0**at, misplaced(kind, 2.0**at))

    return tuple(sorted(map(best, KINDS), key=lambda fit: fit.misplaced))


def _least(cost: Callable[[float], float], first: float, last: float, each: int) -> float:
    """Where the cost is least, of so many values between two whole numbers."""
    return min((first + i / each for i in range(round((last - first) * each) + 1)), key=cost)


def verdict(explained: Sequence[Fit]) -> Verdict | None:
    """Which kind of training the flips look like; either, where updates are so large that most of them flip anyway."""
    if not explained:
        return None
    best, other = explained
    if best.misplaced > POOR:
        return "neither"
    return best.kind if other.misplaced > max(_CLEAR, _TIMES * best.misplaced) else "either"


def rows_of(found: Exponents, layout: FloatLayout, explained: Sequence[Fit]) -> list[Row]:
    """Every exponent that a weight has, from small to large, with what each fit predicts."""
    rows = []
    for at in np.flatnonzero(found.weights).tolist():
        ulp, weights = layout.ulp(at), int(found.weights[at])
        predicted = {
            fit.kind: weights * float(probability(fit.kind, fit.largest, np.array([ulp]))[0])
            for fit in explained
            if at < layout.numbers
        }
        rows.append(Row(at, layout.smallest(at), ulp, weights, int(found.flips[at]), predicted))
    return rows


def visible_share(rows: Sequence[Row], largest: float) -> float:
    """The share of weights of which half a step is smaller than the largest update: the others cannot flip directly."""
    total = sum(row.weights for row in rows)
    return sum(row.weights for row in rows if row.ulp / 2 < largest) / max(total, 1)
