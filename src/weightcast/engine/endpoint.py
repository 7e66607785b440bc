"""An agent's HTTP endpoint: its status, metrics for Prometheus, and a wait for a version to be live.

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
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

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


class Watch(Collector):
    """Counts an agent's updates and errors, and wakes clients that wait for a version."""

    def __init__(self, agent: Agent):
        self._agent = agent
        self._changed = threading.Condition()
        self.registry = CollectorRegistry()
        self.registry.register(self)
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, buckets=_BUCKETS, registry=self.registry)
        self._phases = histogram("weightcast_phase_seconds", "Seconds that a phase of an update took", ["phase"])
        self._pauses = histogram("weightcast_pause_seconds", "Seconds that an update paused the engine")
        self._updates = counter("weightcast_updates_total", "Versions that became live")
        self._elements = counter("weightcast_written_elements_total", "Elements written by updates")
        self._errors = counter("weightcast_errors_total", "Rounds that ended in an error")

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Called by Prometheus' library, for every scrape."""
        version, lag, unproven = self._version, self._agent.lag, len(self._agent.unproven)
        for name, meaning, value in (
            ("version", "The live version; -1 if none", -1 if version is None else version),
            (
                "lag_versions",
                "From the live one to the mirror's newest; NaN if unknown",
                math.nan if lag is None else lag,
            ),
            ("unproven_tensors", "Tensors whose live bits cannot be read back", unproven),
        ):
            yield GaugeMetricFamily(f"weightcast_{name}", meaning, value)

    def updated(self, update: EngineUpdate) -> None:
        for phase, seconds in update.seconds.items():
            self._phases.labels(phase).observe(seconds)
        self._pauses.observe(update.pause)
        self._updates.inc()
        self._elements.inc(update.changed)
        with self._changed:
            self._changed.notify_all()

    def failed(self) -> None:
        self._errors.inc()

    @property
    def _version(self) -> int | None:
        position = self._agent.position  # once: the agent's thread may change it
        return None if position is None else position.version

    def status(self) -> dict[str, Any]:
        agent, position, last, error = self._agent, self._agent.position, self._agent.last, self._agent.trouble
        return {
            "engine": agent.engine.url,
            "channel": agent.subscriber.chain.store.url,
            "version": position.version if position else None,
            "digest": position.digest if position else None,
            "lag": agent.lag,
            "unproven": list(agent.unproven),
            "error": str(error) if error else None,
            "last": last.as_json() if last else None,
        }

    def wait(self, version: int, seconds: float) -> bool:
        """Whether the engine serves that version or a later one within so many seconds."""
        end = time.monotonic() + min(seconds, _LONGEST)
        with self._changed:
            while (live := self._version) is None or live < version:
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 1.0))
        return True


class Endpoint(ThreadingHTTPServer):
    """Serves a `Watch` until it is closed: one thread per connection, up to a limit."""

    daemon_threads = True
    request_queue_size = 2 * _CONNECTIONS  # so that a refused client gets its answer at once

    def __init__(self, watch: Watch, host: str, port: int, token: str | None, *, arrival: float = _ARRIVAL):
        """``arrival`` is how many seconds a request may take to arrive."""
        if not _is_loopback(host) and not token:
            hint = "Give --token-file, or listen on 127.0.0.1."
            raise UsageError(f"{host} can be reached by others", hint=hint)
        self.watch, self.token, self.arrival = watch, token, arrival
        self.waiting = threading.BoundedSemaphore(_WAITING)
        self._slots = threading.BoundedSemaphore(_CONNECTIONS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Requests)
        except OSError as error:
            raise UsageError(f"cannot listen on {host}:{port}: {error}", hint="Name another port.") from error
        self.port = int(self.server_address[1])
        self._thread = threading.Thread(target=self.serve_forever, name="weightcast-endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

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
    server: Endpoint

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Arriving(self.connection, self.server.arrival))

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except _TooLargeError:
            self.close_connection = True
            self.wfile.write(_bare(431, "Request Header Fields Too Large", "the request is too large"))

    def do_GET(self) -> None:
        token, watch, url = self.server.token, self.server.watch, urlsplit(self.path)
        given = self.headers.get("Authorization", "")
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            self._answer(401, {"error": "a bearer token is needed"})
        elif url.path == "/status":
            self._answer(200, watch.status())
        elif url.path == "/metrics":
            self._send(200, "text/plain; version=0.0.4", generate_latest(watch.registry))
        elif url.path == "/wait":
            self._wait(parse_qs(url.query))
        else:
            self._answer(404, {"error": "there are /status, /metrics and /wait"})

    def _wait(self, query: dict[str, list[str]]) -> None:
        version, seconds = (query.get(key, [""])[0] for key in ("version", "seconds"))
        if not _is_number(version, 12) or not _is_number(seconds or "0", 4):
            self._answer(400, {"error": "version and seconds are numbers"})
            return
        if not self.server.waiting.acquire(blocking=False):
            self._answer(503, {"error": f"{_WAITING} requests wait already"})
            return
        try:
            there = self.server.watch.wait(int(version), float(seconds or 0))
        finally:
            self.server.waiting.release()
        self._answer(200 if there else 503, self.server.watch.status())

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
