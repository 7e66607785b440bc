"""What it costs a replica that lags to reach the head of a long chain, against replaying every delta.

    python benchmarks/catchup.py [--url URL] [--params 2000000] [--versions 1000] [--keep FOLDER]
    python tests/support/rgw.py -- python benchmarks/catchup.py --url s3://BUCKET/FOLDER

Makes a chain of one anchor and ``--versions`` deltas in a temporary folder, or at ``--url``, and cuts the squashes that
are due. Then one replica after the other begins with a given lag, and one with nothing, each as a fresh process would.
Counted are objects downloaded, requests of any kind below the retries (a listing is one per 1,000
keys), the objects' bytes, and the same for a replay of all deltas. On S3 over http, a proxy counts what really went
over the wire. Every replica must end with the head's bits.

The weights are the bf16 bits of fp32 masters under an update of constant size and slowly turning direction, such that
as many change over 1, 8 and 24 steps as in a recorded GRPO run, and three times as many in the first.

``--keep`` leaves chain and weights in a folder and takes them from there in the next run. The table goes to stderr,
one JSON object to stdout; the exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import socketserver
import sys
import tempfile
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import ANCHORS, DELTAS, MANIFESTS, SQUASHES
from weightcast.disk.checkpoint import save
from weightcast.store.base import Data, Listed, Store
from weightcast.store.retry import Patient
from weightcast.upkeep.collect import reset
from weightcast.upkeep.squash import squash

LAGS = (1, 2, 3, 5, 8, 9, 16, 31, 64, 100, 200, 400, 500, 511, 512, 513, 700, 999, 1000)
TARGETS = {1: 0.011, 8: 0.06, 24: 0.125, 64: None, 512: None}
"""Steps, and the part of the weights that changed over so many in the recorded run."""

MOST_DOWNLOADS, MOST_REQUESTS, IDLE_BYTES, DELTA_WRITES = 15, 32, 1000, 3

UPDATE, TURN, FIRST = 4.05e-7, 0.95, 3.6
"""Standard deviation of a step, the correlation of one with the next, and how much larger the first is."""

PAGE = 1000
"""Keys that an S3 listing gives per request."""

OBJECTS = (ANCHORS, DELTAS, SQUASHES)
READS = ("get", "list")


# -- the chain -------------------------------------------------------------------------------------------------------


class Training:
    """Steps of an optimizer on fp32 masters; ``weights`` are their bf16 bits, changed in place."""

    def __init__(self, params: int, seed: int = 1):
        self._rng = np.random.default_rng(seed)
        shapes = {f"model.layers.{i}.proj.weight": (max(1, params // 4 // 256), 256) for i in range(4)}
        self._masters = {name: self._normal(shape) * np.float32(0.03) for name, shape in shapes.items()}
        self._masters["model.norm.weight"] = np.ones(256, np.float32)
        self._direction = {name: self._normal(master.shape) for name, master in self._masters.items()}
        bits = {name: wc.round_to("BF16", master) for name, master in self._masters.items()}
        self.weights = wc.Arrays(bits, dict.fromkeys(bits, "BF16"))
        self._steps = 0

    def _normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return self._rng.standard_normal(shape, np.float32)

    def step(self) -> None:
        """A fresh optimizer has no idea yet of how large gradients are: its first step is larger."""
        size = np.float32(UPDATE * (FIRST if self._steps == 0 else 1))
        for name, master in self._masters.items():
            direction = self._direction[name]
            direction *= np.float32(TURN)
            direction += np.float32((1 - TURN**2) ** 0.5) * self._normal(master.shape)
            master += size * direction
            self.weights.write(name, wc.round_to("BF16", master).reshape(-1))
        self._steps += 1


def generate(store: Store, training: Training, versions: int, states: Path, wanted: Iterable[int]) -> None:
    """Publish ``versions`` steps, cut the squashes that are due, and save the weights of the ``wanted`` versions."""
    states.mkdir(parents=True, exist_ok=True)
    keep = {0, versions, *wanted}
    wc.init(store, training.weights)
    with wc.Publisher(store, training.weights) as publisher:
        for version in range(versions + 1):
            if version:
                training.step()
                publisher.publish(step=version).result()
            if version in keep:
                folder = states / str(version)
                folder.mkdir()
                save(training.weights, folder)
    with tempfile.TemporaryDirectory(dir=states) as scratch:
        for _ in squash(Chain.open(store), Path(scratch)):
            pass


def state(states: Path, version: int) -> wc.Arrays:
    """The weights of a version, as they were trained."""
    with wc.Checkpoint(states / str(version)) as checkpoint:
        return wc.Arrays.copy_of(checkpoint)


def same_bits(a: wc.Weights, b: wc.Weights) -> bool:
    return a.table == b.table and all(np.array_equal(a.read(spec.name), b.read(spec.name)) for spec in a.table)


def density(a: wc.Arrays, b: wc.Arrays) -> float:
    """The part of the weights that differ."""
    return sum(np.count_nonzero(a.read(s.name) != b.read(s.name)) for s in a.table) / a.table.elements


# -- count -----------------------------------------------------------------------------------------------------------


class Counted:
    """A store that keeps a record of what it was asked: (verb, key) of every request, and the bytes of each key."""

    def __init__(self, store: Store):
        self._store = store
        self._lock = threading.Lock()
        self.requests: list[tuple[str, str]] = []
        self.received: Counter[str] = Counter()

    @property
    def url(self) -> str:
        return self._store.url

    def _note(self, verb: str, key: str, nbytes: int = 0) -> None:
        with self._lock:
            self.requests.append((verb, key))
            self.received[key] += nbytes

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        data = b""
        try:
            data = self._store.get(key, start, length)
        finally:
            self._note("get", key, len(data))
        return data

    def put(self, key: str, data: Data) -> None:
        self._note("put", key)
        self._store.put(key, data)

    def create(self, key: str, data: Data) -> bool:
        self._note("create", key)
        return self._store.create(key, data)

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        self._note("list", prefix)
        for i, listed in enumerate(self._store.list(prefix, after)):
            if i and i % PAGE == 0:
                self._note("list", prefix)
            yield listed

    def delete(self, key: str) -> None:
        self._note("delete", key)
        self._store.delete(key)


def counted(url: str | Path) -> tuple[Store, Counted]:
    """The store at ``url`` as `open_store` makes it, and the record of what passes below its retries."""
    opened = wc.open_store(url)
    assert isinstance(opened, Patient)
    record = Counted(opened.store)
    return Patient(record), record


class Wire:
    """What passed through a proxy: requests, and bytes to the client."""

    def __init__(self) -> None:
        self.requests = self.received = 0
        self.lock = threading.Lock()


@contextmanager
def tapped(url: str) -> Iterator[Wire | None]:
    """Lead requests for an S3 over http through a proxy that counts; None where there is nothing to tap."""
    variable = next((name for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") if os.environ.get(name)), "")
    endpoint = urllib.parse.urlsplit(os.environ.get(variable, ""))
    if not url.startswith("s3://") or endpoint.scheme != "http":
        yield None
        return
    wire = Wire()
    target = endpoint.hostname or "", endpoint.port or 80
    with _Proxy(("127.0.0.1", 0), _Pump) as proxy:
        proxy.target, proxy.wire = target, wire
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        before, os.environ[variable] = os.environ[variable], f"http://127.0.0.1:{proxy.server_address[1]}"
        try:
            yield wire
        finally:
            os.environ[variable] = before
            proxy.shutdown()


class _Proxy(socketserver.ThreadingTCPServer):
    daemon_threads = True
    target: tuple[str, int]
    wire: Wire


class _Pump(socketserver.BaseRequestHandler):
    """One connection: a thread for each direction."""

    def handle(self) -> None:
        assert isinstance(self.server, _Proxy)
        wire = self.server.wire
        with socket.create_connection(self.server.target) as server:
            answers = threading.Thread(target=self._answers, args=(server, wire), daemon=True)
            answers.start()
            end, tail = b" HTTP/1.1\r\n", b""
            while data := self.request.recv(1 << 16):
                with wire.lock:
                    wire.requests += (tail + data).count(end)
                tail = (tail + data)[1 - len(end) :]
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)
            answers.join()

    def _answers(self, server: socket.socket, wire: Wire) -> None:
        while data := server.recv(1 << 16):
            with wire.lock:
                wire.received += len(data)
            self.request.sendall(data)


# -- measure ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CatchUp:
    """How one replica got to the head."""

    lag: int | None
    """None: it began with nothing."""
    downloads: int
    requests: int
    nbytes: int
    """Of the objects."""
    seconds: float
    replay_bytes: int
    """All deltas from where it stood."""
    anchor_bytes: int
    """The anchor and all deltas after it."""
    exact: bool
    wire_requests: int | None
    wire_bytes: int | None

    @property
    def within_bars(self) -> bool:
        """Nobody fetches more than the cheaper replay; what is promised of counts is promised of the first version."""
        return self.exact and self.nbytes <= min(self.replay_bytes, self.anchor_bytes)


@dataclass(frozen=True)
class Sizes:
    """Bytes of what a chain holds: the anchor, and each version's delta."""

    anchor: int
    deltas: dict[int, int]

    @classmethod
    def of(cls, store: Store, head: int) -> Sizes:
        edges = Chain.open(store).edges(None, head)
        anchor = next(edge.nbytes for edge in edges if edge.base is None)
        return cls(anchor, {edge.result: edge.nbytes for edge in edges if edge.key.startswith(DELTAS)})

    def replay(self, start: int) -> int:
        return sum(nbytes for version, nbytes in self.deltas.items() if version > start)


def catch_up(url: str, states: Path, lag: int | None, head: int, sizes: Sizes, wire: Wire | None = None) -> CatchUp:
    """One replica, from opening the channel to being at the head."""
    with tempfile.TemporaryDirectory(prefix="weightcast-catchup-") as folder:
        held: wc.Arrays | Path = Path(folder) / "mirror" if lag is None else state(states, head - lag)
        store, record = counted(url)
        before = (wire.requests, wire.received) if wire else (0, 0)
        begin = time.perf_counter()
        with wc.Subscriber(store, held) as subscriber:
            staged = subscriber.poll()
            reached = subscriber.apply(staged) if staged else None
            seconds = time.perf_counter() - begin
            weights = subscriber.weights
            exact = weights is not None and same_bits(weights, state(states, head))
            exact = exact and reached is not None and reached.version == head
    fetched = {key: nbytes for key, nbytes in record.received.items() if key.startswith(OBJECTS) and nbytes}
    return CatchUp(
        lag,
        len(fetched),
        len(record.requests),
        sum(nbytes for key, nbytes in fetched.items() if not key.endswith("/anchor.json")),
        seconds,
        sizes.replay(head - lag) if lag is not None else sizes.anchor + sizes.replay(0),
        sizes.anchor + sizes.replay(0),
        exact,
        wire.requests - before[0] if wire else None,
        wire.received - before[1] if wire else None,
    )


@dataclass(frozen=True)
class Following:
    """What it costs to keep up with a channel, in requests."""

    delta_writes: tuple[str, ...]
    """What publishing one version writes, by kind."""
    delta_reads: tuple[str, ...]
    """What it reads to be sure that no other writer is active."""
    version_requests: tuple[str, ...]
    """What one new version costs a follower."""
    idle_requests: int
    """Of most polls that find nothing."""
    idle_mean: float
    """Of all: now and then one looks further."""
    idle_wire_bytes: float | None


def kind_of(request: tuple[str, str]) -> str:
    verb, key = request
    return f"{verb} {key.partition('/')[0]}"


def follow(url: str, params: int, wire: Wire | None = None, polls: int = 66) -> Following:
    """Publish a few versions to a follower, and let it poll in vain, in a channel of their own."""
    training = Training(params)
    replica = wc.Arrays.copy_of(training.weights)
    store, record = counted(url)
    writes, written = counted(url)
    wc.init(store, training.weights)
    with wc.Publisher(writes, training.weights) as publisher, wc.Subscriber(store, replica) as subscriber:
        for _ in range(3):
            training.step()
            written.requests.clear()
            publisher.publish().result()
            publisher.flush()
            _settle(written)
            record.requests.clear()
            staged = subscriber.poll()
            assert staged is not None
            subscriber.apply(staged)
            cost = tuple(map(kind_of, record.requests))
        kinds = [kind_of(request) for request in written.requests]
        costs, before = [], wire.received if wire else 0
        for _ in range(polls):
            record.requests.clear()
            assert subscriber.poll() is None
            costs.append(len(record.requests))
        ordinary = Counter(costs).most_common(1)[0][0]
        wire_bytes = (wire.received - before) / polls if wire else None
        assert same_bits(replica, training.weights)
    reset(store)
    writing = tuple(kind for kind in kinds if not kind.startswith(READS))
    reading = tuple(kind for kind in kinds if kind.startswith(READS))
    return Following(writing, reading, cost, ordinary, sum(costs) / polls, wire_bytes)


def _settle(record: Counted) -> None:
    """Wait for what a publisher does after its commit."""
    seen = -1
    while seen != len(record.requests):
        seen = len(record.requests)
        time.sleep(0.05)


# -- report ----------------------------------------------------------------------------------------------------------


def missed(catch_ups: Sequence[CatchUp], following: Following, versions: int) -> list[str]:
    """The bars that were not met, in words."""
    faults = [f"lag {c.lag}: not exact, or more bytes than a replay" for c in catch_ups if not c.within_bars]
    for c in catch_ups:
        requests = max(c.requests, c.wire_requests or 0)
        if c.lag == versions and (c.downloads > MOST_DOWNLOADS or requests > MOST_REQUESTS):
            faults.append(f"lag {c.lag}: {c.downloads} downloads, {requests} requests")
    if following.idle_requests != 1:
        faults.append(f"an idle poll is {following.idle_requests} requests")
    if following.idle_wire_bytes is not None and following.idle_wire_bytes >= IDLE_BYTES:
        faults.append(f"an idle poll receives {following.idle_wire_bytes:.0f} bytes")
    if len(following.delta_writes) != DELTA_WRITES:
        faults.append(f"a delta writes {', '.join(following.delta_writes)}")
    return faults


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows of equal keys as Markdown."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row.values()) + " |" for row in rows])


def row_of(c: CatchUp) -> dict[str, object]:
    row: dict[str, object] = {
        "lag, versions": "nothing held" if c.lag is None else c.lag,
        "downloads": c.downloads,
        "requests": c.requests,
        "bytes": f"{c.nbytes:,}",
        "of a replay": f"{c.nbytes / c.replay_bytes:.2f}",
        "of anchor + replay": f"{c.nbytes / c.anchor_bytes:.3f}",
        "seconds": f"{c.seconds:.2f}",
        "exact": "yes" if c.exact else "NO",
    }
    if c.wire_bytes is not None:
        row |= {"requests on the wire": c.wire_requests, "bytes on the wire": f"{c.wire_bytes:,}"}
    return row


def densities(states: Path, head: int) -> dict[int, float]:
    """Changed over so many steps up to the head, and at 0 over the first step."""
    newest = state(states, head)
    found = {steps: density(state(states, head - steps), newest) for steps in TARGETS if steps <= head}
    return {0: density(state(states, 0), state(states, 1))} | found


def report(facts: dict[str, object], changed: dict[int, float], catch_ups: list[CatchUp], following: Following) -> None:
    """The tables, for people."""
    names = {0: "the first"} | {steps: str(steps) for steps in TARGETS}
    targets = {steps: f"{100 * part:.1f} %" for steps, part in TARGETS.items() if part} | {0: "3 × an ordinary one"}
    rows = [
        {"steps": names[steps], "changed": f"{100 * part:.2f} %", "recorded": targets.get(steps, "")}
        for steps, part in changed.items()
    ]
    lines = [str(facts["store"]), table(rows), table([row_of(c) for c in catch_ups])]
    lines.append(f"publishing a version writes: {', '.join(following.delta_writes)}")
    lines.append(f"and reads: {', '.join(following.delta_reads) or 'nothing'}")
    lines.append(f"following one: {', '.join(following.version_requests)}")
    wire = "" if following.idle_wire_bytes is None else f", {following.idle_wire_bytes:.0f} bytes received"
    lines.append(f"idle poll: {following.idle_requests} request, {following.idle_mean:.2f} on average{wire}")
    print("\n\n".join(lines), file=sys.stderr)


# -- run -------------------------------------------------------------------------------------------------------------


def prepare(url: str, folder: Path, params: int, versions: int) -> bool:
    """Make the chain, unless ``folder`` says that it is made; whether it had to be."""
    note, recipe = folder / "made.json", {"url": url, "params": params, "versions": versions}
    if note.exists():
        if json.loads(note.read_text()) != recipe:
            raise SystemExit(f"{folder} holds another chain: {note.read_text()}")
        return False
    starts = {versions - lag for lag in (*LAGS, *TARGETS) if lag <= versions} | {1}
    generate(wc.open_store(url), Training(params), versions, folder / "states", starts)
    note.write_text(json.dumps(recipe))
    return True


def measure(url: str, folder: Path, params: int, versions: int) -> tuple[dict[str, object], list[str]]:
    """All facts, and the bars that were missed."""
    begin = time.perf_counter()
    chain, states = f"{url}/chain", folder / "states"
    made = prepare(chain, folder, params, versions)
    took = time.perf_counter() - begin
    sizes = Sizes.of(wc.open_store(chain), versions)
    with tapped(url) as wire:
        lags = [*(lag for lag in LAGS if lag <= versions), None]
        catch_ups = [catch_up(chain, states, lag, versions, sizes, wire) for lag in lags]
        following = follow(f"{url}/follow", params, wire)
    kinds = Counter(listed.key.partition("/")[0] for kind in (MANIFESTS, *OBJECTS) for listed in _listed(chain, kind))
    changed = densities(states, versions)
    facts: dict[str, object] = {
        "store": "a folder" if "://" not in url else url.partition("://")[0],
        "params": sum(array.elements for array in state(states, 0).table),
        "versions": versions,
        "made_seconds": took if made else None,
        "objects": dict(kinds),
        "density": {str(steps): part for steps, part in changed.items()},
        "catch_ups": [asdict(c) for c in catch_ups],
        "following": asdict(following),
        "missed": missed(catch_ups, following, versions),
    }
    report(facts, changed, catch_ups, following)
    return facts, missed(catch_ups, following, versions)


def _listed(url: str, kind: str) -> Iterator[Listed]:
    return wc.open_store(url).list(kind)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="where the chain is made; default: a temporary folder")
    parser.add_argument("--params", type=int, default=2_000_000)
    parser.add_argument("--versions", type=int, default=1000)
    parser.add_argument("--keep", type=Path, help="folder to keep chain and weights in")
    args = parser.parse_args()
    wc.warm_up()
    with ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weightcast-catchup-")))
        folder.mkdir(parents=True, exist_ok=True)
        url = (args.url or str(folder)).rstrip("/")
        if args.url and not args.keep:
            stack.callback(lambda: reset(wc.open_store(f"{url}/chain")))
        facts, faults = measure(url, folder, args.params, args.versions)
    print(json.dumps(facts, indent=1))
    for fault in faults:
        print(f"MISSED: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
