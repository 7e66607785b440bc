"""Channels to watch: a small one that a publisher writes, and one of thousands of versions that costs seconds to make.

In the large one every delta is the same object under another name. What reads only records, listings and tables cannot
tell; weights cannot be reached in it.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import put_heartbeat
from weightcast.channel.keys import HEAD, Position, delta_key, manifest_key, replica_key
from weightcast.channel.records import Heartbeat, Manifest, ObjectRef, dump_record, head_to_json
from weightcast.store import open_store
from weightcast.view.dashboard import Dashboard
from weightcast.view.observer import Observer

LAYERS = [f"model.layers.{layer}.{kind}.weight" for layer in range(3) for kind in ("q_proj", "up_proj", "norm")]
NAMES = (*LAYERS, "model.embed_tokens.weight")


@dataclass
class Watched:
    """A channel in a folder, and the weights of its head."""

    url: Path
    weights: dict[str, np.ndarray]

    @property
    def chain(self) -> Chain:
        return Chain.open(open_store(str(self.url)))

    def publish(self, count: int = 1) -> int:
        """Publish so many versions; the head."""
        with wc.Publisher(str(self.url), wc.Arrays(_copy(self.weights)), writer="trainer") as publisher:
            for _ in range(count):
                for name in self.weights:
                    if "norm" not in name:
                        self.weights[name][::7] += np.float32(0.5)
                publisher.publish(None, wc.Arrays(_copy(self.weights))).result(60)
        head = self.chain.head()
        assert head is not None
        return head.position.version

    def report(self, replica: str, version: int, error: str | None = None, pause: float | None = 0.004) -> None:
        """Write a replica's heartbeat."""
        chain = self.chain
        seconds = {"find": 0.01, "fetch": 0.2, "decode": 0.05, "verify": 0.03, "stage": 0.02, "apply": 0.004}
        beat = Heartbeat(replica, chain.manifest(version).position, time.time(), error, pause, seconds=seconds)
        put_heartbeat(chain, beat)

    def delta(self, version: int) -> Path:
        """The file of a version's delta."""
        return self.url / self.chain.manifest(version).objects[0].key


def make_watched(url: Path, versions: int = 5, names: tuple[str, ...] = NAMES) -> Watched:
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((24, 16)).astype(np.float32) for name in names}
    wc.init(str(url), wc.Arrays(_copy(weights)), writer="trainer")
    made = Watched(url, weights)
    if versions:
        made.publish(versions)
    return made


def _copy(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in weights.items()}


def make_long(url: Path, versions: int, replicas: int) -> Watched:
    """A channel that looks as if it had so many versions and replicas."""
    made = make_watched(url, 1)
    head = lengthen(made, versions)
    (url / "replicas").mkdir(exist_ok=True)
    for i in range(replicas):
        beat = Heartbeat(f"replica-{i:03d}", head, time.time(), pause=0.004, seconds={"fetch": 0.1, "apply": 0.01})
        (url / replica_key(beat.replica)).write_bytes(dump_record(beat))
    return made


def lengthen(made: Watched, versions: int) -> Position:
    """Have it look as if it had so many versions, from its head on; the new head."""
    url, first, before = made.url, made.chain.manifest(1), made.chain.head()
    assert before is not None
    head = before.position
    data = (url / first.objects[0].key).read_bytes()
    sha256, now = first.objects[0].sha256, time.time()
    for version in range(head.version + 1, versions + 1):
        base, head = head, Position(version, hashlib.sha256(str(version).encode()).hexdigest())
        ref = ObjectRef(delta_key(head, sha256), len(data), sha256)
        (url / ref.key).write_bytes(data)
        when = now - 2 * (versions - version)
        manifest = Manifest(first.channel, head, base, (ref,), first.codec, first.changed, version, when, "trainer")
        (url / manifest_key(version)).write_bytes(dump_record(manifest))
    (url / HEAD).write_bytes(head_to_json(head))
    return head


def observed(url: Path) -> Observer:
    """An observer that has read all that it reads."""
    observer = watcher(lambda: Chain.open(open_store(str(url))))
    while observer.look():
        pass
    return observer


def watcher(open_chain: Callable[[], Chain]) -> Observer:
    return Observer(open_chain, open_chain())


@contextmanager
def watching(url: Path, every: float = 0.05) -> Iterator[Dashboard]:
    """The dashboard of a channel, as its verb runs it."""
    observer, stopped = watcher(lambda: Chain.open(open_store(str(url)))), threading.Event()

    def loop() -> None:
        while not stopped.is_set():
            stopped.wait(0.001 if observer.look() else every)

    thread = threading.Thread(target=loop)
    server = Dashboard(observer.journal, "127.0.0.1", 0)
    thread.start()
    try:
        yield server
    finally:
        stopped.set()
        thread.join()
        server.close()
        observer.close()


def state_of(url: Path) -> dict:
    """What a page is told of a channel when it opens, as JSON leaves it."""
    observer = observed(url)
    try:
        return json.loads(json.dumps(observer.journal.since()))
    finally:
        observer.close()
