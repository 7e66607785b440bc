"""Cutting squashes: the difference of two versions as one patch, verified by applying it before it is uploaded.

It takes two copies of the weights per level, the base of the next squash and its result, and no time of the trainer.
The next run continues from the folders that this one leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from weightcast.channel.chain import Chain
from weightcast.channel.edge import Edge
from weightcast.channel.index import write_index
from weightcast.channel.policy import Pinned
from weightcast.channel.route import LEVELS, reachable, squashes_due
from weightcast.disk.apply import write_patch
from weightcast.disk.durable import Report, silent, space_errors
from weightcast.disk.staged import stage
from weightcast.errors import ChannelError, MismatchError, ResultError
from weightcast.follow.mirror import Mirror
from weightcast.follow.replica import Staged, StagedPatch, position_of
from weightcast.follow.subscriber import Subscriber
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import FileSource
from weightcast.format.workers import ONE, Workers


def due(chain: Chain, levels: tuple[int, ...] = LEVELS) -> list[tuple[int, int]]:
    """The squashes to cut now, narrow ones first."""
    head = chain.head()
    if head is None:
        return []
    newest = head.position.version
    edges = chain.edges(None, newest)
    have = {(edge.base, edge.result) for edge in edges if edge.base is not None}
    there = reachable(edges) & {newest, *chain.versions()}
    wanted = squashes_due(min(there, default=0), newest, have, levels)
    return [(base, result) for base, result in wanted if base in there and result in there]


def squash(
    chain: Chain,
    scratch: Path,
    *,
    levels: tuple[int, ...] = LEVELS,
    workers: Workers = ONE,
    report: Report = silent,
) -> Iterator[Edge]:
    """Cut every squash that is due; yield each once it is in the bucket. ``scratch`` keeps the weights."""
    with space_errors(scratch.absolute().parent):
        scratch.mkdir(exist_ok=True)
    chain.refuse_without_signer()
    planned = due(chain, levels)
    for level in levels:
        wanted = [(base, result) for base, result in planned if result - base == level]
        if not wanted:
            continue
        with ExitStack() as opened:
            before, after = (
                opened.enter_context(
                    Subscriber(
                        chain.store,
                        scratch / f"{level}-{name}",
                        threads=workers.threads,
                        fold=False,
                        trust=chain.signing.trust,
                    )
                )
                for name in ("base", "result")
            )
            for base, result in wanted:
                with space_errors(scratch):
                    edge = _cut(chain, before, after, base, result, workers, report)
                yield edge
    if planned:
        write_index(chain)


def _cut(
    chain: Chain,
    before: Subscriber,
    after: Subscriber,
    base: int,
    result: int,
    workers: Workers,
    report: Report,
) -> Edge:
    old, new = sync_to(before, base), sync_to(after, result)
    assert old.weights is not None
    assert new.weights is not None
    assert old.fingerprint is not None
    start, position = position_of(old), chain.manifest(result).position
    made, staged = old.workshop / "squash", old.workshop / "staged" / "squash"
    try:
        write_patch(old.weights, new.weights, made, "banded", workers, report)
        # Verify it: applied to the base, it gives the result, which is the base of the next squash.
        with FileSource(made) as source:
            reached = stage(PatchReader(source), old.weights, old.fingerprint, staged, workers, report)
        if reached.digest != position.digest:
            problem = f"the squash gives {reached.digest[:12]}, but version {result} is {position.digest[:12]}"
            raise ResultError(problem, expected=position.digest, found=reached.digest, hint="Try again.")
        edge = chain.put_squash(base, position, made)
        old.apply(Staged(start, position, reached, (StagedPatch(position, staged),)))
    except MismatchError:
        # Another program changed the folders in scratch. They are repaired when they are used next.
        for mirror in (old, new):
            mirror.examine()
        raise
    finally:
        made.unlink(missing_ok=True)
        staged.unlink(missing_ok=True)
    return edge


def sync_to(subscriber: Subscriber, version: int) -> Mirror:
    """The subscriber's mirror, at ``version``; `ChannelError` if it cannot be reached."""
    subscriber.policy = Pinned(version)
    subscriber.sync()
    if subscriber.position is None or subscriber.position.version != version:
        raise ChannelError(f"version {version} cannot be reached", file=subscriber.chain.store.url)
    return subscriber.mirror
