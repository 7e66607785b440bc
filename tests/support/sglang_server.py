"""A server with the routes of SGLang that change weights, as its source has them (engine/reload/sglang.py)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - numpy, and so safetensors, knows bfloat16 by it
from safetensors import safe_open

import weightcast as wc

Model = dict[str, bytes]
"""The bits of a model by the names of its tensors."""


def bits_of(weights: wc.Weights) -> Model:
    return {spec.name: weights.read(spec.name).tobytes() for spec in weights.table}


class Refused(Exception):  # noqa: N818 - it is what a loader says, not an error of ours
    """Raised in the middle of a load, with the message."""


class Died(Exception):  # noqa: N818
    """Raised in the middle of a load: the connection ends without an answer."""


class SGLang:
    """A server that may be slow, fail, die and restart. Requests for updates wait for each other, as SGLang's do.

    ``calls`` lists the requests that change something, and ``loads`` the bits that each load led to. In the middle of
    one ``halfway`` is called; it may raise `Refused` or `Died`. ``answers`` replaces the answers to a path:
    status and body. With a ``key`` no request is answered without it.
    """

    def __init__(self, weights: wc.Weights, *, key: str | None = None):
        self.weights, self.version = bits_of(weights), "default"
        self.key = key
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.loads: list[Model] = []
        self.halfway: Callable[[Path], object] = lambda folder: None
        self.answers: dict[str, tuple[int, bytes]] = {}
        self._loading = threading.Lock()
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def start(self) -> None:
        owner = self

        class Handler(_Handler):
            server_of = owner

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        """Nothing listens any more."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def restart(self, weights: wc.Weights) -> None:
        """Another process under the same address: it knows nothing of what was before."""
        self.stop()
        self.weights, self.version = bits_of(weights), "default"
        self.start()

    def update(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._loading:
            found: Model = {}
            try:
                self._read(Path(body["model_path"]), found)
            except Refused as refusal:
                self.weights = self.weights | found  # whatever its message says: it "rolls back" to the new folder
                message = f"Failed to update weights: {refusal}.\nRolling back to original weights."
                return 400, {"success": False, "message": message, "num_paused_requests": 0}
            self.weights = found
            self.loads.append(found)
            self.version = body.get("weight_version", self.version)
        message = f"Succeeded to update model weights. Weight version updated to {self.version}."
        return 200, {"success": True, "message": message, "num_paused_requests": 0}

    def _read(self, folder: Path, found: Model) -> None:
        files = sorted(folder.glob("*.safetensors"))
        names = [(file, name) for file in files for name in keys_of(file)]
        if not names:
            raise Refused(f"Cannot find any model weights with `{folder}`")
        for i, (file, name) in enumerate(names):
            if i == len(names) // 2:
                self.halfway(folder)
            with safe_open(file, "np") as weights:
                found[name] = weights.get_tensor(name).tobytes()


def keys_of(file: Path) -> list[str]:
    with safe_open(file, "np") as weights:
        return list(weights.keys())


class _Handler(BaseHTTPRequestHandler):
    server_of: SGLang

    def do_GET(self) -> None:
        engine = self.server_of
        if self._refused():
            return
        if self.path == "/model_info":
            self.answer(200, {"model_path": "base", "is_generation": True, "weight_version": engine.version})
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        engine = self.server_of
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        engine.calls.append((self.path, body))
        if self._refused():
            return
        if self.path == "/update_weights_from_disk":
            with suppress(Died):
                self.answer(*engine.update(body))
        elif self.path == "/update_weight_version":
            engine.version = body["new_version"]
            self.answer(200, {"success": True, "message": "", "new_version": engine.version})
        else:
            self.answer(404, {"detail": "Not Found"})

    def _refused(self) -> bool:
        engine = self.server_of
        if engine.key is not None and self.headers.get("Authorization") != f"Bearer {engine.key}":
            self.answer(401, {"error": "Unauthorized"})
            return True
        if self.path in engine.answers:
            status, data = engine.answers[self.path]
            self.send(status, data)
            return True
        return False

    def answer(self, status: int, body: dict[str, Any]) -> None:
        self.send(status, json.dumps(body).encode())

    def send(self, status: int, data: bytes) -> None:
        with suppress(ConnectionError):  # nobody waits for it any more
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Location", "/model_info")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(weights: wc.Weights, *, key: str | None = None) -> Iterator[SGLang]:
    engine = SGLang(weights, key=key)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
