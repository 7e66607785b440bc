"""A tiny channel in a folder of its own: what each version holds, and what must be true of it at any time."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from cases import gaussian, moved, same_bits, write_folder
from scripted_store import ScriptedStore

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import ANCHORS, DELTAS, DOOMED, RECORD
from weightcast.channel.policy import NEWEST, Pinned, Policy
from weightcast.channel.retention import Retention
from weightcast.disk.checkpoint import MIRROR
from weightcast.disk.durable import Report, silent
from weightcast.errors import ChannelError, CheckpointError, InterruptedApplyError
from weightcast.follow.mirror import FOLD_EVERY, PATIENCE, Mirror
from weightcast.follow.mirror_reader import reading
from weightcast.follow.subscriber import Subscriber
from weightcast.publish.open import init
from weightcast.publish.publisher import Publisher
from weightcast.store.base import Store
from weightcast.store.file import FileStore
from weightcast.store.memory import MemoryStore
from weightcast.store.probe import PROBES
from weightcast.upkeep.collect import collect
from weightcast.upkeep.verify import verify

DAY = 86400.0
NOW = 1e9
"""By the clock of a world's bucket, when it begins."""
COUNT = 8
"""Versions that there may be."""
KEEP_ALL = Retention(window=1e12, grace=DAY, patience=1e12)


def states(count: int, seed: int = 0) -> list[wc.Arrays]:
    """The weights of each version: two tensors that move, one that moves now and then, one that never does."""
    rng = np.random.default_rng(seed)
    bits = {"a": gaussian(rng, 300), "b": gaussian(rng, 400), "c": gaussian(rng, 50), "d": gaussian(rng, 10)}
    found = []
    for version in range(count):
        if version:
            bits = {name: moved(rng, old, 0.05) if name in "ab" else old for name, old in bits.items()}
            if version % 3 == 0:
                bits["c"] = moved(rng, bits["c"], 0.5)
        found.append(model_of(bits))
    return found


def model_of(bits: dict[str, np.ndarray]) -> wc.Arrays:
    return wc.Arrays({name: old.copy().reshape(-1, 10) for name, old in bits.items()}, dict.fromkeys(bits, "BF16"))


def nothing_like(state: wc.Arrays) -> wc.Arrays:
    """The same tensors, all zeros: no version of any channel."""
    return model_of({spec.name: np.zeros_like(state.read(spec.name)) for spec in state.table})


@dataclass
class World:
    """A channel and all that is around it, below one folder."""

    root: Path
    states: list[wc.Arrays]
    """By version; those behind the head are yet to come."""
    store: ScriptedStore
    """With a clock of its own, so that a test can let time pass."""
    memory: bool = True

    @classmethod
    def make(cls, root: Path, count: int = COUNT, *, memory: bool = True) -> World:
        (root / "tmp").mkdir(parents=True)
        store: Store = MemoryStore("w") if memory else FileStore(root / "bucket")
        return cls(root, states(count), ScriptedStore(store, now=NOW), memory)

    @property
    def mirror(self) -> Path:
        return self.root / "mirror"

    def checkpoint(self, version: int) -> Path:
        """A folder as a trainer would save it."""
        folder = self.root / f"checkpoint-{version}"
        if not folder.exists():
            write_folder(folder, self.states[version])
        return folder

    def begin(self, head: int) -> World:
        """A channel with versions up to ``head``."""
        init(self.store, self.checkpoint(0))
        weights = wc.Arrays.copy_of(self.states[0])
        with Publisher(self.store, weights, threads=1) as publisher:
            for version in range(1, head + 1):
                publisher.publish(step=version, weights=self.states[version]).result(30)
        return self

    @classmethod
    def at(cls, root: Path) -> World:
        """A world that another process made on disk; all that is in its bucket is old."""
        world = cls(root, states(COUNT), ScriptedStore(FileStore(root / "bucket"), now=NOW), memory=False)
        world.store.times = dict.fromkeys(world.objects(), world.store.now - 1000.0)
        return world

    def reopened(self) -> World:
        """The same as another process finds it."""
        if self.memory:
            return self
        store = ScriptedStore(FileStore(self.root / "bucket"), now=self.store.now)
        store.times = self.store.times
        return World(self.root, self.states, store, memory=False)

    def clone(self, root: Path) -> World:
        """The same once more, to be spoilt."""
        shutil.copytree(self.root, root)
        store: Store = FileStore(root / "bucket")
        if self.memory:
            store = MemoryStore("w")
            for listed in self.store.store.list(""):
                store.put(listed.key, self.store.store.get(listed.key))
        scripted = ScriptedStore(store, now=self.store.now)
        scripted.times = dict(self.store.times)
        return World(root, self.states, scripted, self.memory)

    @property
    def chain(self) -> Chain:
        return Chain.open(self.store)

    def objects(self) -> set[str]:
        return self.store.keys() if self.memory else set(self._files("bucket"))

    def bucket_state(self) -> str:
        """A digest of all that readers of the bucket depend on: objects, when they were written, and the time."""
        state = hashlib.sha256(str(self.store.now).encode())
        for key in sorted(self.objects()):
            state.update(f"{key} {self.store.times.get(key)} ".encode() + self.store.store.get(key))
        return state.hexdigest()

    def _files(self, folder: str) -> Iterator[str]:
        top = self.root / folder
        for path in top.rglob("*"):
            if path.is_file() and ".tmp" not in path.parts:
                yield str(path.relative_to(top))

    def litter(self) -> set[str]:
        """Names of all files that lie around outside the bucket.

        But for a mirror's log and history, and its downloads: those go when the next begin.
        """
        names = {str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()}
        mine = {name for name in names if not name.startswith(("bucket", "checkpoint-"))}
        return {name for name in mine if not any(f"/{part}/" in name for part in ("log", "incoming", "history"))}

    def strays(self) -> set[str]:
        """What is left in the bucket that belongs to nothing, once all that may go by age is gone."""
        for _ in range(2):
            self.store.now += 2 * DAY
            collect(self.chain, KEEP_ALL)
        named = {self.chain.manifest(version).objects[0].key for version in self.chain.versions()}
        whole = {key.rpartition("/")[0] for key in self.objects() if key.endswith(f"/{RECORD}")}
        return {
            key
            for key in self.objects()
            if (key.startswith(DELTAS) and key not in named)
            or (key.startswith(ANCHORS) and key.rpartition("/")[0] not in whole)
            or key.startswith((PROBES, DOOMED))
        }

    def publish_next(self) -> int:
        """Commit the next state; returns its version."""
        head = self.head()
        assert head is not None
        with Publisher(self.store, wc.Arrays.copy_of(self.states[head]), threads=1) as publisher:
            return publisher.publish(weights=self.states[head + 1]).result(30).position.version

    # -- what must be true ---------------------------------------------------------------------------------------------

    def pull(self, version: int | None = None, store: Store | None = None) -> int:
        """Read from nothing into memory; the version reached, whose bits are right."""
        fresh = nothing_like(self.states[0])
        policy: Policy = Pinned(version) if version is not None else wc.Newest()
        with Subscriber(store or self.store, fresh, policy, threads=1) as subscriber:
            staged = subscriber.poll()
            assert staged is not None
            reached = subscriber.apply(staged).version
        assert same_bits(fresh, self.states[reached])
        return reached

    def head(self) -> int | None:
        """What a reader finds; None where there is no channel, or no version yet."""
        try:
            head = self.chain.head()
        except ChannelError:
            return None
        return head.position.version if head else None

    def check_readers(self, heads: Sequence[int | None]) -> None:
        """Whoever comes now gets one of ``heads``, with the right bits, and the channel is whole."""
        head = self.head()
        assert head in heads
        if head is not None:
            assert self.pull() == head
            assert list(verify(self.chain)) == []

    def check_files(self, folder: Path | None = None) -> int | None:
        """What anyone who loads a mirror's files gets: a version, or a refusal (None)."""
        folder = folder or self.mirror
        if not (folder / MIRROR).is_dir():
            return None
        try:
            with reading(folder) as files:
                return self.which(files)
        except (InterruptedApplyError, CheckpointError):
            return None

    def check_mirror(self, versions: Sequence[int | None], folder: Path | None = None) -> int | None:
        """Who takes the mirror up again is at one of ``versions``, with the right bits, in the files too."""
        folder = folder or self.mirror
        self.check_files(folder)
        if not folder.exists():
            assert None in versions
            return None
        with opened(self, folder) as mirror:
            assert mirror.version in versions, f"at {mirror.version}"
            if mirror.version is not None:
                assert mirror.weights is not None
                assert same_bits(mirror.weights, self.states[mirror.version])  # type: ignore[arg-type]
            if mirror.folded is not None:
                assert self.check_files(folder) == mirror.folded.version
            return mirror.version

    def which(self, weights: wc.Checkpoint) -> int:
        """The version that these bits are."""
        for version, state in enumerate(self.states):
            if same_bits(weights, state):
                return version
        raise AssertionError("these weights are of no version")


@contextmanager
def opened(
    world: World,
    folder: Path | None = None,
    *,
    report: Report = silent,
    fold_every: int = FOLD_EVERY,
    patience: float = PATIENCE,
) -> Iterator[Mirror]:
    folder, channel = folder or world.mirror, world.chain.channel
    mirror = Mirror(folder, channel.id, channel.table, report=report, fold_every=fold_every, patience=patience)
    try:
        yield mirror
    finally:
        mirror.close()


def follow(
    world: World,
    store: Store | None = None,
    folder: Path | None = None,
    policy: Policy = NEWEST,
    *,
    fold: bool = False,
    fold_every: int = FOLD_EVERY,
) -> int:
    """Bring the mirror to the head, or where ``policy`` wants it; returns where it is.

    Its log is left as a kill would leave it, unless ``fold`` is wanted.
    """
    with Subscriber(
        store or world.store, folder or world.mirror, policy, threads=1, fold=fold, fold_every=fold_every
    ) as subscriber:
        update = subscriber.sync()
        if update is not None and update.short is not None:
            raise update.short
        assert subscriber.position is not None
        return subscriber.position.version


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


@dataclass(frozen=True)
class Operation:
    """Something that is interrupted, looked at, and done again."""

    name: str
    head: int | None
    """The head before."""
    prepare: Callable[[World], object]
    run: Callable[[World, Store], object]
    heads: tuple[int | None, ...]
    """Heads that a reader may find while it is half done, the last being that of the end."""
    mirrors: tuple[int | None, ...] = (None,)
    """Versions that the mirror may be at, likewise."""
    writes: bool = True
    """Whether it writes to the bucket, so that others must be asked what they find there."""
    dies: bool = True
    """Whether it may die in the middle within this process: not if it has threads of its own."""
    done: Callable[[World], object] = field(default=lambda world: None)
    seen: set[tuple[str, str]] = field(default_factory=set)
    """Checks of the bucket that were made, with its state: with the same state they would say the same."""

    def make(self, root: Path, *, memory: bool = True) -> World:
        world = World.make(root, memory=memory)
        with temporary_files_in(root / "tmp"):
            if self.head is not None:
                world.begin(self.head)
            self.prepare(world)
        return world

    def attempt(self, world: World, store: Store) -> None:
        with temporary_files_in(world.root / "tmp"):
            self.run(world, store)

    def check(self, world: World) -> None:
        """After an interruption: old or new, nothing else."""
        with temporary_files_in(world.root / "tmp"):
            if self.writes and self._is_new("check", world):
                world.check_readers(self.heads)
            world.check_mirror(self.mirrors)

    def complete(self, world: World, *, thoroughly: bool = True) -> None:
        """After it was done again: new, and every version is still there."""
        with temporary_files_in(world.root / "tmp"):
            if self.writes and self._is_new("complete", world):
                world.check_readers(self.heads[-1:])
            world.check_mirror(self.mirrors[-1:])
            for folder in (world.root / "scratch").glob("*"):
                world.check_mirror((None, *range(len(world.states))), folder)
            if thoroughly and self.writes and self._is_new("thoroughly", world):
                self.done(world)
                assert world.strays() == set()

    def _is_new(self, check: str, world: World) -> bool:
        before = len(self.seen)
        self.seen.add((check, world.bucket_state()))
        return len(self.seen) > before


def damage(world: World, key: str) -> bytes:
    """Flip a bit of an object; returns what it was."""
    good = world.store.get(key)
    world.store.put(key, good[:-1] + bytes([good[-1] ^ 1]))
    return good


def delta_of(world: World, version: int) -> str:
    return world.chain.manifest(version).objects[0].key
