"""The last versions of a channel as successive steps: fetched and verified like any follower's, kept on disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from weightcast.analysis.steps import Patched
from weightcast.channel.chain import Chain
from weightcast.channel.policy import Pinned
from weightcast.channel.records import Manifest
from weightcast.channel.route import reachable
from weightcast.disk.apply import write_patch
from weightcast.disk.checkpoint import MIRROR, Checkpoint
from weightcast.disk.durable import Report, disk_errors, silent
from weightcast.disk.staged import Overlay
from weightcast.errors import ChannelError
from weightcast.follow.replica import Staged, opened_patches
from weightcast.follow.subscriber import Subscriber
from weightcast.format.workers import ONE, Workers
from weightcast.upkeep.squash import sync_to

MOST_TOGETHER = 1 << 19
"""Tensors times steps: each takes some kilobytes while it is measured."""


@dataclass(frozen=True)
class Read:
    """What was read of a channel."""

    steps: Patched
    manifests: tuple[Manifest, ...]
    """Of the versions that the steps lead to; the first one leads on from the version before it."""

    @property
    def first(self) -> int:
        """The version before the first step."""
        return self.manifests[0].position.version - 1


def last_versions(chain: Chain, most: int) -> range:
    """The versions that up to ``most`` steps before the head lead to, fewer where there are many tensors;
    `ChannelError` if there is none.
    """
    most = min(most, max(1, MOST_TOGETHER // max(len(chain.channel.table), 1)))
    head = chain.head()
    newest = -1 if head is None else head.position.version
    there = reachable(chain.edges(None, newest)) & {newest, *chain.versions()} if head is not None else set()
    first = newest
    while first in there and first - 1 in there and newest - first < most:
        first -= 1
    if first >= newest:
        problem = "the channel has no two successive versions that can be reached"
        hint = "Publish another one; or name two checkpoints: `weightcast analyze OLD NEW`."
        raise ChannelError(problem, file=chain.store.url, hint=hint)
    return range(first + 1, newest + 1)


@contextmanager
def read_steps(
    chain: Chain, versions: range, scratch: Path, workers: Workers = ONE, report: Report = silent
) -> Iterator[Read]:
    """The steps that lead to ``versions``. ``scratch`` is an empty folder; it will hold two copies of the weights, and
    what each step overwrites.
    """
    first = versions[0] - 1
    manifests = tuple(chain.manifest(version) for version in versions)
    with disk_errors(scratch), ExitStack() as opened:
        with _subscriber(chain, scratch / "first", workers, report) as subscriber:
            sync_to(subscriber, first)
            subscriber.fold()
        shutil.copytree(scratch / "first", scratch / "last", ignore=shutil.ignore_patterns(MIRROR))
        paths = [scratch / f"{version}.safetensors" for version in versions]
        with _subscriber(chain, scratch / "last", workers, report) as subscriber:
            sync_to(subscriber, first)
            for version, path in zip(versions, paths, strict=True):
                _step(subscriber, version, path, workers)
                report("fetch", version - first, len(versions))
        aliases = dict(chain.channel.table.aliases)
        base = opened.enter_context(Checkpoint(scratch / "first", aliases=aliases))
        patches = opened.enter_context(opened_patches(paths))
        yield Read(Patched(base, patches), manifests)


def _subscriber(chain: Chain, folder: Path, workers: Workers, report: Report) -> Subscriber:
    return Subscriber(chain.store, folder, threads=workers.threads, report=report, trust=chain.signing.trust)


def _step(subscriber: Subscriber, version: int, out: Path, workers: Workers) -> None:
    """Go to the next version, and keep what that overwrites."""
    subscriber.policy = Pinned(version)
    staged = subscriber.poll()
    if staged is None or staged.position.version != version:
        raise ChannelError(f"version {version} cannot be reached", file=subscriber.chain.store.url)
    _keep(subscriber, staged, out, workers)
    subscriber.apply(staged)


def _keep(subscriber: Subscriber, staged: Staged, out: Path, workers: Workers) -> None:
    if staged.anchor is None and len(staged.patches) == 1:
        shutil.copyfile(staged.patches[0].path, out)
        return
    old = subscriber.weights
    assert old is not None, "a mirror at a version holds weights"
    with ExitStack() as opened:
        under = old
        if staged.anchor is not None:
            aliases = dict(old.table.aliases)
            under = opened.enter_context(Checkpoint(staged.anchor.folder, aliases=aliases))
        layers = opened.enter_context(opened_patches(patch.path for patch in staged.patches))
        write_patch(old, Overlay(under, layers), out, "plain", workers)
