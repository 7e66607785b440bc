"""Versions of some hundred objects: fetched several at a time, and read with few files open."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from commands import weightcast
from ranks import ThreadPeers, errors_of, on_ranks
from scripted_store import Request, ScriptedStore
from several import publish_objects

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.disk.checkpoint import save
from weightcast.follow.subscriber import Subscriber
from weightcast.format.safetensors import FileSource
from weightcast.store.file import FileStore
from weightcast.store.memory import MemoryStore
from weightcast.upkeep.squash import squash
from weightcast.upkeep.verify import verify_deep

OBJECTS, FILES = 250, 64
"""Objects of each version, and files that may be open beside those that are."""


@contextmanager
def few_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + FILES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def weights_at(version: int) -> wc.Arrays:
    bits = np.random.default_rng(0).integers(0, 1 << 16, (4, 2 * OBJECTS), np.uint16)
    for number in range(version):
        bits[number % 4] ^= 1
    return wc.Arrays({"w": bits, "rest": np.zeros(3, np.float32)}, {"w": "BF16"})


def begun(store: wc.Store, versions: int = 3) -> Chain:
    wc.init(store, weights_at(0))
    chain = Chain.open(store)
    for version in range(1, versions + 1):
        folder = f"{version:016x}"
        publish_objects(chain, weights_at(version - 1), weights_at(version), folder, ["gap"] * OBJECTS)
    return chain


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many") / "channel"
    begun(FileStore(folder))
    return folder


def mirrored(channel: Path, folder: Path) -> wc.Fingerprint:
    with Subscriber(channel, folder / "mirror") as subscriber:
        subscriber.sync()
    with wc.Checkpoint(folder / "mirror") as checkpoint:
        return wc.fingerprint(checkpoint)


def held_in_arrays(channel: Path, _: Path) -> wc.Fingerprint:
    weights = weights_at(0)
    with Subscriber(channel, weights, threads=2) as subscriber:
        subscriber.sync()
    return wc.fingerprint(weights)


def held_by_a_model(channel: Path, _: Path) -> wc.Fingerprint:
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            first = torch.from_numpy(weights_at(0).read("w").view(np.int16).reshape(4, -1).copy())
            self.w = torch.nn.Parameter(first.view(torch.bfloat16))
            self.rest = torch.nn.Parameter(torch.zeros(3))

    model = Model()
    with Subscriber(channel, model, threads=2) as subscriber:
        subscriber.sync()
    bits = model.w.detach().view(torch.int16).numpy().view(np.uint16)
    return wc.fingerprint(wc.Arrays({"w": bits, "rest": model.rest.detach().numpy()}, {"w": "BF16"}))


def published_on(channel: Path, folder: Path) -> wc.Fingerprint:
    """A publisher that takes up an older checkpoint fetches the head."""
    save(weights_at(0), folder)
    weights = weights_at(0)
    with wc.Publisher(channel, weights, threads=1) as publisher:
        assert publisher.position.version >= 3
    return mirrored(channel, folder)


@pytest.mark.parametrize("follow", [mirrored, held_in_arrays, held_by_a_model, published_on])
def test_follower_reads_a_version_of_many_objects_with_few_files(
    follow: Callable[[Path, Path], wc.Fingerprint], channel: Path, tmp_path: Path
) -> None:
    with few_files():
        found = follow(channel, tmp_path)
    assert found == wc.fingerprint(weights_at(3))


def test_squash_and_verify_read_many_objects_with_few_files(tmp_path: Path) -> None:
    chain = begun(MemoryStore(), 4)
    with few_files():
        assert list(squash(chain, tmp_path / "squash", levels=(2,)))
        checked = list(verify_deep(chain, tmp_path / "verify"))
    assert checked
    assert not [finding for _, finding in checked if finding is not None]


@pytest.mark.parametrize("verb", ["pull", "show 3", "verify --deep", "log", "compare 2 3"])
def test_verb_reads_many_objects_with_few_files(verb: str, channel: Path, tmp_path: Path) -> None:
    name, *options = verb.split()
    with few_files():  # the process that is started has the same limit
        done = weightcast(name, channel, *([tmp_path / "mirror"] if name == "pull" else []), *options)
    assert done.code == 0, done


def test_anchor_of_many_ranks_is_assembled_with_few_files(tmp_path: Path) -> None:
    size, store = 100, MemoryStore()
    rows = np.arange(size * 4, dtype=np.float32).reshape(size, 4)

    def rank(number: int, peers: ThreadPeers) -> None:
        shards = wc.Shards([("w", wc.Box.of((number, 0), (1, 4)), rows[number : number + 1])])
        wc.Publisher(store, shards, group=peers, threads=1).close()

    assert not errors_of(on_ranks(size, rank, timeout=60.0))
    with few_files(), Subscriber(store, tmp_path / "mirror") as subscriber:
        subscriber.sync()
    with wc.Checkpoint(tmp_path / "mirror") as checkpoint:
        assert wc.fingerprint(checkpoint) == wc.fingerprint(wc.Arrays({"w": rows}))


def test_lack_of_open_files_is_not_the_fault_of_a_file() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            FileSource(Path(__file__))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_objects_of_a_version_are_fetched_in_parallel_and_not_all_at_once(tmp_path: Path) -> None:
    """The first four are not answered until all of them were asked for."""
    store = ScriptedStore(MemoryStore())
    begun(store, 1)
    together, lock, running, most = threading.Barrier(4), threading.Lock(), 0, 0

    def count(_: Request, proceed: Callable[[], object]) -> object:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        try:
            return proceed()
        finally:
            with lock:
                running -= 1

    counted = store.on("get", "deltas/", count)
    store.before("get", "deltas/", lambda _: together.wait(30), times=4)
    with Subscriber(store, weights_at(0), threads=1) as subscriber:
        subscriber.sync()
    assert counted.hits >= OBJECTS
    assert 4 <= most <= 8
