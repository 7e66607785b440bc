"""Publish, crash, squash, collect, restart, subscribe in any order, with a plain dictionary as the model."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from cases import moved, same_bits
from faults import INJECTED, Crash, FaultyStore
from faulty_disk import FaultyDisk
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scripted_store import ScriptedStore
from worlds import NOW, model_of, nothing_like, states, temporary_files_in

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import HEAD
from weightcast.channel.pins import pin, pins, unpin
from weightcast.channel.policy import Every, Pinned, Policy
from weightcast.channel.retention import Retention
from weightcast.disk.checkpoint import save
from weightcast.errors import ConflictError, WeightcastError
from weightcast.follow.mirror import Mirror
from weightcast.follow.mirror_reader import reading
from weightcast.follow.subscriber import Subscriber
from weightcast.publish.from_checkpoint import cut_anchor, publish
from weightcast.publish.open import init
from weightcast.publish.publisher import Publisher
from weightcast.store.base import Store
from weightcast.upkeep.collect import collect
from weightcast.upkeep.squash import squash
from weightcast.upkeep.verify import verify

HOUR = 3600.0
POLICY = Retention(window=24 * HOUR, grace=3 * HOUR, patience=96 * HOUR)
BREAKS = st.tuples(
    st.sampled_from(["refuse", "lose", "cut", "delay", "twice", "stale", "die", "die-after"]), st.integers(1, 40)
)
PARTS = st.tuples(st.sampled_from(["refuse", "lose", "delay", "twice", "part", "part-after"]), st.integers(1, 25))
KILLS = st.tuples(st.sampled_from(["kill", "power", "luck", "eio", "full"]), st.integers(1, 80))
SEEDS = st.integers(0, 2**16)


class ChannelMachine(RuleBasedStateMachine):
    """``model`` has the bits of every version ever committed, ``gone`` those that the collector took."""

    def __init__(self) -> None:
        super().__init__()
        parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self.root = Path(tempfile.mkdtemp(prefix="weightcast-test-", dir=parent))
        (self.root / "tmp").mkdir()
        self.store = ScriptedStore(now=NOW)
        self.model: dict[int, wc.Arrays] = {}
        self.published: dict[int, float] = {}
        self.gone: set[int] = set()
        self.publisher: Publisher | None = None
        self.faulty: FaultyStore | None = None
        self.seen: dict[str, int] = {}

    def teardown(self) -> None:
        try:
            self._close_publisher()
            if self.model:
                for version in self.left():
                    self._pull_fresh(Pinned(version))
        finally:
            shutil.rmtree(self.root)

    @property
    def chain(self) -> Chain:
        return Chain.open(self.store)

    @property
    def head(self) -> int:
        return max(self.model)

    def left(self) -> list[int]:
        return [version for version in self.model if version not in self.gone]

    def _commit(self, bits: wc.Arrays) -> None:
        self.model[self.head + 1] = wc.Arrays.copy_of(bits)
        self.published[self.head] = self.store.now

    def _next(self, seed: int, base: int | None = None, densities: Sequence[float] = (0.0, 0.02, 0.2)) -> wc.Arrays:
        """A step of training from the head, or from an older version; it may change nothing."""
        rng = np.random.default_rng(seed)
        old = self.model[self.head if base is None else base]
        density = rng.choice(list(densities))
        return model_of({spec.name: moved(rng, old.read(spec.name), density) for spec in old.table})

    # -- write -------------------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        with self._here():
            self.model[0] = states(1)[0]
            init(self.store, self.model[0])
            self.published[0] = self.store.now

    @contextmanager
    def _here(self) -> Iterator[None]:
        with temporary_files_in(self.root / "tmp"):
            yield

    def _open_publisher(self, weights: wc.Arrays) -> Publisher:
        self.faulty = FaultyStore(self.store)
        self.publisher = Publisher(self.faulty, weights, threads=1, retry_after=0.005)
        return self.publisher

    def _close_publisher(self) -> None:
        if self.publisher is not None:
            try:
                self.publisher.close()
            except WeightcastError:
                assert self.faulty is not None
                assert self.faulty.fault is not None
            self.publisher = None

    @rule(seed=SEEDS)
    def publish(self, seed: int) -> None:
        publisher = self.publisher or self._open_publisher(wc.Arrays.copy_of(self.model[self.head]))
        bits = self._next(seed)
        receipt = publisher.publish(weights=bits)
        unchanged = same_bits(bits, self.model[self.head])
        assert receipt.result(30).position.version == self.head + (not unchanged)
        assert receipt.is_new is not unchanged
        if not unchanged:
            self._commit(bits)

    @rule(seed=SEEDS, fault=PARTS)
    def publish_over_a_bad_link(self, seed: int, fault: tuple[str, int]) -> None:
        """Several steps, which may be merged; then the trainer is gone. What was acknowledged is committed."""
        publisher = self.publisher or self._open_publisher(wc.Arrays.copy_of(self.model[self.head]))
        assert self.faulty is not None
        self.faulty.fault, self.faulty.at = fault[0], len(self.faulty.calls) + fault[1]
        steps = [self._next(seed)]
        steps += [model_of({s.name: moved(np.random.default_rng(seed), b.read(s.name), 0.1) for s in b.table})
                  for b in steps]  # fmt: skip
        receipts = [publisher.publish(weights=bits) for bits in steps]
        self._close_publisher()
        self.faulty.settle()
        INJECTED["machine"] += self.faulty.hit
        assert all(receipt.done() for receipt in receipts)
        acknowledged = {}
        for receipt, bits in zip(receipts, steps, strict=True):
            with suppress(WeightcastError):
                acknowledged[receipt.result(0).position.version] = bits
        self._learn(steps)
        for version, bits in acknowledged.items():
            assert same_bits(self.model[version], bits)

    def _learn(self, candidates: list[wc.Arrays]) -> None:
        """Take into the model what turns out to be committed; each must be one of ``candidates``."""
        newest = self.chain.head()
        assert newest is not None
        while self.head < newest.position.version:
            digest = self.chain.manifest(self.head + 1).position.digest
            found = [bits for bits in candidates if wc.fingerprint(bits).digest == digest]
            assert found, "something was committed that nobody published"
            self._commit(found[0])

    @rule(choice=SEEDS, fault=PARTS)
    def restart_from_an_older_checkpoint(self, choice: int, fault: tuple[str, int]) -> None:
        self._close_publisher()
        bits = self.model[sorted(self.model)[choice % len(self.model)]]
        self.faulty = FaultyStore(self.store, *fault)
        with self._here(), suppress(WeightcastError):
            self.publisher = Publisher(self.faulty, wc.Arrays.copy_of(bits), threads=1, retry_after=0.005)
            self.publisher.publish()
        self._close_publisher()
        self.faulty.settle()
        INJECTED["machine"] += self.faulty.hit
        self._learn([bits])

    @rule(seed=SEEDS)
    def two_publishers(self, seed: int) -> None:
        """One wins, the other is told, and the chain stays whole."""
        self._close_publisher()
        weights = wc.Arrays.copy_of(self.model[self.head])
        ours, theirs = (self._next(each, densities=(0.02, 0.2)) for each in (seed, seed + 1))
        with Publisher(self.store, weights, threads=1) as first:
            second = Publisher(self.store, weights, threads=1)
            assert first.publish(weights=ours).result(30).position.version == self.head + 1
            with pytest.raises(ConflictError):
                second.publish(weights=theirs).result(30)
            _close(second)
        self._commit(ours)

    @rule(seed=SEEDS, fault=BREAKS)
    def publish_a_folder(self, seed: int, fault: tuple[str, int]) -> None:
        self._close_publisher()
        bits = self._next(seed)
        folder = self.root / "checkpoint"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        save(bits, folder)
        self._interrupted(fault, lambda store: publish(store, folder, self.root / "keeper"), hint=bool(self.gone))
        self._learn([bits])

    # -- maintain ----------------------------------------------------------------------------------------------------

    def _interrupted(self, fault: tuple[str, int], work: Callable[[Store], object], hint: bool = False) -> None:
        """Work with a fault; with ``hint`` an old listing comes with the right head (SPEC 11.4.9)."""
        store = FaultyStore(self.store, *fault)
        store.old_head = self.store.get(HEAD) if hint else None
        with self._here():
            try:
                work(store)
            except (WeightcastError, Crash):
                assert store.hit
        store.settle()
        INJECTED["machine"] += store.hit

    @rule(fault=BREAKS)
    def cut_squashes(self, fault: tuple[str, int]) -> None:
        self._interrupted(fault, lambda store: list(squash(Chain.open(store), self.root / "scratch", levels=(2, 4))))

    @rule(hours=st.sampled_from([1, 5, 30]))
    def wait(self, hours: int) -> None:
        self.store.now += hours * HOUR

    @rule(fault=BREAKS)
    def collect_garbage(self, fault: tuple[str, int]) -> None:
        now, pinned = self.store.now, set(pins(self.chain))
        self._interrupted(fault, lambda store: collect(Chain.open(store), POLICY))
        there = set(self.chain.versions())
        for version in set(self.left()) - there:
            assert now - self.published[version] >= POLICY.window, f"{version} is too young to be collected"
            assert version not in pinned
        self.gone = set(self.model) - there

    @rule(choice=SEEDS)
    def pin_or_unpin(self, choice: int) -> None:
        version = self.left()[choice % len(self.left())]
        (unpin if version in pins(self.chain) else pin)(self.chain, version)

    @rule(kill=KILLS, name=st.sampled_from(["one", "two"]))
    def cut_an_anchor(self, kill: tuple[str, int], name: str) -> None:
        def work() -> None:
            chain = self.chain
            mirror = Mirror(self.root / name, chain.channel.id, chain.channel.table)
            try:
                if mirror.version is not None:
                    cut_anchor(chain, mirror)
            finally:
                mirror.close()

        self._killed(kill, work)

    # -- follow ------------------------------------------------------------------------------------------------------

    def _killed(self, kill: tuple[str, int], work: Callable[[], object]) -> None:
        kind, at = kill
        fault = kind if kind in ("eio", "full") else "die"
        with self._here(), FaultyDisk(self.root, fault, at) as disk:
            try:
                work()
            except (WeightcastError, OSError, Crash):
                assert len(disk.calls) >= at
        INJECTED["machine"] += len(disk.calls) >= at
        if disk.dead and kind in ("power", "luck"):
            disk.lose_power(random.Random(at) if kind == "luck" else None)

    def _follow(self, folder: Path, policy: Policy, store: Store) -> None:
        with Subscriber(store, folder, policy, threads=1, fold_every=3) as subscriber:
            subscriber.sync()

    @rule(kill=KILLS, name=st.sampled_from(["one", "two"]), every=st.booleans())
    def follow_and_die(self, kill: tuple[str, int], name: str, every: bool) -> None:
        policy: Policy = Every() if every else wc.Newest()
        self._killed(kill, lambda: self._follow(self.root / name, policy, self.store))

    @rule(fault=BREAKS, name=st.sampled_from(["one", "two"]))
    def follow_over_a_bad_link(self, fault: tuple[str, int], name: str) -> None:
        self._interrupted(fault, lambda store: self._follow(self.root / name, wc.Newest(), store))

    @rule(choice=SEEDS, name=st.sampled_from(["one", "two"]))
    def go_back(self, choice: int, name: str) -> None:
        version = self.left()[choice % len(self.left())]
        self._follow(self.root / name, Pinned(version), self.store)
        self.seen.pop(name, None)
        assert self._check_mirror(name) == version

    @rule(name=st.sampled_from(["one", "two"]), seed=SEEDS)
    def edit_a_mirror(self, name: str, seed: int) -> None:
        """Somebody else writes into the files; whoever follows finds out, and puts it right."""
        files = sorted((self.root / name).glob("*.safetensors"))
        if not files:
            return
        data = bytearray(files[0].read_bytes())
        data[len(data) - 1 - seed % 200] ^= 1 + seed % 255
        files[0].write_bytes(data)
        self._follow(self.root / name, wc.Newest(), self.store)
        assert self._check_mirror(name) == self.head

    def _pull_fresh(self, policy: Policy, store: Store | None = None) -> int:
        fresh = nothing_like(self.model[0])
        with self._here(), Subscriber(store or self.store, fresh, policy, threads=1) as subscriber:
            staged = subscriber.poll()
            assert staged is not None
            version = subscriber.apply(staged).version
        assert same_bits(fresh, self.model[version])
        return version

    @rule(lacking=st.integers(1, 3))
    def read_with_stale_listings(self, lacking: int) -> None:
        store = FaultyStore(self.store, "stale", 10**6, lacking)
        with suppress(WeightcastError):  # all that leads there may be missing from the listings
            assert self._pull_fresh(wc.Newest(), store) <= self.head

    def _check_mirror(self, name: str) -> int | None:
        chain = self.chain
        mirror = Mirror(self.root / name, chain.channel.id, chain.channel.table)
        try:
            if mirror.version is not None:
                assert mirror.weights is not None
                assert same_bits(mirror.weights, self.model[mirror.version])  # type: ignore[arg-type]
                assert mirror.folded is not None
                with reading(self.root / name) as files:
                    assert same_bits(files, self.model[mirror.folded.version])
            return mirror.version
        finally:
            mirror.close()

    # -- always ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model)
    @invariant()
    def the_head_is_what_was_committed_last_and_can_be_had(self) -> None:
        head = self.chain.head()
        assert head is not None
        assert head.position.version == self.head
        assert head.position.digest == wc.fingerprint(self.model[self.head]).digest
        assert self._pull_fresh(wc.Newest()) == self.head

    @precondition(lambda self: self.model)
    @invariant()
    def the_channel_is_whole(self) -> None:
        assert list(verify(self.chain)) == []
        assert set(self.chain.versions()) == set(self.left())

    @precondition(lambda self: self.model)
    @invariant()
    def mirrors_are_at_versions_and_do_not_go_back(self) -> None:
        for name in ("one", "two", "keeper"):
            if (self.root / name).exists():
                version = self._check_mirror(name)
                if version is not None:
                    assert version >= self.seen.get(name, 0)
                    self.seen[name] = version


def _close(publisher: Publisher) -> None:
    with pytest.raises(ConflictError):
        publisher.flush()
    publisher.close()


ChannelMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda fd: None)


TestChannel = ChannelMachine.TestCase
