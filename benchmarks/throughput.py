"""How fast whole weights go into a bucket and come out of it, as multiples of obstore moving the same bytes.

    python benchmarks/throughput.py [--url URL] [--scale 1.0] [--repeats 5]
    python tests/support/rgw.py -- python benchmarks/throughput.py --url s3://BUCKET/FOLDER

A checkpoint folder of 596 M bf16 parameters of random bits in two shards, 1.2 GB, is begun as a channel with `init`
and brought into a mirror by a `Subscriber`: digests, proofs and all. Beside that, the same files go through `Store.put`
and `transfer.fetch` alone. What all of them are divided by is obstore with its defaults: `obstore.put` of each file,
`obstore.get` streamed to a file. What is written to this disk is synced on both sides, files and folders.

All take turns, so that a slow minute hits all; every turn begins with a synced disk, and what it reads is in the page
cache. Ratios are of medians. Without ``--url`` the bucket is a temporary folder, of which 6 GB are used.

The table goes to stderr, one JSON object to stdout; the exit code is 1 if a ratio of `init` or `Subscriber` is above
the bar. Timings of a busy machine mean nothing: the load at the beginning and at the end is printed too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import obstore
from catchup import same_bits, table
from obstore.store import LocalStore, S3Store
from speed import qwen3_shapes

import weightcast as wc
from weightcast.disk.checkpoint import INDEX, SINGLE, save
from weightcast.store.download import fetch, sha256_of
from weightcast.upkeep.collect import reset

BAR = 1.3

UPLOADS, DOWNLOADS = ("obstore.put", "init", "Store.put"), ("obstore.get", "Subscriber", "transfer.fetch")
BARRED = ("init", "Subscriber")


# -- what is moved ---------------------------------------------------------------------------------------------------


def make_checkpoint(folder: Path, scale: float) -> None:
    """A Hugging Face folder of two shards of random bits."""
    rng = np.random.default_rng(1)
    shapes = list(qwen3_shapes(scale).items())
    weight_map: dict[str, str] = {}
    for i, part in enumerate((shapes[: len(shapes) // 3], shapes[len(shapes) // 3 :])):
        bits = {name: np.frombuffer(rng.bytes(2 * int(np.prod(shape))), np.uint16) for name, shape in part}
        arrays = {name: bits[name].reshape(shape) for name, shape in part}
        save(wc.Arrays(arrays, dict.fromkeys(arrays, "BF16")), folder)
        name = f"model-{i + 1:05d}-of-00002.safetensors"
        (folder / SINGLE).rename(folder / name)
        weight_map |= dict.fromkeys(bits, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "random"}')


@dataclass(frozen=True)
class Moved:
    """A file of the checkpoint, and what a download of it is checked against."""

    path: Path
    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Moved:
        return cls(path, path.stat().st_size, sha256_of(path))


# -- obstore, as its manual has it ---------------------------------------------------------------------------------


Bucket = LocalStore | S3Store


def plain_store(url: str) -> Bucket:
    """The same place as `open_store` opens, by obstore alone."""
    if "://" not in url:
        return LocalStore(url, mkdir=True)
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return S3Store(bucket, prefix=prefix, client_options={"allow_http": True})


def plain_upload(bucket: Bucket, files: list[Moved], folder: Path | None) -> None:
    """``folder`` is where the bucket lies on this disk, if it does: what was put there is synced."""
    for file in files:
        obstore.put(bucket, f"plain/{file.path.name}", file.path)
        if folder is not None:
            sync(folder / "plain" / file.path.name)
    if folder is not None:
        sync(folder / "plain")
        sync(folder)


def plain_download(bucket: Bucket, files: list[Moved], folder: Path) -> None:
    folder.mkdir()
    for file in files:
        with (folder / file.path.name).open("wb") as out:
            for chunk in obstore.get(bucket, f"plain/{file.path.name}").stream():
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    sync(folder)
    sync(folder.parent)


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# -- turns -----------------------------------------------------------------------------------------------------------


class Turns:
    """One method per thing that is timed; each leaves the bucket and the disk as it needs them next."""

    def __init__(self, url: str, source: Path, scratch: Path):
        self.url, self.source, self.scratch = url, source, scratch
        self.files = [Moved.of(path) for path in sorted(source.iterdir())]
        self.bucket = plain_store(url)
        self.local = Path(url) if "://" not in url else None
        self.workers = wc.Workers()

    def actions(self) -> dict[str, Callable[[], None]]:
        """In the order in which they take turns: what downloads finds what was uploaded before."""
        out = self.scratch
        return {
            "obstore.put": lambda: plain_upload(self.bucket, self.files, self.local),
            "init": lambda: self._init(f"{self.url}/channel"),
            "Store.put": lambda: self._put(f"{self.url}/bare"),
            "obstore.get": lambda: plain_download(self.bucket, self.files, out / "plain"),
            "Subscriber": lambda: self._follow(f"{self.url}/channel", out / "mirror"),
            "transfer.fetch": lambda: self._fetch(f"{self.url}/bare", out / "bare"),
        }

    def _init(self, url: str) -> None:
        wc.init(url, self.source, workers=self.workers)

    def _put(self, url: str) -> None:
        store = wc.open_store(url)
        for file in self.files:
            store.put(file.path.name, file.path)

    def _follow(self, url: str, folder: Path) -> None:
        with wc.Subscriber(url, folder) as subscriber:
            staged = subscriber.poll()
            assert staged is not None
            subscriber.apply(staged)

    def _fetch(self, url: str, folder: Path) -> None:
        folder.mkdir()
        store = wc.open_store(url)
        for file in self.files:
            fetch(store, file.path.name, file.size, file.sha256, folder / file.path.name)

    def exact(self) -> bool:
        """Whether what lies in the mirror is what was published."""
        with wc.Checkpoint(self.source) as source, wc.Checkpoint(self.scratch / "mirror") as mirror:
            return same_bits(source, mirror)

    def clear(self) -> None:
        """Take away what a round has made."""
        for path in self.scratch.iterdir():
            shutil.rmtree(path)
        reset(wc.open_store(f"{self.url}/channel"))
        for folder in ("bare", "plain"):
            store = wc.open_store(f"{self.url}/{folder}")
            for file in self.files:
                store.delete(file.path.name)


def timed(action: Callable[[], None]) -> float:
    os.sync()
    time.sleep(0.5)
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def measure(turns: Turns, repeats: int) -> tuple[dict[str, list[float]], bool]:
    """Seconds of each, in turns; and whether every mirror had the right bits. A round before warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in turns.actions()}
    exact = True
    for _ in range(repeats + 1):
        for name, action in turns.actions().items():
            seconds[name].append(timed(action))
        exact = turns.exact() and exact
        turns.clear()
    return {name: found[1:] for name, found in seconds.items()}, exact


# -- report ----------------------------------------------------------------------------------------------------------


def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Medians over the median of the plain way."""
    found: dict[str, float] = {}
    for plain, *others in (UPLOADS, DOWNLOADS):
        found |= {name: median(seconds[name]) / median(seconds[plain]) for name in others}
    return found


def rows_of(seconds: dict[str, list[float]], nbytes: int) -> list[dict[str, object]]:
    found = ratios(seconds)
    return [
        {
            "what": name,
            "seconds, median": f"{median(took):.2f}",
            "seconds, least – most": f"{min(took):.2f} – {max(took):.2f}",
            "MB/s": f"{nbytes / median(took) / 1e6:.0f}",
            "of obstore": f"{found[name]:.2f}" if name in found else "1",
            "bar": BAR if name in BARRED else "",
        }
        for name, took in seconds.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a bucket; default: a temporary folder")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    wc.warm_up()
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weightcast-throughput-")))
        for name in ("source", "scratch"):
            (folder / name).mkdir()
        make_checkpoint(folder / "source", args.scale)
        turns = Turns((args.url or str(folder / "bucket")).rstrip("/"), folder / "source", folder / "scratch")
        seconds, exact = measure(turns, args.repeats)
    nbytes = sum(file.size for file in turns.files)
    facts: dict[str, Any] = {
        "store": args.url.partition("://")[0] if args.url else "a folder",
        "bytes": nbytes,
        "load": [load, os.getloadavg()[0]],
        "exact": exact,
        "seconds": seconds,
        "ratios": ratios(seconds),
    }
    print(f"{facts['store']}, {nbytes:,} bytes, load {load:.1f}\n\n{table(rows_of(seconds, nbytes))}", file=sys.stderr)
    print(json.dumps(facts, indent=1))
    return 0 if exact and all(facts["ratios"][name] <= BAR for name in BARRED) else 1


if __name__ == "__main__":
    sys.exit(main())
