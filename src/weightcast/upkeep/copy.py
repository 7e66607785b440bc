"""Copying a channel to another bucket: byte for byte, so that a copy is verified as its source is.

Objects come first and each version's manifest after what leads to it, in ascending order. So whoever reads a copy, at
any moment and after a kill at any moment, finds a whole channel that ends at some version of its source. A copy that is
kept up to date brings anchors that no version waits for beside the versions: one takes as long as hundreds of deltas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from weightcast.channel.chain import Chain
from weightcast.channel.chain_reader import read_record
from weightcast.channel.index import write_index
from weightcast.channel.keys import CHANNEL, DELTAS, HEAD, TAGS, Position, keyring_key, read_tag_key
from weightcast.channel.records import Manifest, head_to_json
from weightcast.channel.route import Reached
from weightcast.channel.tags import read_tag, set_tag
from weightcast.disk.durable import Report, silent
from weightcast.errors import (
    ChannelError,
    ConflictError,
    FormatError,
    MissingError,
    NoRouteError,
    UsageError,
    WeightcastError,
)
from weightcast.follow.bad_edges import BadEdges
from weightcast.store.backoff import CLOCK, Clock
from weightcast.store.base import Store
from weightcast.upkeep.copy_plan import Contents, Step, apart, missing
from weightcast.upkeep.copy_step import Brought, Carrier

_LIST_EVERY = 30.0
"""Seconds between two listings of both buckets, which show squashes, anchors and tags. New versions are probed for."""

_VERSIONS_AT_ONCE = 4
"""Whose objects are brought ahead of the version that is committed next."""


@dataclass
class Copied:
    """What one round brought to the copy."""

    position: Position | None
    """The copy's newest version."""
    versions: int = 0
    squashes: int = 0
    anchors: int = 0
    """References to public checkpoints included."""
    tags: int = 0
    nbytes: int = 0
    problems: list[WeightcastError] = field(default_factory=list)
    """What is damaged at the source, and was left out."""

    @property
    def is_news(self) -> bool:
        """Whether the copy has something that it had not before."""
        return bool(self.versions or self.squashes or self.anchors or self.tags)

    def plus(self, later: Copied) -> Copied:
        """Two rounds as one."""
        return Copied(
            later.position,
            self.versions + later.versions,
            self.squashes + later.squashes,
            self.anchors + later.anchors,
            self.tags + later.tags,
            self.nbytes + later.nbytes,
            self.problems + later.problems,
        )


class Copier:
    """Brings the copy of a channel up to its source, round by round."""

    def __init__(
        self, source: Store, destination: Store, scratch: Path, *, report: Report = silent, clock: Clock = CLOCK
    ):
        """``scratch`` is a folder for the objects that are on their way.

        `ConflictError` if the destination holds another channel, or has versions that its source has not.
        """
        if source.url.rstrip("/") == destination.url.rstrip("/"):
            raise UsageError("source and copy are the same bucket", file=source.url, hint="Name another for the copy.")
        self._clock = clock
        self._source = Chain.open(source)
        record = read_record(source, CHANNEL)
        self._copy = _begun(self._source, record, destination)
        self._carrier = Carrier(self._source, self._copy, record, scratch, report)
        self._anchors = _Beside(Carrier(self._source, self._copy, record, scratch, mark="anchor-"))
        self._bad = BadEdges(clock)
        self._tags: dict[str, float] = {}
        """Tags that were copied, and when they were set at the source."""
        self._listed: float | None = None
        self._keyring = 0
        """The newest key list that the copy has."""
        self._is_short = False
        """Whether the source has versions that could not be brought: only a listing may show another way to them."""
        self._take_up()

    def _take_up(self) -> None:
        """Begin where the copy is; `ConflictError` if it is not where its source was."""
        head = self._agreed_head()
        self._head = head.position if head else None
        self._reached = Reached()
        """The versions that the copy's edges lead to."""
        if head is not None:
            self._reached.add(self._copy.edges(None, head.position.version))
            self._reached.add(self._copy.reference_edges())

    def close(self) -> None:
        self._anchors.close()
        self._carrier.close()

    @property
    def position(self) -> Position | None:
        """The copy's newest version."""
        return self._head

    def sync(self, *, wait: bool = True) -> Copied | None:
        """Bring what is new; None if nothing is. What is damaged at the source is left out and reported.

        Now and then both buckets are listed; in between, one request asks for the next version. Without ``wait``,
        anchors that no version waits for are brought by another thread, and reported by a later call.
        """
        now = self._clock.now()
        arrived = self._anchors.arrived()
        if arrived is not None:
            copied = self._take_anchors(arrived)
        elif self._listed is None or now - self._listed >= _LIST_EVERY:
            copied = self._sync_listed(wait)
            self._listed = now
        elif self._is_short:
            return None
        else:
            copied = self._perform([Step(self._version + 1)])
            self._is_short = bool(copied.problems)
        return copied if copied.is_news or copied.problems else None

    @property
    def _version(self) -> int:
        """The copy's newest version; -1 if there is none."""
        return self._head.version if self._head else -1

    def _take_anchors(self, arrived: Sequence[Brought]) -> Copied:
        copied = Copied(self._head)
        for brought in arrived:
            self._settle(brought, copied)
        if copied.anchors:
            write_index(self._copy)
        return copied

    def _sync_listed(self, wait: bool) -> Copied:
        self._bad.begin()
        copy = _contents(self._copy)
        if copy.head > self._version:  # another process copies, too, or it was published to
            self._take_up()
        self._bring_keyring()
        version = self._version
        source = self._contents_of_source(version)
        first = f"{DELTAS}{version + 1:012d}"
        there = {listed.key: listed.size for listed in self._copy.store.list(DELTAS, first)}
        steps = missing(source, copy)
        new = {step.version for step in steps if step.commits}
        deltas = list(self._source.delta_edges(max(version, 0), source.head)) if new else []
        if not wait:
            steps, anchors = apart(steps, deltas, self._reached.versions)
            self._anchors.bring(anchors, self._bad)
        total = sum(edge.nbytes for step in steps for edge in step.edges)
        self._carrier.expect(there, total + sum(edge.nbytes for edge in deltas if edge.result in new))
        copied = self._perform(steps)
        copied.tags = self._bring_tags(copied)
        self._is_short = source.head > self._version
        if self._is_short and not copied.problems:
            copied.problems += self._why_short(source.head)
        if copied.squashes or copied.anchors or copied.tags:
            write_index(self._copy)
        return copied

    def _contents_of_source(self, version: int) -> Contents:
        """What the source holds after ``version``; a listing may lag, so later versions are probed for."""
        found = _contents(self._source, version)
        following, more = self._source.after(max(found.head, version)), set(found.versions)
        while following is not None:
            more.add(following.position.version)
            following = self._source.after(following.position.version)
        return Contents(frozenset(more), found.edges)

    def _why_short(self, newest: int) -> Iterator[WeightcastError]:
        """What is to be said if versions are left out and nothing new is damaged."""
        if self._source.head() is not None and not self._bad.reason:
            hint = f"`weightcast verify {self._source.store.url}` lists what is wrong."
            problem = f"no route leads to version {newest} at the source"
            yield NoRouteError(problem, file=self._source.store.url, hint=hint)

    # -- versions ------------------------------------------------------------------------------------------------------

    def _perform(self, steps: Sequence[Step]) -> Copied:
        """Bring steps, several at a time, and commit their versions one after the other."""
        copied = Copied(self._head)
        self._carrier.stopped = False
        with ThreadPoolExecutor(_VERSIONS_AT_ONCE, thread_name_prefix="weightcast-copy") as pool:
            try:
                for brought in _in_order(pool, partial(self._carrier.bring, bad=self._bad), steps):
                    self._settle(brought, copied)
            except BaseException:
                self._carrier.stopped = True  # else an interrupt would wait for transfers of gigabytes
                raise
        if copied.versions and self._head is not None:
            self._copy.store.put(HEAD, head_to_json(self._head))
        copied.position = self._head
        return copied

    def _settle(self, brought: Brought, copied: Copied) -> None:
        """Commit a step's version, if what is there leads to it."""
        for edge, error in brought.failed:
            copied.problems.append(error)
            if edge is not None:
                self._bad.add(edge, error)
        self._reached.add(brought.edges)
        copied.squashes += sum(edge.kind == "squash" for edge in brought.edges)
        copied.anchors += sum(edge.base is None for edge in brought.edges)
        copied.nbytes += brought.nbytes
        if brought.commit is None or brought.step.version not in self._reached.versions:
            return
        key, data, manifest = brought.commit
        if manifest.keyring > self._keyring:
            self._bring_keyring()  # first: without it nobody can check the version
        store = self._copy.store
        if not store.create(key, data) and read_record(store, key) != data:
            raise _forked(self._source, self._copy, brought.step.version)
        self._head = manifest.position
        copied.versions += 1
        copied.nbytes += len(data)

    # -- keys ----------------------------------------------------------------------------------------------------------

    def _bring_keyring(self) -> None:
        """Bring new entries of the list of keys; whoever trusts a key checks them."""
        while True:
            key = keyring_key(self._keyring + 1)
            try:
                data = read_record(self._source.store, key)
            except MissingError as error:
                if error.key is None:
                    raise
                return
            store = self._copy.store
            if not store.create(key, data) and read_record(store, key) != data:
                hint = f"Copy to another bucket or folder, or delete this copy first: `weightcast reset {store.url}`."
                problem = f"the copy has another list of keys than {self._source.store.url}"
                raise ConflictError(problem, file=f"{store.url}/{key}", hint=hint)
            self._keyring += 1

    # -- tags ----------------------------------------------------------------------------------------------------------

    def _bring_tags(self, copied: Copied) -> int:
        """Name versions of the copy as the source does; returns how many names were set or moved."""
        count = 0
        for listed in list(self._source.store.list(TAGS)):
            name = read_tag_key(listed.key)
            if name is None or self._tags.get(listed.key) == listed.modified:
                continue
            try:
                position = read_tag(self._source, name).position
            except UsageError:
                continue  # deleted since it was listed
            except FormatError as error:
                copied.problems.append(error)
                self._tags[listed.key] = listed.modified
                continue
            is_new = self._name_version(name, position)
            if is_new is not None:
                self._tags[listed.key] = listed.modified
                count += is_new
        return count

    def _name_version(self, name: str, position: Position) -> bool | None:
        """Set a tag in the copy; whether it is new, or None if its version is not there, or is being collected."""
        try:
            if self._copy.manifest(position.version).position != position:
                return None
            return set_tag(self._copy, name, position, force=True) != position
        except MissingError as error:
            if error.key is None:
                raise
        except (UsageError, ConflictError):
            pass
        return None

    # -- agreement -----------------------------------------------------------------------------------------------------

    def _agreed_head(self) -> Manifest | None:
        """The copy's head; `ConflictError` if it is not a version of the source."""
        head = self._copy.head()
        if head is None:
            return None
        version = head.position.version
        try:
            theirs = self._source.read_manifest(version)[1]
        except MissingError as error:
            if error.key is None:
                raise
            newest = self._source.head()
            if newest is not None and newest.position.version > version:
                return head  # collected at the source
            raise _forked(self._source, self._copy, version) from None
        if self._copy.read_manifest(version)[1] != theirs:
            raise _forked(self._source, self._copy, version)
        return head


class _Beside:
    """Brings anchors on a thread of its own, one lot after the other."""

    def __init__(self, carrier: Carrier):
        """``carrier`` has files of its own: another one may bring the same object at the same time."""
        self._carrier = carrier
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weightcast-anchors")
        self._lot: Future[list[Brought]] | None = None

    def bring(self, steps: Sequence[Step], bad: BadEdges) -> None:
        """Begin, unless a lot is on its way: what it lacks is found again by the next listing."""
        if steps and self._lot is None:
            self._lot = self._thread.submit(lambda: [self._carrier.bring(step, bad) for step in steps])

    def arrived(self) -> list[Brought] | None:
        """The lot, once it is there; raises what it failed with. None if there is none, or it is on its way."""
        if self._lot is None or not self._lot.done():
            return None
        lot, self._lot = self._lot, None
        return lot.result()

    def close(self) -> None:
        self._carrier.close()
        self._thread.shutdown(cancel_futures=True)


def _contents(chain: Chain, after: int = -1) -> Contents:
    edges = [*chain.anchor_edges(), *chain.reference_edges(), *chain.squash_edges(0)]
    return Contents(frozenset(chain.versions(after)), tuple(edges))


def _begun(source: Chain, record: bytes, destination: Store) -> Chain:
    """The copy, begun if there is none; `ConflictError` if another channel is there."""
    try:
        copy = Chain.open(destination)
    except ChannelError:
        destination.create(CHANNEL, record)
        copy = Chain.open(destination)
    if copy.channel.id != source.channel.id:
        hint = (
            f"Name another bucket or folder for the copy, or delete that channel: `weightcast reset {destination.url}`."
        )
        raise ConflictError(f"another channel than {source.store.url} is there", file=destination.url, hint=hint)
    return copy


def _forked(source: Chain, copy: Chain, version: int) -> ConflictError:
    hint = (
        "Nothing but `weightcast copy` may write versions to a copy, and a source must not be put back. "
        f"Copy to another bucket or folder, or delete this copy first: `weightcast reset {copy.store.url}`."
    )
    problem = f"version {version} of the copy is not that of {source.store.url}"
    return ConflictError(problem, file=copy.store.url, hint=hint)


def _in_order(pool: ThreadPoolExecutor, call: Callable[[Step], Brought], steps: Iterable[Step]) -> Iterator[Brought]:
    """The results in order, of which a few are made ahead."""
    waiting: deque[Future[Brought]] = deque()
    try:
        for step in steps:
            waiting.append(pool.submit(call, step))
            if len(waiting) > _VERSIONS_AT_ONCE:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
