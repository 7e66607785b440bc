"""What signatures cost: milliseconds per version to sign and to check, and requests with and without them.

    python benchmarks/signing.py                prints JSON

A version is published and followed in memory, once the publisher and the subscriber have begun. The times of signing
and checking are those of the very calls, without the store and without the fetch: a writer signs and then checks its
own manifest, a reader checks it. The manifests have one object, and as many as a sharded training of 512 ranks has.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.guard import Guard
from weightcast.channel.keyring import AllowedKey, first_keyring
from weightcast.channel.keys import delta_key, keyring_key
from weightcast.channel.records import Manifest, ObjectRef, dump_record, load_record
from weightcast.channel.signed import signed
from weightcast.channel.signing import PrivateKey
from weightcast.channel.trust import Signing, Trust
from weightcast.publish.open import init_signed
from weightcast.store.base import Store
from weightcast.store.memory import MemoryStore


class Counting(MemoryStore):
    """Counts requests."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("get", "put", "create", "list", "delete"):
            self.count += 1
        return super().__getattribute__(name)


def milliseconds(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """The median and the slowest tenth of so many calls."""
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        found.append(1000 * (time.perf_counter() - began))
    found.sort()
    return {"median": round(statistics.median(found), 4), "p90": round(found[int(0.9 * len(found))], 4)}


def manifest_of(channel: str, version: int, objects: int) -> Manifest:
    digest = f"{version:064x}"
    position, base = wc.Position(version, digest), wc.Position(version - 1, f"{version - 1:064x}")
    folder = "0" * 16 if objects > 1 else None
    sums = [f"{number:016x}" + "0" * 48 for number in range(objects)]
    refs = tuple(ObjectRef(delta_key(position, sha256, folder), 1000, sha256) for sha256 in sums)
    return Manifest(channel, position, base, refs, "banded", 1, version, 1.5, "writer")


def begun(versions: int) -> tuple[MemoryStore, PrivateKey, Trust, str]:
    """A signed channel with a key list, and the key of its writer."""
    root, writer = PrivateKey.new(), PrivateKey.new()
    trust, store = Trust(str(root.public)), MemoryStore()
    init_signed(Signing(trust, root), store, wc.Arrays({"w": np.zeros(4, np.float32)}))
    channel = Chain.open(store).channel.id
    ring = first_keyring(channel, [AllowedKey(writer.public, "writer", 0, versions)], root)
    store.put(keyring_key(1), ring.to_json())
    return store, writer, trust, channel


def calls(objects: int, repeats: int) -> dict[str, Any]:
    """Signing and checking a manifest of so many objects."""
    store, writer, trust, channel = begun(10**6)
    chain = Chain.open(store, Signing(trust))
    assert isinstance(chain.guard, Guard)
    guard, bare = chain.guard, manifest_of(channel, 7, objects)

    def sign() -> Manifest:
        return signed(replace(bare, previous="0" * 64, keyring=guard.keyring_number), channel, writer)

    data = dump_record(sign())
    read = load_record(Manifest, data)
    signing = milliseconds(sign, repeats)
    checking = milliseconds(lambda: guard.check_manifest(read, data), repeats)
    both = round(signing["median"] + checking["median"], 4)
    return {
        "objects": objects,
        "bytes": len(data),
        "sign_ms": signing,
        "check_ms": checking,
        "sign_and_check_ms": both,
    }


def requests(versions: int, *, is_signed: bool) -> dict[str, float]:
    """Requests per version of a publisher, with a writer's key, and of a subscriber."""
    root, writer = PrivateKey.new(), PrivateKey.new()
    trust = Trust(str(root.public)) if is_signed else None
    store, held = Counting(), wc.Arrays({"w": np.zeros(4, np.float32)})
    weights = wc.Arrays({"w": np.zeros(4, np.float32)})
    init_signed(Signing(trust, root if is_signed else None), store, weights)
    if is_signed:
        ring = first_keyring(Chain.open(store).channel.id, [AllowedKey(writer.public, "writer")], root)
        store.put(keyring_key(1), ring.to_json())
    chain: Store = store
    options: dict[str, Any] = {"sign": writer, "trust": trust} if is_signed else {}
    counts = {"publish": 0, "follow": 0}
    with (
        wc.Publisher(chain, weights, threads=1, **options) as publisher,
        wc.Subscriber(chain, held, threads=1, trust=trust) as subscriber,
    ):
        for version in range(1, versions + 3):
            weights.read("w")[0] = version
            before = store.count
            publisher.publish().result(60)
            between = store.count
            subscriber.sync()
            if version > 2:  # both have begun
                counts["publish"] += between - before
                counts["follow"] += store.count - between
    return {name: count / versions for name, count in counts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--versions", type=int, default=100)
    options = parser.parse_args()
    found = {
        "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
        "manifest": [
            calls(objects, options.repeats if objects == 1 else options.repeats // 10) for objects in (1, 512)
        ],
        "requests_per_version": {
            "signed": requests(options.versions, is_signed=True),
            "unsigned": requests(options.versions, is_signed=False),
        },
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
