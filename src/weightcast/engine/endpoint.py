"""An agent's http endpoint: its status, metrics for Prometheus, and a wait for a version to be live.

    GET /status                         JSON
    GET /metrics                        Prometheus
    GET /wait?version=41&seconds=30     200 once the engine serves version 41 or a later one, else 503

It listens on the loopback interface by default, and elsewhere only with a token. Connections, waiting requests, the
size of a request and the time it may take to arrive are bounded; a request that exceeds a bound gets an error.
"""

from __future__ import annotations

import hmac
import io
import ipaddress
import json
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from weightcast.engine.agent import Agent
from weightcast.engine.update import EngineUpdate
from weightcast.errors import UsageError

_LONGEST = 600.0

_CONNECTIONS, _WAITING = 64, 32
"""Connections at a time, and how many of them may be inside `/wait`: waiting clients leave slots to others."""

_REQUEST = 1 << 14
"""Bytes of a request line with its headers."""

_ARRIVAL = 10.0
"""Seconds in which a request must have arrived."""

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Watch:
    """Counts what an agent does, and wakes clients that wait for a version."""

    def __init__(self, agent: Agent):
        self._agent = agent
        self._changed = threading.Condition()
        self.registry = CollectorRegistry()
        self._phases = Histogram(
            "weightcast_phase_seconds",
            "Time of a phase of an update",
            ["phase"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._pauses = Histogram(
            "weightcast_pause_seconds", "Time that the engine stood still", buckets=_BUCKETS, registry=self.registry
        )
        self._updates = Counter("weightcast_updates", "Versions that became live", registry=self.registry)
        self._elements = Counter("weightcast_elements", "Elements written by updates", registry=self.registry)
        self._troubles = Counter("weightcast_troubles", "Rounds that ended in an error", registry=self.registry)
        version = Gauge("weightcast_version", "The version that is live; -1 if none", registry=self.registry)
        version.set_function(lambda: -1 if agent.position is None else agent.position.version)
        behind = Gauge("weightcast_behind", "Versions from the live one to the newest known", registry=self.registry)
        behind.set_function(lambda: agent.behind or 0)
        unproven = Gauge("weightcast_unproven", "Tensors that cannot be read back", registry=self.registry)
        unproven.set_function(lambda: len(agent.unproven))

    def took(self, update: EngineUpdate) -> None:
        for phase, seconds in update.seconds.items():
            self._phases.labels(phase).observe(seconds)
        self._pauses.observe(update.pause)
        self._updates.inc()
        self._elements.inc(update.changed)
        with self._changed:
            self._changed.notify_all()

    def failed(self) -> None:
        self._troubles.inc()

    def status(self) -> dict[str, Any]:
        agent, last = self._agent, self._agent.last
        return {
            "engine": agent.engine.url,
            "channel": agent.subscriber.chain.store.url,
            "version": None if agent.position is None else agent.position.version,
            "digest": None if agent.position is None else agent.position.digest,
            "behind": agent.behind,
            "unproven": list(agent.unproven),
            "error": str(agent.trouble) if agent.trouble else None,
            "last": None
            if last is None
            else {
                "version": last.position.version,
                "changed": last.changed,
                "reloaded": last.reloaded,
                "pause": round(last.pause, 6),
                "seconds": {phase: round(seconds, 6) for phase, seconds in last.seconds.items()},
            },
        }

    def wait(self, version: int, seconds: float) -> bool:
        """Whether the engine serves that version or a later one within so many seconds."""
        end = time.monotonic() + min(seconds, _LONGEST)
        with self._changed:
            while self._agent.position is None or self._agent.position.version < version:
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 1.0))
        return True


class Endpoint:
    """Serves a `Watch` from a thread until it is closed."""

    def __init__(self, watch: Watch, host: str, port: int, token: str | None, *, arrival: float = _ARRIVAL):
        """``arrival`` is how many seconds a request may take to arrive."""
        if not _is_loopback(host) and not token:
            hint = "Give --token-file, or listen on 127.0.0.1."
            raise UsageError(f"{host} can be reached by others", hint=hint)

        class Requests(_Requests):
            pass

        Requests.watch, Requests.token, Requests.timeout = watch, token, arrival
        Requests.waiting = threading.BoundedSemaphore(_WAITING)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            kind = type("Server", (_Server,), {"address_family": family})
            self._server = kind((host, port), Requests)
        except OSError as error:
            raise UsageError(f"cannot listen on {host}:{port}: {error}", hint="Name another port.") from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="weightcast-endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    """One thread per connection, up to a limit; the next connection is refused at once."""

    daemon_threads = True
    request_queue_size = 2 * _CONNECTIONS  # so that a refused client gets its answer at once

    def __init__(self, *args: Any) -> None:
        self._slots = threading.BoundedSemaphore(_CONNECTIONS)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            request.setblocking(False)  # the accepting thread must not block
            with suppress(OSError):
                request.send(_bare(503, "Service Unavailable", "too many connections"))
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that disconnects during a request is not worth a traceback."""


class _TooLargeError(Exception):
    """A request exceeds the size limit."""


class _Arriving(io.RawIOBase):
    """What a client sends, up to a number of bytes and a deadline."""

    def __init__(self, connection: socket.socket, seconds: float):
        self._connection, self._seconds = connection, seconds
        self._deadline = time.monotonic() + seconds
        self._left = _REQUEST

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the request did not arrive in time")
        if self._left <= 0:
            raise _TooLargeError
        self._connection.settimeout(seconds)
        count = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._connection.settimeout(self._seconds)  # for the answer
        self._left -= count
        return count


class _Requests(BaseHTTPRequestHandler):
    watch: Watch
    token: str | None
    waiting: threading.BoundedSemaphore
    timeout: ClassVar[float]

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Arriving(self.connection, self.timeout))

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except _TooLargeError:
            self.close_connection = True
            self.wfile.write(_bare(431, "Request Header Fields Too Large", "the request is too large"))

    def do_GET(self) -> None:
        if self.token and not hmac.compare_digest(
            self.headers.get("Authorization", "").encode(), f"Bearer {self.token}".encode()
        ):
            self._answer(401, {"error": "a bearer token is needed"})
            return
        url = urlsplit(self.path)
        if url.path == "/status":
            self._answer(200, self.watch.status())
        elif url.path == "/metrics":
            self._send(200, "text/plain; version=0.0.4", generate_latest(self.watch.registry))
        elif url.path == "/wait":
            self._wait(parse_qs(url.query))
        else:
            self._answer(404, {"error": "there are /status, /metrics and /wait"})

    def _wait(self, query: dict[str, list[str]]) -> None:
        version, seconds = (query.get(key, [""])[0] for key in ("version", "seconds"))
        if not _is_number(version, 12) or not _is_number(seconds or "0", 4):
            self._answer(400, {"error": "version and seconds are numbers"})
            return
        if not self.waiting.acquire(blocking=False):
            self._answer(503, {"error": f"{_WAITING} requests wait already"})
            return
        try:
            there = self.watch.wait(int(version), float(seconds or 0))
        finally:
            self.waiting.release()
        self._answer(200 if there else 503, self.watch.status())

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(body).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Requests are not logged."""


def _bare(status: int, reason: str, problem: str) -> bytes:
    """A complete response, for clients whose request was not read."""
    body = json.dumps({"error": problem})
    head = f"HTTP/1.0 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\nConnection: close\r\n\r\n{body}".encode()


def _is_number(text: str, digits: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= digits


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
