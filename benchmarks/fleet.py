"""A fleet: one publisher, two regional copies, 30 followers, and a region whose bucket is taken away for a minute.

    python benchmarks/fleet.py [--followers 30] [--versions 25] [--every 6] [--away 60]

Everything but the publisher is a process of its own: `weightcast copy --follow` twice, and `weightcast pull --follow`
for each follower, half of them in each region, with the other region's copy as the second choice. Buckets are folders,
which each process but the publisher reads through a web server that counts requests and bytes. The channel is signed,
and each follower trusts its root; one more trusts another key, and must end with nothing. A third of the way in, the
first region's server stops for a minute, in which its followers have to read elsewhere. In the end every follower's
files are digested. Prints JSON: whether all are at the head, and a table of what each bucket served against what the
plan predicts: each copy fetches the anchor and each delta once from the home, each follower once from a copy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.store import open_store

COMMAND = (sys.executable, "-m", "weightcast")
KINDS = ("manifests", "deltas", "anchors")


class Served:
    """A folder on the web, which can go away and come back, and counts what it serves."""

    def __init__(self, folder: Path):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.requests, self.nbytes = Counter[str](), Counter[str]()
        self._server = self._listen(0)
        self.port = self._server.server_port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def count(self, path: str, nbytes: int) -> None:
        kind = path.lstrip("/").partition("/")[0]
        name = kind if kind in KINDS else "other"
        self.requests[name] += 1
        self.nbytes[name] += nbytes

    def _listen(self, port: int) -> ThreadingHTTPServer:
        class Server(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True

        server = Server(("127.0.0.1", port), partial(_Handler, self.count, directory=str(self.folder)))
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
        return server

    def away(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def back(self) -> None:
        self._server = self._listen(self.port)


class _Handler(SimpleHTTPRequestHandler):
    """Answers with files, and with ranges of them as the followers ask: without ranges, so each is sent whole."""

    def __init__(self, count: Callable[[str, int], None], *arguments: object, directory: str):
        self._count = count
        super().__init__(*arguments, directory=directory)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        self._count(self.path, path.stat().st_size if path.is_file() else 0)
        super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def running(*arguments: str | Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command until the block ends; then SIGTERM."""
    with log.open("wb") as out, subprocess.Popen([*COMMAND, *arguments], stdout=out, stderr=subprocess.STDOUT) as child:
        try:
            yield child
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(60)
            except subprocess.TimeoutExpired:
                child.kill()


def key_in(folder: Path, name: str) -> tuple[Path, str]:
    """A new private key's file, and its public key."""
    path = folder / f"{name}.key"
    subprocess.run([*COMMAND, "key", "new", path], check=True, stdout=subprocess.DEVNULL)
    return path, path.with_name(f"{path.name}.pub").read_text().strip()


def model(elements: int) -> wc.Arrays:
    rng = np.random.default_rng(0)
    arrays = {
        f"layer.{i}.weight": wc.round_to("BF16", rng.standard_normal((elements // 8 // 256, 256), np.float32))
        for i in range(8)
    }
    return wc.Arrays(arrays, dict.fromkeys(arrays, "BF16"))


def train(weights: wc.Arrays, rng: np.random.Generator) -> None:
    """One per cent of the weights move by one step."""
    for spec in weights.table:
        bits = weights.read(spec.name).reshape(-1)
        bits[rng.random(bits.size, np.float32) < 0.01] ^= 1


def versions_of(folders: list[Path]) -> list[int | None]:
    """The version that each follower's log says last."""
    found: list[int | None] = []
    for folder in folders:
        lines = [json.loads(line) for line in folder.with_suffix(".log").read_text().splitlines() if line[:1] == "{"]
        found.append(next((line["version"] for line in reversed(lines) if line["event"] == "version"), None))
    return found


def wait_for(folders: list[Path], version: int, seconds: float) -> bool:
    """Whether all followers came to a version in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all(at is not None and at >= version for at in versions_of(folders)):
            return True
        time.sleep(2)
    return False


def measure(options: argparse.Namespace, root: Path) -> dict[str, object]:
    weights, rng = model(options.elements), np.random.default_rng(1)
    home, east, west = (Served(root / name) for name in ("home", "east", "west"))
    (root_key, trusted), (writer_key, writer), (_, stranger) = (
        key_in(root, name) for name in ("root", "writer", "other")
    )
    wc.init(home.folder, weights, sign=None if options.unsigned else root_key)
    if not options.unsigned:
        add = ("key", "add", home.folder, writer, "--role", "writer", "--sign", root_key)
        subprocess.run([*COMMAND, *add], check=True, stdout=subprocess.DEVNULL)
    trusting = () if options.unsigned else ("--trust", trusted)
    times: dict[str, float] = {}
    commits: list[float] = []
    zero = time.monotonic()
    folders = [root / f"follower-{i:02}" for i in range(options.followers)]
    with ExitStack() as opened:
        for region in (east, west):
            log = root / f"{region.folder.name}.log"
            opened.enter_context(running("copy", home.url, region.folder, "--follow", "--json", log=log))
        while not all((region.folder / "index.json").exists() for region in (east, west)):
            time.sleep(0.5)
        times["followers start"] = time.monotonic() - zero
        for i, folder in enumerate(folders):
            near, far = (east, west) if i % 2 else (west, east)
            sources = ("--near", near.url, "--near", far.url)
            pull = ("pull", home.url, folder, "--follow", "--every", "2", "--threads", "1", "--json")
            opened.enter_context(running(*pull, *sources, *trusting, log=folder.with_suffix(".log")))
        alien = root / "alien"
        sources = ("--near", east.url, "--near", west.url)
        refused = subprocess.run(
            [*COMMAND, "pull", home.url, alien, *sources, "--trust", stranger], capture_output=True
        )
        assert wait_for(folders, 0, 900), "not all followers have begun"
        times["followers begun"] = time.monotonic() - zero
        sign, trust = (None, None) if options.unsigned else (writer_key, trusted)
        publisher = opened.enter_context(wc.Publisher(home.folder, weights, threads=1, sign=sign, trust=trust))
        away = None
        for number in range(1, options.versions + 1):
            train(weights, rng)
            publisher.publish(step=number)
            commits.append(time.monotonic() - zero)
            if number == options.versions // 3:
                east.away()
                away = time.monotonic()
                times["away"] = away - zero
            time.sleep(options.every)
            if away is not None and time.monotonic() - away >= options.away:
                east.back()
                times["back"] = time.monotonic() - zero
                away = None
        if away is not None:
            time.sleep(max(0.0, options.away - (time.monotonic() - away)))
            east.back()
            times["back"] = time.monotonic() - zero
        head = publisher.flush()
        arrived = wait_for(folders, head.version, 300)
        times["end"] = time.monotonic() - zero
        served = {
            served.folder.name: {kind: [served.requests[kind], served.nbytes[kind]] for kind in (*KINDS, "other")}
            for served in (home, east, west)
        }
    digests = []
    for folder in folders:
        with wc.Checkpoint(folder) as files:
            digests.append(wc.fingerprint(files).digest)
    chain = Chain.open(open_store(home.folder))
    deltas = sum(chain.manifest(version).nbytes for version in chain.versions(0))
    anchor = sum(edge.nbytes for edge in chain.anchor_edges())
    return {
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[1]:.0f}",
        "parameters": weights.table.elements,
        "versions": head.version,
        "followers": len(folders),
        "at_the_head": sum(digest == head.digest for digest in digests),
        "all_arrived": arrived,
        "follower_with_another_key": {
            "exit_code": refused.returncode,
            "files": sorted(path.name for path in alien.glob("*.safetensors")),
        },
        "served": served,
        "times": times,
        "commits": commits,
        "delta_bytes": [chain.manifest(version).nbytes for version in chain.versions(0)],
        "anchor_bytes": anchor,
        "predicted_bytes": {
            "home": 2 * (deltas + anchor),
            "east and west": len(folders) * (deltas + anchor),
            "without copies, home": len(folders) * (deltas + anchor),
        },
        "object_bytes": {
            "home": home.nbytes["deltas"] + home.nbytes["anchors"],
            "east and west": sum(side.nbytes[kind] for side in (east, west) for kind in ("deltas", "anchors")),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--followers", type=int, default=30)
    parser.add_argument("--versions", type=int, default=25)
    parser.add_argument("--every", type=float, default=6.0, help="seconds between versions")
    parser.add_argument("--away", type=float, default=60.0, help="seconds without the first region's bucket")
    parser.add_argument("--elements", type=int, default=1 << 21)
    parser.add_argument("--unsigned", action="store_true", help="without keys, but for the follower that trusts one")
    options = parser.parse_args()
    wc.warm_up()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(options, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
