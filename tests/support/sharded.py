"""A sharded training on threads, and what a follower makes of its channel."""

from __future__ import annotations

from typing import Any

import numpy as np
from ranks import Shard, ThreadPeers, bits_at, errors_of, on_ranks

import weightcast as wc
from weightcast.store.base import Store


def train(store: Store, size: int, steps: range, **options: Any) -> list[object]:
    """Train from a step to another on so many ranks, publishing after each; the last position on each rank."""

    def rank(number: int, peers: ThreadPeers) -> wc.Position:
        shard = Shard(number, size, steps.start - 1)
        with wc.Publisher(store, shard.weights, group=peers, threads=1, retry_after=0.01, **options) as publisher:
            for step in steps:
                shard.at(step)
                publisher.publish(step=step).result(60)
            return publisher.flush(60)

    found = on_ranks(size, rank)
    assert not errors_of(found), found
    return found


def followed(store: Store, version: int | None = None) -> wc.Arrays:
    """What a follower holds at a version, or at the newest."""
    empty = {name: np.zeros_like(array) for name, array in bits_at(0).items()}
    held = wc.Arrays(empty, dict.fromkeys(empty, "BF16"))
    policy = wc.Newest() if version is None else wc.Pinned(version)
    with wc.Subscriber(store, held, policy, threads=1) as subscriber:
        subscriber.sync()
    return held
