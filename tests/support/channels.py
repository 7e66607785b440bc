"""Small models and channels of them for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from cases import gaussian, moved

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position
from weightcast.store import open_store
from weightcast.store.base import Store


def small_model(seed: int = 0, tensors: int = 3, elements: int = 2000) -> wc.Arrays:
    """A model of a few bf16 matrices."""
    rng = np.random.default_rng(seed)
    arrays = {f"model.layers.{i}.mlp.up_proj.weight": gaussian(rng, elements).reshape(-1, 20) for i in range(tensors)}
    return wc.Arrays(arrays, dict.fromkeys(arrays, "BF16"))


def train(model: wc.Arrays, seed: int, density: float = 0.02) -> None:
    """A step: some elements move, in place."""
    rng = np.random.default_rng(seed)
    for spec in model.table:
        model.write(spec.name, moved(rng, model.read(spec.name), density))


def blank(model: wc.Arrays) -> wc.Arrays:
    """The same table, no weights."""
    copy = wc.Arrays.copy_of(model)
    for spec in copy.table:
        copy.read(spec.name)[:] = 0
    return copy


def channel_of(store: Store, versions: int, seed: int = 0) -> list[wc.Arrays]:
    """Publish a small model and ``versions`` steps of it; returns every version's weights."""
    model = small_model(seed)
    wc.init(store, model)
    states = [wc.Arrays.copy_of(model)]
    with wc.Publisher(store, model, threads=1) as publisher:
        for step in range(1, versions + 1):
            train(model, 1000 * seed + step)
            publisher.publish(step=step).result(60)
            states.append(wc.Arrays.copy_of(model))
    return states


def pull(
    store: Store | str | Path, target: wc.Arrays | Path, policy: wc.Newest | wc.Pinned | None = None
) -> wc.Position:
    """Bring a target to where the policy wants it."""
    with wc.Subscriber(store, target, policy or wc.Newest(), threads=1) as subscriber:
        subscriber.sync()
        assert subscriber.position is not None
        return subscriber.position


def head_of(store: Store) -> wc.Position:
    head = Chain.open(store).head()
    assert head is not None
    return head.position


class LiveChannel:
    """A channel in a folder, whose trainer is in this process."""

    def __init__(self, folder: Path):
        self.url = folder / "channel"
        self.model = small_model()
        wc.init(self.url, self.model)
        self.states = [wc.Arrays.copy_of(self.model)]

    def publish(self) -> int:
        train(self.model, len(self.states))
        with wc.Publisher(self.url, wc.Arrays.copy_of(self.states[-1]), threads=1) as publisher:
            publisher.publish(weights=self.model).result(30)
        self.states.append(wc.Arrays.copy_of(self.model))
        return len(self.states) - 1

    @property
    def chain(self) -> Chain:
        return Chain.open(open_store(self.url))

    def position(self, version: int) -> Position:
        return self.chain.manifest(version).position
