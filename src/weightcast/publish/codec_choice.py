"""Which codec brings versions to their readers sooner: from what was measured, for ``codec="auto"``.

A version arrives once it is encoded, uploaded, downloaded and decoded. The writer measures the first two and takes the
readers to be as fast: their link as its own, and decoding as encoding. For that `banded` has to rank changes among all
old weights, which the writer does while it scans; how long it takes is measured once, on a sample. `gap` costs more
bytes and less time; so below some rate of the link `banded` arrives sooner, above it `gap`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np

from weightcast.format.codec import CodecName, check_codec
from weightcast.format.codec.ranks import rank_tensors
from weightcast.format.spec import TensorSpec
from weightcast.format.tensors import Weights
from weightcast.format.workers import Workers

CodecChoice = CodecName | Literal["auto"]
"""A codec, or "auto" for the one of `gap` and `banded` with which versions arrive sooner."""

_AGAIN = 64
"""Versions after which the codec that is not in use is measured again."""

_WEIGHT = 0.25
"""Of the last measurement in the mean."""

_SAMPLE, _SPARSE = 1 << 24, 100
"""Elements to rank at most, of which one in so many changes."""


@dataclass(frozen=True)
class Cost:
    """What encoding costs with one codec, for each changed element."""

    nbytes: float
    seconds: float

    def mean(self, last: Cost) -> Cost:
        return Cost(_mean(self.nbytes, last.nbytes), _mean(self.seconds, last.seconds))


@dataclass(frozen=True)
class Rates:
    """What a publisher has measured so far."""

    banded: Cost | None = None
    gap: Cost | None = None
    link: float | None = None
    """Bytes per second to the bucket, the time of the requests included."""
    ranking: float = 0.0
    """Seconds for each version to rank changes among all old weights: a reader of `banded` has to."""
    encoded: int = 0
    """Versions."""

    def after_encoding(self, codec: CodecName, changed: int, nbytes: int, seconds: float) -> Rates:
        if codec == "plain" or not changed:
            return self
        last = Cost(nbytes / changed, seconds / changed)
        before = self.banded if codec == "banded" else self.gap
        cost = before.mean(last) if before else last
        counted = replace(self, encoded=self.encoded + 1)
        return replace(counted, banded=cost) if codec == "banded" else replace(counted, gap=cost)

    def after_upload(self, nbytes: int, seconds: float) -> Rates:
        rate = nbytes / max(seconds, 1e-9)
        return replace(self, link=_mean(self.link or rate, rate))


def _mean(before: float, last: float) -> float:
    return (1 - _WEIGHT) * before + _WEIGHT * last


def break_even(banded: Cost, gap: Cost, ranking: float, changed: int) -> float:
    """The bytes per second of a link, up and down alike, below which `banded` arrives sooner than `gap`.

    >>> round(break_even(Cost(0.9, 2e-8), Cost(1.2, 1e-8), 0.1, 1_000_000))
    5000000
    """
    saved = 2 * changed * (gap.nbytes - banded.nbytes)
    extra = 2 * changed * (banded.seconds - gap.seconds) + ranking
    if saved <= 0:
        return 0.0
    return saved / extra if extra > 0 else float("inf")


def sooner(rates: Rates, changed: int) -> CodecName:
    """The codec for a version with so many changes. Each is tried once, and again now and then, to measure it."""
    if rates.banded is None or rates.gap is None or rates.link is None:
        return "gap" if rates.gap is None and rates.banded is not None else "banded"
    better: CodecName = "banded" if rates.link < break_even(rates.banded, rates.gap, rates.ranking, changed) else "gap"
    if rates.encoded % _AGAIN == _AGAIN - 1:
        return "gap" if better == "banded" else "banded"
    return better


def ranking_seconds(weights: Weights, workers: Workers) -> float:
    """Seconds that ranking changes in all of the weights takes, from a sample of their largest tensor."""
    largest = max(weights.table, key=lambda spec: spec.elements, default=None)
    if largest is None or not largest.elements:
        return 0.0
    old = weights.read(largest.name).reshape(-1)[:_SAMPLE].copy()
    spec = TensorSpec(largest.name, largest.dtype if largest.kind.per_value >= 8 else "U8", old.shape)
    indices = np.arange(0, old.size, _SPARSE, dtype=np.int64)
    change = indices, old[indices], old[indices] ^ old.dtype.type(1)
    seconds = float("inf")
    for _ in range(2):  # the first one loads the kernel
        began = time.perf_counter()
        rank_tensors([spec], [change], [old], workers)
        seconds = min(seconds, time.perf_counter() - began)
    return seconds * weights.table.elements / old.size


class Chooser:
    """Keeps a publisher's rates for its threads, and answers with a codec."""

    def __init__(self, choice: str):
        """`UsageError` for what is neither a codec nor "auto"."""
        self.is_auto = choice == "auto"
        self.prepared: CodecName = "banded" if self.is_auto else check_codec(choice)
        """What changes are prepared for: that can be written as `gap`, too."""
        self.rates = Rates()
        self._guard = threading.Lock()

    def codec(self, changed: int) -> CodecName:
        """The codec that is wanted for a version."""
        return sooner(self.rates, changed) if self.is_auto else self.prepared

    def learn(self, after: Callable[[Rates], Rates]) -> None:
        """Take in what was measured."""
        with self._guard:
            self.rates = after(self.rates)


def check_choice(choice: str) -> CodecChoice:
    """A codec or "auto"; `UsageError` for anything else."""
    Chooser(choice)
    return cast(CodecChoice, choice)
