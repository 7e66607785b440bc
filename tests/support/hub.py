"""A stand-in for the Hugging Face Hub on loopback: its routes for buckets and models, with Xet's contents beside them.

The real huggingface_hub and the real hf_xet are its clients, in this process and in others (`Hub.environment`). What
the live Hub does beyond what its client's source tells of it, nobody here knows.

    python tests/support/hub.py -- command …     runs a command with HF_* set for a stand-in of its own
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cas import Contents

OWNER = "tester"
TOKEN, READING = "hf_secretofthetest", "hf_secretofareader"
"""Of one who may do everything, and of one who may only read."""


@dataclass(frozen=True)
class Stored:
    """A file of a bucket; ``uploaded`` is in seconds since 1970."""

    hash: str
    size: int
    uploaded: float


@dataclass
class Hub:
    """What is stored, how to misbehave, and what was asked."""

    folder: Path
    url: str = ""
    token: str = TOKEN
    buckets: dict[str, dict[str, Stored]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    models: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    page: int = 25
    """Rows of a listing."""
    delays: dict[str, float] = field(default_factory=dict)
    """By the name of a route: seconds that it takes."""
    statuses: dict[str, int] = field(default_factory=dict)
    """By the name of a route: fails with that."""
    tells_missing: bool = False
    """Whether the deletion of what is not there is reported as a failure."""
    tells_times: bool = True
    tells_empty: bool = False
    """Whether a prefix that nothing begins with is answered with 404."""
    asked: list[str] = field(default_factory=list)
    """Names of routes, in the order of requests; those of contents begin with `xet`."""

    def __post_init__(self) -> None:
        (self.folder / "contents").mkdir(parents=True, exist_ok=True)
        self.contents = Contents(self.folder / "contents")
        self._server: http.server.ThreadingHTTPServer | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What lets every client of the Hub find it, and keeps it from all that is the user's own."""
        home = self.folder / "home"
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": self.token,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_XET_CACHE": str(home / "xet"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def make_bucket(self, name: str) -> str:
        """Make a bucket, or find it made; its URL."""
        self.buckets.setdefault(f"{OWNER}/{name}", {})
        return f"hf://buckets/{OWNER}/{name}"

    def make_model(self, name: str, folder: Path) -> str:
        """A repository with the files of a folder; its name."""
        self.models[f"{OWNER}/{name}"] = folder
        return f"{OWNER}/{name}"

    def commit_of(self, model: str) -> str:
        names = sorted(f"{path.name} {path.stat().st_size}" for path in self.models[model].iterdir())
        return hashlib.sha1("\n".join(names).encode()).hexdigest()

    def since(self, start: int, *, contents: bool = False) -> Counter[str]:
        """How often each route was asked for after the first ``start`` requests."""
        return Counter(name for name in self.asked[start:] if contents or not name.startswith("xet"))

    def start(self) -> None:
        port = urllib.parse.urlsplit(self.url).port or 0
        self._server = _Server(("127.0.0.1", port), type("Answers", (_Answers,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Be away: nothing answers until the next `start`, and all connections are broken."""
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()
        for connection in self._server.connections.copy():
            _hang_up(connection)


def _hang_up(connection: Any) -> None:
    try:
        connection.shutdown(2)
    except OSError:
        return  # hung up before


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: Any):
        self.connections: set[Any] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # clients that were killed
            super().handle_error(request, client_address)


class _RefusedError(Exception):
    """An answer that is none: status, the Hub's code for it, and words."""

    def __init__(self, status: int, code: str = "", words: str = "", **more: Any):
        self.status, self.code, self.words, self.more = status, code, words, more


class _Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: Hub

    def log_message(self, *arguments: object) -> None:  # type: ignore[override]
        pass

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        address = urllib.parse.urlsplit(self.path)
        parts = [urllib.parse.unquote(part) for part in address.path.strip("/").split("/")]
        query = dict(urllib.parse.parse_qsl(address.query))
        try:
            name, call = self._route(parts, query, body)
            self.hub.asked.append(name)
            time.sleep(self.hub.delays.get(name, 0.0))
            if name in self.hub.statuses:
                raise _RefusedError(self.hub.statuses[name], words="secret-dump of a server\n" * 3)
            self._send(200, *call())
        except _RefusedError as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.words.partition("\n")[0]}
            self._send(refused.status, json.dumps({"error": refused.words} | refused.more).encode(), headers)

    do_GET = do_POST = do_HEAD = _answer  # noqa: N815

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(206 if status == 200 and "Content-Range" in (headers or {}) else status)
        for name, value in (headers or {}).items():
            if value:
                self.send_header(name, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _route(self, parts: list[str], query: dict[str, str], body: bytes) -> tuple[str, Any]:
        """The name of the route, and what gives its answer: a body, and headers perhaps."""
        match self.command, *parts:
            case "POST", "api", "buckets", owner, bucket:
                return "create", lambda: self._create(f"{owner}/{bucket}", body)
            case "GET", "api", "buckets", owner, bucket:
                return "info", lambda: self._json(self._info(f"{owner}/{bucket}"))
            case "POST", "api", "buckets", owner, bucket, "paths-info":
                return "paths-info", lambda: self._paths_info(f"{owner}/{bucket}", json.loads(body)["paths"])
            case "GET", "api", "buckets", owner, bucket, "tree", *prefix:
                return "tree", lambda: self._tree(f"{owner}/{bucket}", "/".join(prefix), query)
            case "GET", "api", "buckets", owner, bucket, ("xet-read-token" | "xet-write-token") as kind:
                return kind.removeprefix("xet-"), lambda: self._xet_token(f"{owner}/{bucket}", writes="write" in kind)
            case "POST", "api", "buckets", owner, bucket, "batch":
                return "batch", lambda: self._batch(f"{owner}/{bucket}", body)
            case "HEAD", "buckets", owner, bucket, "resolve", key:
                return "resolve", lambda: self._resolve(f"{owner}/{bucket}", key)
            case "GET", "api", "models", owner, model, "revision", revision:
                return "model", lambda: self._model(f"{owner}/{model}", revision, sizes="blobs" in query)
            case "GET", "api", "models", owner, model, "tree", revision, *_:
                return "model-tree", lambda: self._model_tree(f"{owner}/{model}", revision)
            case (("GET" | "HEAD"), owner, model, "resolve", revision, file):
                return "model-file", lambda: self._model_file(f"{owner}/{model}", revision, file)
            case "POST", "v1", "xorbs", _, xorb:
                return "xet-xorb", lambda: self._json({"was_inserted": self.hub.contents.add_xorb(xorb, body) is None})
            case "POST", "v1", "shards":
                return "xet-shard", lambda: self._json({"result": int(self.hub.contents.add_shard(body) is None)})
            case "GET", "v1", "reconstructions", file:
                return "xet-read", lambda: self._reconstruction(file)
            case "GET", "xorb", xorb:
                return "xet-bytes", lambda: self._xorb(xorb)
        return "xet-other" if parts[0] in ("v1", "v2") else "unknown", self._nothing

    def _nothing(self) -> tuple[bytes]:
        raise _RefusedError(404, words="there is no such route")

    def _json(self, value: object, headers: dict[str, str] | None = None) -> tuple[bytes, dict[str, str]]:
        return json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})}

    # -- buckets -------------------------------------------------------------------------------------------------------

    def _bucket(self, bucket: str, *, writes: bool = False) -> dict[str, Stored]:
        who = self.headers.get("Authorization")
        if who not in (f"Bearer {TOKEN}", f"Bearer {READING}"):
            raise _RefusedError(401, words="Invalid username or password.")
        if bucket not in self.hub.buckets:
            raise _RefusedError(404, "RepoNotFound", "Repository not found")
        if writes and who != f"Bearer {TOKEN}":
            raise _RefusedError(403, words="You don't have the required permissions")
        return self.hub.buckets[bucket]

    def _tree(self, bucket: str, prefix: str, query: dict[str, str]) -> tuple[bytes, dict[str, str]]:
        stored = self._bucket(bucket)
        # In no order at all, as none is promised; but always the same.
        keys = sorted((key for key in stored.copy() if key.startswith(prefix)), key=lambda key: key[::-1])
        if not keys and prefix and self.hub.tells_empty:
            raise _RefusedError(404, "EntryNotFound", "Entry not found")
        start = int(query.get("cursor", 0))
        rows: list[dict[str, Any]] = []
        for key in keys[start : start + self.hub.page]:
            if (file := stored.get(key)) is None:
                continue
            rows.append(self._row(key, file))
        following = urllib.parse.urlencode({**query, "cursor": start + self.hub.page})
        link = f'<{self.hub.url}{urllib.parse.urlsplit(self.path).path}?{following}>; rel="next"'
        return self._json(rows, {"Link": link} if start + self.hub.page < len(keys) else {})

    def _row(self, key: str, file: Stored) -> dict[str, Any]:
        row = {"type": "file", "path": key, "size": file.size, "xetHash": file.hash, "mtime": _iso(1e9)}
        return row | ({"uploadedAt": _iso(file.uploaded)} if self.hub.tells_times else {})

    def _paths_info(self, bucket: str, paths: list[str]) -> tuple[bytes, dict[str, str]]:
        stored = self._bucket(bucket)
        return self._json([self._row(key, stored[key]) for key in paths if key in stored])

    def _create(self, bucket: str, body: bytes) -> tuple[bytes, dict[str, str]]:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise _RefusedError(401, words="Invalid username or password.")
        if bucket in self.hub.buckets:
            raise _RefusedError(409, words="You already created this bucket")
        self.hub.buckets[bucket] = {}
        if json.loads(body).get("visibility") == "private":
            self.hub.private.add(bucket)
        return self._json({"url": f"{self.hub.url}/buckets/{bucket}"})

    def _info(self, bucket: str) -> dict[str, Any]:
        sizes = [file.size for file in self._bucket(bucket).values()]
        row = {"id": bucket, "private": bucket in self.hub.private, "createdAt": _iso(1e9)}
        return row | {"size": sum(sizes), "totalFiles": len(sizes)}

    def _xet_token(self, bucket: str, *, writes: bool) -> tuple[bytes, dict[str, str]]:
        self._bucket(bucket, writes=writes)
        return self._json({"accessToken": "xet-of-the-test", "exp": int(time.time()) + 900, "casUrl": self.hub.url})

    def _batch(self, bucket: str, body: bytes) -> tuple[bytes, dict[str, str]]:
        stored, failed = self._bucket(bucket, writes=True), []
        operations = [json.loads(line) for line in body.splitlines()]
        for operation in operations:
            key = operation["path"]
            if operation["type"] == "addFile":
                size = self.hub.contents.size(operation["xetHash"])
                if size is None:
                    failed.append({"path": key, "error": "this was never uploaded"})
                else:
                    stored[key] = Stored(operation["xetHash"], size, time.time())
            elif stored.pop(key, None) is None and self.hub.tells_missing:
                failed.append({"path": key, "error": "File not found"})
        if failed and len(failed) == len(operations):
            raise _RefusedError(422, words="Nothing was done", failed=failed)
        return self._json({"success": not failed, "processed": len(operations), "failed": failed})

    def _resolve(self, bucket: str, key: str) -> tuple[bytes, dict[str, str]]:
        file = self._bucket(bucket).get(key)
        if file is None:
            raise _RefusedError(404, "EntryNotFound", "Entry not found")
        refresh = f'<{self.hub.url}/api/buckets/{bucket}/xet-read-token>; rel="xet-auth"'
        return b"", {"X-Linked-Size": str(file.size), "X-Xet-Hash": file.hash, "Link": refresh}

    # -- contents ------------------------------------------------------------------------------------------------------

    def _reconstruction(self, file: str) -> tuple[bytes, dict[str, str]]:
        found = self.hub.contents.reconstruction(file, self.headers.get("Range"), self.hub.url)
        if found is None:
            raise _RefusedError(404, words="no such file")
        return self._json(found)

    def _xorb(self, xorb: str) -> tuple[bytes, dict[str, str]]:
        wanted = self.headers["Range"]
        return self.hub.contents.read_xorb(xorb, wanted), {"Content-Range": f"{wanted.replace('=', ' ')}/*"}

    # -- models --------------------------------------------------------------------------------------------------------

    def _files(self, model: str, revision: str) -> Path:
        if model not in self.hub.models:
            raise _RefusedError(404, "RepoNotFound", "Repository not found")
        if model in self.hub.gated:
            raise _RefusedError(403, "GatedRepo", "Access to this model is restricted")
        if revision not in ("main", self.hub.commit_of(model)):
            raise _RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return self.hub.models[model]

    def _model(self, model: str, revision: str, *, sizes: bool) -> tuple[bytes, dict[str, str]]:
        files = sorted(self._files(model, revision).iterdir())
        rows = [{"rfilename": path.name} | ({"size": path.stat().st_size} if sizes else {}) for path in files]
        return self._json({"id": model, "sha": self.hub.commit_of(model), "siblings": rows})

    def _model_tree(self, model: str, revision: str) -> tuple[bytes, dict[str, str]]:
        files = sorted(self._files(model, revision).iterdir())
        rows = [{"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _etag(path)} for path in files]
        return self._json(rows)

    def _model_file(self, model: str, revision: str, file: str) -> tuple[bytes, dict[str, str]]:
        path = self._files(model, revision) / file
        if not path.is_file():
            raise _RefusedError(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": self.hub.commit_of(model), "ETag": f'"{_etag(path)}"'}
        if self.command == "HEAD":
            return b"", {**headers, "Content-Length": str(path.stat().st_size)}
        return path.read_bytes(), headers


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    """A stand-in that keeps everything below ``folder``, for as long as the context lasts."""
    hub = Hub(folder)
    hub.start()
    try:
        yield hub
    finally:
        hub.stop()


@contextmanager
def found(folder: Path) -> Iterator[Hub]:
    """The same, found by all that read HF_* in this process and in those that it starts."""
    with serving(folder) as hub:
        before = {name: os.environ.get(name) for name in hub.environment}
        os.environ.update(hub.environment)
        try:
            yield hub
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="weightcast-hub-") as place, serving(Path(place)) as stand_in:
        made = stand_in.make_bucket("bucket")
        command = [word.replace("BUCKET", made) for word in sys.argv[sys.argv.index("--") + 1 :]]
        sys.exit(subprocess.run(command, env={**os.environ, **stand_in.environment}).returncode)
