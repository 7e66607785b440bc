"""Two versions of a channel, compared bit by bit and tensor by tensor."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weightcast.channel.chain import Chain
from weightcast.disk.checkpoint import MIRROR
from weightcast.disk.durable import Report, disk_errors, silent
from weightcast.follow.subscriber import Subscriber
from weightcast.format.spec import TensorSpec, elements_of
from weightcast.format.tensors import Bits, Weights
from weightcast.format.workers import ONE, Workers
from weightcast.upkeep.squash import sync_to


@dataclass(frozen=True)
class Change:
    """How many elements of a tensor differ."""

    spec: TensorSpec
    changed: int


def compare(
    chain: Chain, one: int, other: int, scratch: Path, workers: Workers = ONE, report: Report = silent
) -> Iterator[Change]:
    """Every tensor of the table, with the number of elements whose bits differ between two versions.

    ``scratch`` is an empty folder; it will hold two copies of the weights. The later version is made from the earlier
    one, so only what lies between them is fetched for it. Memory holds a few tensors at a time.
    """
    first, last = sorted((one, other))
    with disk_errors(scratch), ExitStack() as opened:
        before = _bring(chain, scratch / "first", first, workers, report, opened)
        shutil.copytree(scratch / "first", scratch / "last", ignore=shutil.ignore_patterns(MIRROR))
        after = _bring(chain, scratch / "last", last, workers, report, opened)
        done, total = 0, chain.channel.table.nbytes

        def changed(spec: TensorSpec) -> int:
            return _differing(before.read(spec.name), after.read(spec.name))

        table = chain.channel.table
        for spec, number in zip(table, workers.stream(changed, table, elements_of), strict=True):
            done += spec.nbytes
            report("compare", done, total)
            yield Change(spec, number)


_SPAN = 1 << 20
"""Elements that are compared at once, so that a large tensor needs no mask as large as itself."""


def _differing(old: Bits, new: Bits) -> int:
    spans = (slice(first, first + _SPAN) for first in range(0, old.size, _SPAN))
    return sum(int(np.count_nonzero(old[span] != new[span])) for span in spans)


def _bring(chain: Chain, folder: Path, version: int, workers: Workers, report: Report, opened: ExitStack) -> Weights:
    """A mirror at a version, with its files folded."""
    subscriber = opened.enter_context(
        Subscriber(chain.store, folder, threads=workers.threads, report=report, trust=chain.signing.trust)
    )
    mirror = sync_to(subscriber, version)
    subscriber.fold()
    assert mirror.weights is not None, "a mirror at a version holds weights"
    return mirror.weights
