"""Hostile records: every field of every JSON object of a channel with hostile values, through every reader of it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from channels import channel_of, small_model

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import heartbeats, put_heartbeat
from weightcast.channel.keys import CHANNEL, HEAD, RECORD, WRITER, manifest_key, replica_key
from weightcast.channel.lease import lease
from weightcast.channel.records import Heartbeat
from weightcast.channel.retention import Retention
from weightcast.follow.mirror_folder import default_mirror
from weightcast.store.memory import MemoryStore
from weightcast.upkeep.collect import collect
from weightcast.upkeep.repair import repair
from weightcast.upkeep.verify import verify

HOSTILE: list[Any] = [
    None, True, -1, 0, 1 << 70, 9e11, 1e308, -0.5, "", "../../.ssh", "/etc/passwd", "a\0b", "\ud800", "\x1b[2J",
    "\u202e", "é" * 250, "x" * 250, "x" * 5000, [], {}, [[]], [None], ["../x", 1, "0" * 64], {"w": "w"},
    [[10**11, "f" * 64]], [0, "g" * 64],
]  # fmt: skip


def fields_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every field and every element in a record."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from fields_of(value[key], (*path, key))


def with_value(record: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = json.loads(json.dumps(record))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> MemoryStore:
    store = MemoryStore("hostile")
    channel_of(store, 2)
    chain = Chain.open(store)
    head = chain.head()
    assert head is not None
    put_heartbeat(chain, Heartbeat("host", head.position, 1.5, "an error", seconds={"fetch": 0.5}))
    return store


def read_all(store: MemoryStore, folder: Path) -> None:
    """Everything that reads a channel's records; a `WeightcastError` is a good answer, anything else is not."""
    weights = small_model()
    for read in readers(store, folder, weights):
        with suppress(wc.WeightcastError):
            read()


def readers(store: MemoryStore, folder: Path, weights: wc.Arrays) -> list[Callable[[], Any]]:
    def pulled() -> None:
        with wc.Subscriber(store, folder / "mirror", threads=1) as subscriber:
            staged = subscriber.poll()
            if staged is not None:
                subscriber.apply(staged)

    def published() -> None:
        with wc.Publisher(store, weights, threads=1):
            pass

    def chain() -> Chain:
        return Chain.open(store)

    return [
        pulled,
        published,
        lambda: default_mirror(chain().channel.id),
        lambda: list(verify(chain())),
        lambda: collect(chain(), Retention(), dry_run=True),
        lambda: heartbeats(chain()),
        lambda: lease(chain()),
        lambda: chain().references(),
        lambda: repair(store),
    ]


@pytest.mark.parametrize("kind", ["channel", "manifest", "anchored", "anchor", "head", "lease", "heartbeat"])
def test_hostile_values_raise_our_errors_and_write_nothing_elsewhere(
    kind: str, bucket: MemoryStore, ram: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(ram / "cache" / "inner"))
    anchor = next(listed.key for listed in bucket.list("anchors/") if listed.key.endswith(RECORD))
    keys = {
        "channel": CHANNEL, "manifest": manifest_key(2), "anchored": manifest_key(0), "anchor": anchor, "head": HEAD,
        "lease": WRITER, "heartbeat": replica_key("host"),
    }  # fmt: skip
    record = json.loads(bucket.get(keys[kind]))
    paths = list(fields_of(record))
    assert len(paths) >= 5
    rng = np.random.default_rng(7)
    for at, path in enumerate(paths):
        # Every value for every field would take minutes: each field gets some, and each value comes up many times.
        for value in (HOSTILE[i] for i in rng.choice(len(HOSTILE), 8, replace=False)):
            store = MemoryStore("copy")
            for listed in bucket.list(""):
                store.put(listed.key, bucket.get(listed.key))
            hostile = with_value(record, path, value)
            if kind == "channel" and path != ("id",):
                hostile["id"] = id_of(hostile)
            store.put(keys[kind], json.dumps(hostile).encode())
            folder = ram / f"{at}"
            folder.mkdir()
            read_all(store, folder)
            shutil.rmtree(folder)
    assert {path.name for path in ram.iterdir()} <= {"cache"}
    assert [path.name for path in ram.glob("cache/*")] in ([], ["inner"])


def id_of(channel: dict[str, Any]) -> str:
    """What an attacker would put there: the digest of a record that says something else."""
    rest = {key: value for key, value in channel.items() if key != "id"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:32]
