"""What signatures cost: CPU time per version to commit and to read it, and requests, with and without them.

    python benchmarks/signing.py                prints JSON

The times are those of a writer's `Chain.commit` and of a reader's `Chain.manifest` on a store in memory, whole: reading
the version before and checking it, signing, checking what was signed, writing; and reading and checking. A signed
channel and one that is not take turns, version by version. The manifests have one object, and as many as a sharded
training of 512 ranks has. Requests are counted of a publisher and a subscriber, once both have begun.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keyring import AllowedKey, first_keyring
from weightcast.channel.keys import delta_key, keyring_key
from weightcast.channel.records import Manifest, ObjectRef
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


def milliseconds(call: Callable[[], object]) -> float:
    """Of CPU time, which other work on the machine adds little to."""
    began = time.process_time()
    call()
    return 1000 * (time.process_time() - began)


def begun(*, is_signed: bool) -> tuple[Store, Signing]:
    """A channel and what its writer trusts and signs with; a signed one has a key list with the writer's key."""
    root, writer = PrivateKey.new(), PrivateKey.new()
    trust, store = Trust(str(root.public)) if is_signed else None, MemoryStore()
    init_signed(Signing(trust, root if is_signed else None), store, wc.Arrays({"w": np.zeros(4, np.float32)}))
    if is_signed:
        ring = first_keyring(Chain.open(store).channel.id, [AllowedKey(writer.public, "writer")], root)
        store.put(keyring_key(1), ring.to_json())
    return store, Signing(trust, writer if is_signed else None)


def draft(chain: Chain, base: wc.Position, objects: int) -> Manifest:
    """The manifest of the version after ``base``."""
    position = wc.Position(base.version + 1, hashlib.sha256(str(base).encode()).hexdigest())
    folder = "0" * 16 if objects > 1 else None
    sums = [hashlib.sha256(f"{base} {number}".encode()).hexdigest() for number in range(objects)]
    refs = [ObjectRef(delta_key(position, sha256, folder), 1000, sha256) for sha256 in sums]
    return chain.draft(position, base, refs, "banded", 1, position.version, "writer")


def times(objects: int, versions: int) -> dict[str, Any]:
    """Committing and reading manifests of so many objects."""
    found: dict[tuple[str, bool], list[float]] = {}
    channels = {is_signed: begun(is_signed=is_signed) for is_signed in (True, False)}
    writers = {is_signed: Chain.open(store, signing) for is_signed, (store, signing) in channels.items()}
    readers = {is_signed: Chain.open(store, Signing(signing.trust)) for is_signed, (store, signing) in channels.items()}
    at = {is_signed: chain.manifest(0).position for is_signed, chain in writers.items()}
    for _ in range(versions):
        for is_signed, writer in writers.items():
            manifest = draft(writer, at[is_signed], objects)
            at[is_signed] = manifest.position
            read = partial(readers[is_signed].manifest, manifest.position.version)
            found.setdefault(("commit", is_signed), []).append(milliseconds(partial(writer.commit, manifest)))
            found.setdefault(("read", is_signed), []).append(milliseconds(read))
    medians = {which: statistics.median(times[1:]) for which, times in found.items()}
    rows: dict[str, Any] = {"objects": objects, "bytes": len(readers[True].read_manifest(versions)[1])}
    for call in ("commit", "read"):
        signed, unsigned = medians[call, True], medians[call, False]
        added = round(signed - unsigned, 4)
        rows[f"{call}_ms"] = {"signed": round(signed, 4), "unsigned": round(unsigned, 4), "added": added}
    rows["added_ms"] = round(rows["commit_ms"]["added"] + rows["read_ms"]["added"], 4)
    return rows


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
    parser.add_argument("--versions", type=int, default=500)
    options = parser.parse_args()
    found = {
        "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
        "version": [times(objects, options.versions) for objects in (1, 512)],
        "requests_per_version": {
            name: requests(100, is_signed=is_signed) for name, is_signed in (("signed", True), ("unsigned", False))
        },
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
