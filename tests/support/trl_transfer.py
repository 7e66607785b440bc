"""TRL's trainer as it calls a `WeightcastTransfer`, buckets that fail, and agents in threads. No TRL, no vLLM."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from local_engine import Local
from scripted_store import Request, ScriptedStore
from waiting import until

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import MANIFESTS, Position, replica_key
from weightcast.channel.records import Heartbeat, Manifest, dump_record, load_record
from weightcast.engine.agent import Agent
from weightcast.engine.followers import Followers
from weightcast.engine.proof import prove
from weightcast.format.tensors import Bits, Copies
from weightcast.integrations.trl import Sync, WeightcastTransfer
from weightcast.store.base import Store
from weightcast.store.memory import MemoryStore

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Pairs = Iterable[tuple[str, Any]]

STRANGE_BF16 = (0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7F81, 0xFFC1, 0x7FFF, 0xFFA5)
"""Zeros, denormals, infinities and NaNs with payloads."""


class Trainer:
    """Calls a transfer as TRL 1.16 does: once when training begins, for each sync, and when it ends."""

    def __init__(self, transfer: WeightcastTransfer, tensors: Callable[[], Pairs]):
        self.transfer, self._tensors = transfer, tensors
        self.exhausted = 0
        self.model_version = 0

    def begin(self) -> None:
        self.transfer.init_weight_transfer()
        self.sync()

    def sync(self) -> Sync:
        self.transfer.pause()
        self.transfer.send_weights(self._stream())
        self.transfer.resume()
        self.model_version += 1
        assert self.transfer.last is not None
        return self.transfer.last

    def _stream(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self._tensors():
            yield name, tensor.detach()
        self.exhausted += 1

    def end(self) -> None:
        self.transfer.destroy()


def sync(transfer: WeightcastTransfer, tensors: Mapping[str, Any] | Pairs) -> Sync:
    transfer.pause()
    transfer.send_weights(iter(tensors.items() if isinstance(tensors, Mapping) else tensors))
    transfer.resume()
    assert transfer.last is not None
    return transfer.last


# -- buckets -----------------------------------------------------------------------------------------------------------


class Bucket(ScriptedStore):
    """A bucket that calls ``committed`` when a version is."""

    def __init__(self, committed: Callable[[Position], object] = lambda position: None):
        super().__init__(MemoryStore("bucket"))

        def create(request: Request, proceed: Callable[[], bool]) -> bool:
            made = proceed()
            if made:
                committed(load_record(Manifest, bytes(request.data)).position)
            return made

        self.on("create", MANIFESTS, create)

    def tell(self, position: Position, replica: str = "engine", pause: float | None = 0.01) -> None:
        """Write an engine's heartbeat."""
        word = Heartbeat(replica, position, time.time(), None, pause)
        self.store.put(replica_key(replica), dump_record(word))


class Attended(Bucket):
    """A bucket with an engine that has every version the moment it is committed."""

    def __init__(self) -> None:
        super().__init__(self.tell)


def versions(store: Store) -> list[int]:
    return list(Chain.open(store).versions())


def pulled(store: Store) -> dict[str, Bits]:
    """What a subscriber gets who begins with nothing."""
    table = Chain.open(store).channel.table
    held = Copies(table, {spec.name: np.zeros(spec.elements, spec.kind.word) for spec in table})
    with wc.Subscriber(store, held, threads=1) as subscriber:
        staged = subscriber.poll()
        if staged is not None:
            subscriber.apply(staged)
    return {spec.name: held.read(spec.name) for spec in table}


def holds(store: Store, tensors: Mapping[str, Any], dtype: str | None = "BF16") -> None:
    """The channel's head has these very tensors, float32 ones rounded to ``dtype``, and no others."""
    found = pulled(store)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert np.array_equal(found[name], bits(tensor, dtype)), name


def bits(tensor: Any, dtype: str | None = "BF16") -> Bits:
    """A tensor's wire bits, by way of numpy."""
    flat = tensor.detach().reshape(-1).contiguous()
    if flat.dtype == F32 and dtype is not None:
        return wc.round_to(dtype, flat.numpy())
    raw = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return raw.view(f"<u{flat.element_size()}")


def words(dtype: Any, *patterns: int) -> Any:
    """A tensor of these bits."""
    signed = torch.int32 if dtype == F32 else torch.int16
    unsigned = np.array(patterns, np.uint32 if dtype == F32 else np.uint16)
    return torch.from_numpy(unsigned.view(np.int32 if dtype == F32 else np.int16)).to(signed).view(dtype)


def model(dtype: Any = F32, seed: int = 0) -> dict[str, Any]:
    luck = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (40, 16), "layers.0.up.weight": (24, 16), "layers.0.norm.weight": (16,)}
    return {name: (0.02 * torch.randn(shape, generator=luck)).to(dtype) for name, shape in shapes.items()}


def step(tensors: Mapping[str, Any], seed: int) -> None:
    """Some elements move, in place."""
    luck = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        moves = 0.01 * torch.randn(tensor.shape, generator=luck)
        tensor += (moves * (torch.rand(tensor.shape, generator=luck) < 0.1)).to(tensor.dtype)


Opened = Callable[..., WeightcastTransfer]


def begun(transfer: WeightcastTransfer, tensors: Mapping[str, Any] | Pairs) -> WeightcastTransfer:
    transfer.init_weight_transfer()
    sync(transfer, tensors)
    return transfer


class Following:
    """An agent in a thread of its own, as `weightcast attach` runs it."""

    def __init__(self, store: Store, engine: Any, mirror: Path, replica: str = "engine-0"):
        self.agent = Agent(store, engine, mirror, replica=replica)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for _ in self.agent.follow(every=0.01, on_error=lambda error: None):
            pass

    def stop(self) -> None:
        self.agent.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.agent.close()

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def until_heard(store: Store) -> None:
    until(lambda: Followers(Chain.open(store)).now())


def publish(store: Store, weights: wc.Weights) -> None:
    """Another trainer's version."""
    with wc.Publisher(store, weights) as publisher:
        publisher.publish().result(30)


def must_be_live(engine: Local, store: Store, version: int) -> None:
    """The engine serves the version, and its live parameters are that to the last bit."""
    assert (engine.served, engine.paused) == (str(version), False)
    proof = prove(engine, Chain.open(store))
    assert (proof.version, dict(proof.wrong), dict(proof.unproven)) == (version, {}, {})
