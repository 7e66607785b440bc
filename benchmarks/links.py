"""From `publish()` to verified on a follower, over links of a given rate and delay, with each codec in one run.

    python tests/support/rgw.py -- python benchmarks/links.py [--scale 1.0] [--rounds 3] [--links 100:20 1000:2]

`--links` are Mbit/s and ms of a round trip. A 596 M-parameter bf16 model (`speed.py` synthesises it), of which every
version changes 1 %; an S3 at AWS_ENDPOINT_URL, here a Ceph RGW, in which a bucket is made; one link between the writer
and the bucket, another one like it between the bucket and a follower that holds arrays and polls every 20 ms. The links
are proxies (`shaped_link.py`). A full copy is one file: put, fetched, its SHA-256 checked. Each codec publishes so many
rounds after two that do not count (with "auto" those are the two that try both codecs); the follower's bits are
compared at the end. Prints JSON: medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import numpy as np
import obstore
from obstore.store import S3Store
from shaped_link import shaped
from speed import qwen3_shapes, synthesise

import weightcast as wc
from weightcast.store import open_store
from weightcast.store.base import Store
from weightcast.store.download import fetch, summary

CODECS: tuple[wc.CodecChoice, ...] = ("plain", "gap", "banded", "auto")
WARM = 2


@contextmanager
def link_to(endpoint: str, bucket: str, mbit: float, ms: float) -> Iterator[Store]:
    """The bucket at the far end of a link."""
    there = urlsplit(endpoint)
    assert there.hostname is not None
    assert there.port is not None
    with shaped(there.hostname, there.port, mbit * 1e6 / 8, ms / 2000) as port:
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
        store = open_store(bucket)
        list(store.list("warm"))
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        yield store


class Follower:
    """Keeps arrays at the head, and writes down when each version was there."""

    def __init__(self, store: Store, weights: wc.Arrays):
        self.weights, self.arrived = weights, dict[int, float]()
        self._there = threading.Condition()
        self._subscriber = wc.Subscriber(store, weights)
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        for update in self._subscriber.follow(every=0.02):
            with self._there:
                self.arrived[update.position.version] = time.perf_counter()
                self._there.notify_all()

    def wait(self, version: int) -> float:
        """When a version was there."""
        with self._there:
            assert self._there.wait_for(lambda: version in self.arrived, 900)
            return self.arrived[version]

    def close(self) -> None:
        self._subscriber.stop()
        self._thread.join()
        self._subscriber.close()


def full_copy(writer: Store, reader: Store, weights: wc.Arrays, folder: Path) -> dict[str, object]:
    """The whole checkpoint, up and down."""
    made, back = folder / "full", folder / "back"
    with made.open("wb") as file:
        for spec in weights.table:
            file.write(np.ascontiguousarray(weights.read(spec.name)).data)
    sha256, size = summary(made)
    began = time.perf_counter()
    writer.put("full", made)
    fetch(reader, "full", size, sha256, back, durable=False)
    seconds = time.perf_counter() - began
    made.unlink()
    back.unlink()
    return {"bytes": size, "seconds": round(seconds, 2)}


def published(
    codec: wc.CodecChoice, writer: Store, follower: Follower, states: list[wc.Arrays], rounds: int
) -> dict[str, object]:
    """Rounds of a publisher with a codec; the states follow each other in turn."""
    seconds, nbytes, chosen = [], [], []
    with wc.Publisher(writer, states[1], codec=codec) as publisher:
        for _ in range(WARM + rounds):
            states.reverse()
            began = time.perf_counter()
            receipt = publisher.publish(weights=states[1])
            manifest = receipt.result()
            seconds.append(follower.wait(manifest.position.version) - began)
            nbytes.append(manifest.nbytes)
            chosen.append(manifest.codec)
    return {
        "bytes": int(median(nbytes[WARM:])),
        "seconds": round(median(seconds[WARM:]), 2),
        "most": round(max(seconds[WARM:]), 2),
        "codecs": chosen[WARM:],
    }


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    before, after = synthesise(qwen3_shapes(options.scale))
    states = [after, before]  # the last one is what the channel has
    results: dict[str, object] = {}
    endpoint, bucket = os.environ["AWS_ENDPOINT_URL"], make_bucket("links")
    wc.init(bucket + "/channel", before)
    held = wc.Arrays.copy_of(before)
    for mbit, ms in options.links:
        with ExitStack() as opened:
            writer, reader = (opened.enter_context(link_to(endpoint, bucket + "/channel", mbit, ms)) for _ in range(2))
            rows: dict[str, object] = {"full copy": full_copy(writer, reader, before, folder)}
            writer.delete("full")
            follower = Follower(reader, held)
            opened.callback(follower.close)
            for codec in CODECS:
                rows[codec] = published(codec, writer, follower, states, options.rounds)
                print(mbit, ms, codec, rows[codec], file=sys.stderr)
        exact = wc.fingerprint(held) == wc.fingerprint(states[1])
        results[f"{mbit:g} Mbit/s, {ms:g} ms"] = rows | {"every_bit_equal": exact}
    return {
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[1]:.0f}",
        "parameters": before.table.elements,
        "links": results,
    }


def make_bucket(name: str) -> str:
    """The URL of a bucket that is made, or was."""
    url = obstore.sign(S3Store(name, client_options={"allow_http": True}), "PUT", "", timedelta(minutes=1))
    with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=60):
        return f"s3://{name}"


def link(text: str) -> tuple[float, float]:
    mbit, _, ms = text.partition(":")
    return float(mbit), float(ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--links", type=link, nargs="+", default=[(100.0, 20.0), (1000.0, 2.0)])
    options = parser.parse_args()
    wc.warm_up()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(options, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
