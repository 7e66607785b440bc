"""A channel whose versions appear when a test says so, in its home and in a copy near the reader."""

from __future__ import annotations

import numpy as np
from cases import same_bits
from channels import blank, channel_of
from fake_clock import FakeClock
from scripted_store import ScriptedStore

import weightcast as wc
from weightcast.channel.keys import ANCHORS, CHANNEL, manifest_key
from weightcast.follow.subscriber import Subscriber
from weightcast.store.memory import MemoryStore


class Source:
    """A whole channel, from which buckets are filled version by version."""

    def __init__(self, versions: int = 6):
        self.store = MemoryStore("source")
        self.states = channel_of(self.store, versions)

    def put(self, version: int, store: ScriptedStore) -> None:
        """What version 0 needs, or a later one, into a bucket."""
        prefixes = [f"deltas/{version:012d}"] if version else [CHANNEL, ANCHORS]
        for prefix in [*prefixes, manifest_key(version)]:
            for listed in self.store.list(prefix):
                store.store.put(listed.key, self.store.get(listed.key))


class Regions:
    """A home, a copy of it, and a reader near the copy."""

    def __init__(self, source: Source):
        self.source = source
        self.home, self.copy = ScriptedStore(MemoryStore("home")), ScriptedStore(MemoryStore("copy"))
        self.clock = FakeClock()
        self.published = self.copied = -1
        self.weights = blank(source.states[0])
        self.publish()
        self.bring()

    def publish(self, count: int = 1) -> None:
        """The next versions are there, at home."""
        for _ in range(count):
            self.published += 1
            self.source.put(self.published, self.home)

    def bring(self, count: int | None = None) -> None:
        """The next versions come to the copy; by default all."""
        for _ in range(self.published - self.copied if count is None else count):
            self.copied += 1
            self.source.put(self.copied, self.copy)

    def reader(self, replica: str | None = None) -> Subscriber:
        return wc.Subscriber(self.home, self.weights, near=[self.copy], replica=replica, threads=1, clock=self.clock)

    def version(self) -> int:
        """Which one the reader holds, by its bits."""
        found = [i for i, state in enumerate(self.source.states) if same_bits(self.weights, state)]
        assert len(found) == 1
        return found[0]

    def forget(self) -> None:
        """No requests were made yet."""
        self.home.calls.clear()
        self.copy.calls.clear()


def flipped(data: bytes) -> bytes:
    """With one bit of the last byte changed."""
    return data[:-1] + bytes(np.frombuffer(data[-1:], np.uint8) ^ 1)
