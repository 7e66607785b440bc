"""Import: the steps of another system's folder become versions of a channel, in order, each with its step.

What is there already is compared by its digest, and what is missing is added behind it: an import that was interrupted,
or one of a folder that has grown, is the same as any other. A step that is refused changes nothing; those before it are
in the channel, as exact as they would be without it.
"""

from __future__ import annotations

import filecmp
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from weightcast.channel.chain import Chain
from weightcast.channel.records import Manifest
from weightcast.channel.trust import NO_SIGNING, Signing
from weightcast.disk.companions import is_weights
from weightcast.disk.durable import Report, silent, space_errors
from weightcast.disk.staged import fingerprint_of
from weightcast.errors import ResultError, UsageError, about
from weightcast.follow.mirror_folder import MirrorFolder, default_mirror
from weightcast.follow.mirror_trust import trust_in
from weightcast.follow.subscriber import Subscriber
from weightcast.format.codec import check_codec
from weightcast.format.workers import ONE, Workers
from weightcast.interop.committed import committed
from weightcast.interop.step import Source, Step
from weightcast.publish.from_checkpoint import publish_next
from weightcast.publish.open import announce, channel_in, commit_anchor, new_writer, open_for_writing
from weightcast.store.base import Store


@dataclass(frozen=True)
class Imported:
    """A step that is in the channel."""

    step: int
    name: str
    manifest: Manifest | None
    """Its version; None if the channel's oldest versions were collected, and this with them."""
    new: bool
    nbytes: int = 0
    """Uploaded for it."""
    other_files: tuple[str, ...] = ()
    """Small files that are not as in the channel's first step: versions have weights alone."""


def import_steps(
    store: Store,
    source: Source,
    room: Path,
    mirror: Path | None = None,
    *,
    codec: str = "banded",
    writer: str | None = None,
    workers: Workers = ONE,
    report: Report = silent,
    signing: Signing = NO_SIGNING,
) -> Iterator[Imported]:
    """Bring all steps of a folder into a channel, which is begun where there is none; yields each as it is there.

    ``mirror`` is a folder that holds the head, to compare with; in the user's cache by default. ``room`` is an empty
    folder for one more copy of the weights.
    """
    check_codec(codec)
    writer = writer or new_writer()
    seen = (
        trust_in(MirrorFolder(mirror), signing.trust)[1] if mirror is not None and signing.trust is not None else None
    )
    chain = channel_in(store, signing, seen)
    known = _Known.of(chain)
    known.refuse_between(source)
    aliases = dict(chain.channel.table.aliases) if chain is not None else {}
    first: dict[str, Path] | None = None
    with ExitStack() as opened:
        subscriber: Subscriber | None = None
        for step in source.play(room, aliases):
            first = step.files() if first is None else first
            found = Imported(step.number, step.name, None, False, other_files=_differing(first, step.files()))
            if known.has(step.number):
                yield replace(found, manifest=known.same(step, workers, report))
                continue
            if known.head is None:
                chain, manifest = _begin(store, step, writer, workers, report, signing)
                known = _Known.of(chain)
            else:
                chain = open_for_writing(store, step.weights.table, signing)
                if subscriber is None:
                    keeper = mirror or default_mirror(chain.channel.id)
                    opened.enter_context(space_errors(keeper))
                    following = Subscriber(
                        store, keeper, threads=workers.threads, report=report, fold=False, trust=signing.trust
                    )
                    subscriber = opened.enter_context(following)
                manifest = publish_next(
                    chain,
                    subscriber,
                    step.weights,
                    step=step.number,
                    codec=codec,
                    writer=writer,
                    after=known.head.position,
                    whole=step.files,
                    workers=workers,
                    report=report,
                ).manifest
                known = replace(known, head=manifest)
            nbytes = manifest.nbytes if manifest.base is not None else chain.anchor(manifest.key).nbytes
            yield replace(found, manifest=manifest, new=True, nbytes=nbytes)


def _begin(
    store: Store, step: Step, writer: str, workers: Workers, report: Report, signing: Signing
) -> tuple[Chain, Manifest]:
    """Begin a channel, or one that never got its first version, with a step."""
    chain = Chain.create(store, step.weights.table, signing)
    announce(chain, writer)
    manifest = commit_anchor(chain, 0, step.weights, step.files(), writer, step.number, None, workers, report)
    return chain, manifest


def _differing(first: Mapping[str, Path], files: Mapping[str, Path]) -> tuple[str, ...]:
    """The small files that one step has and another has not, or with other content."""
    return tuple(
        name
        for name in sorted(first.keys() | files.keys())
        if not is_weights(name)
        and not (name in first and name in files and filecmp.cmp(first[name], files[name], shallow=False))
    )


@dataclass(frozen=True)
class _Known:
    """The versions of a channel by their step."""

    head: Manifest | None
    url: str
    by_step: Mapping[int, tuple[Manifest, ...]]
    collected: bool
    """Whether the oldest versions are gone."""

    @classmethod
    def of(cls, chain: Chain | None) -> _Known:
        versions = committed(chain) if chain is not None else []
        if chain is None or not versions:
            return cls(None, "", {}, False)
        by_step: dict[int, tuple[Manifest, ...]] = {}
        for manifest in versions:
            if manifest.step is not None:
                by_step[manifest.step] = (*by_step.get(manifest.step, ()), manifest)
        return cls(versions[-1], chain.store.url, by_step, versions[0].position.version > 0)

    def has(self, number: int) -> bool:
        return number in self.by_step or self._is_collected(number)

    def _is_collected(self, number: int) -> bool:
        return self.collected and number < min(self.by_step, default=0)

    def refuse_between(self, source: Source) -> None:
        """`UsageError` if a step is missing in the channel and cannot be added at its end."""
        if self.head is None:
            return
        missing = [number for number in source.numbers if not self.has(number)]
        if not missing:
            return
        if self.head.step is None:
            hint = "Import into another channel."
            problem = f"the channel's newest version, {self.head.position.version}, has no step: nothing can follow it"
            raise UsageError(problem, file=self.url, hint=hint)
        if missing[0] < max(self.by_step):
            problem = f"step {missing[0]} is not in the channel, which is at step {max(self.by_step)} already"
            hint = "Versions are only added at the end. Move the step away, or import into another channel."
            raise UsageError(problem, file=self.url, hint=hint)

    def same(self, step: Step, workers: Workers, report: Report) -> Manifest | None:
        """The version that a step is; `ResultError` if its weights are others."""
        found = fingerprint_of(step.weights, workers, report).digest
        versions = self.by_step.get(step.number, ())
        for manifest in versions:
            if manifest.position.digest == found:
                return manifest
        if not versions:
            return None
        there = versions[-1].position
        problem = f"step {step.number} is in the channel with other weights, as version {there.version}"
        hint = "Import the folder into another channel."
        with about(file=step.name):
            raise ResultError(problem, expected=there.digest, found=found, hint=hint)
