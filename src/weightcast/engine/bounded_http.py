"""An HTTP server whose connections, sizes of requests and times of their arrival are bounded.

It listens on a socket of this host or on an address; a request that exceeds a bound gets an error. A connection counts
as let in once its request has arrived with the token. Of the others the oldest makes way when there are too many, so
that idle ones keep nobody out.
"""

from __future__ import annotations

import hmac
import io
import json
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from weightcast.engine.address import is_loopback
from weightcast.errors import UsageError

CONNECTIONS = 64
"""At a time."""

_HEAD = 1 << 14
"""Bytes of a request line with its headers."""

ARRIVAL = 10.0
"""Seconds in which the head of a request must have arrived, and then its body."""

_LONGEST_PATH = 107
"""Bytes of a socket's path; a limit of the system's."""


class BoundedServer(ThreadingHTTPServer):
    """Serves until it is closed: one thread per connection, up to a limit."""

    daemon_threads = True
    request_queue_size = 2 * CONNECTIONS  # so that a refused client gets its answer at once

    def __init__(
        self,
        place: Path | tuple[str, int],
        requests: type[BoundedRequests],
        token: str | None,
        *,
        arrival: float = ARRIVAL,
        is_public: bool = False,
    ):
        """``place`` is a socket's path, or host and port.

        Other hosts are only let in with a token, unless what is served is there for everybody who reaches it.
        """
        self.token, self.arrival = token, arrival
        self._counting = threading.Lock()
        self._waiting: dict[Any, None] = {}
        """Connections that were not let in yet, the oldest first."""
        self._let_in: set[Any] = set()
        self._socket = place if isinstance(place, Path) else None
        if isinstance(place, Path):
            self.address_family = socket.AF_UNIX
            _make_way(place)
            address: Any = str(place)
        else:
            host, port = address = place
            if not is_loopback(host) and not token and not is_public:
                raise UsageError(f"{host} can be reached by others", hint="Give --token-file, or listen on 127.0.0.1.")
            self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        shown = place if isinstance(place, Path) else f"{host}:{port}"
        try:
            super().__init__(address, requests)
        except OSError as error:
            raise UsageError(f"cannot listen on {shown}: {error}", hint="Name another place.") from error
        self.port = 0 if self._socket else int(self.server_address[1])
        self._thread = threading.Thread(target=self.serve_forever, name="weightcast-http", daemon=True)
        self._thread.start()

    def server_bind(self) -> None:
        if self._socket is None:
            super().server_bind()
            return
        self.socket.bind(str(self._socket))
        self._socket.chmod(0o600)
        self.server_name, self.server_port = "localhost", 0

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        return connection, address or ("a socket of this host", 0)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._make_room_for(request):
            request.setblocking(False)  # the accepting thread must not block
            with suppress(OSError):
                request.send(_bare(503, "Service Unavailable", "too many connections"))
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def _make_room_for(self, connection: Any) -> bool:
        with self._counting:
            if len(self._waiting) + len(self._let_in) >= CONNECTIONS:
                if not self._waiting:
                    return False
                oldest = next(iter(self._waiting))
                del self._waiting[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread ends by that
            self._waiting[connection] = None
            return True

    def let_in(self, connection: Any) -> bool:
        """Whether the connection keeps its place until its request is answered; not if it has made way already."""
        with self._counting:
            if connection not in self._waiting:
                return False
            del self._waiting[connection]
            self._let_in.add(connection)
            return True

    def _forget(self, connection: Any) -> None:
        with self._counting:
            self._waiting.pop(connection, None)
            self._let_in.discard(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that disconnects during a request is not worth a traceback."""


def _make_way(place: Path) -> None:
    """Remove the socket of a server that was killed."""
    if len(str(place).encode()) > _LONGEST_PATH:
        raise UsageError("the path of the socket is too long", file=str(place), hint="Name a shorter folder.")
    if place.is_socket():
        place.unlink()


class _TooLargeError(Exception):
    """A request exceeds the size limit."""


class _Arriving(io.RawIOBase):
    """What a client sends, up to a number of bytes and a deadline."""

    def __init__(self, connection: socket.socket, seconds: float):
        self._connection, self._seconds = connection, seconds
        self._left = 0
        self.expect(_HEAD)

    def expect(self, nbytes: int) -> None:
        """Allow so many more bytes, and the time for them."""
        self._deadline = time.monotonic() + self._seconds
        self._left += nbytes

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


class BoundedRequests(BaseHTTPRequestHandler):
    """The requests of one connection. Subclasses have ``do_GET`` and ``do_POST``."""

    server: BoundedServer

    def setup(self) -> None:
        super().setup()
        self._arriving = _Arriving(self.connection, self.server.arrival)
        self.rfile = io.BufferedReader(self._arriving)

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except _TooLargeError:
            self.close_connection = True
            self.wfile.write(_bare(431, "Request Header Fields Too Large", "the request is too large"))

    def let_in(self) -> bool:
        """Let the request in if it has the server's token, if that has one; else it is answered."""
        token, given = self.server.token, self.headers.get("Authorization", "")
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            self.answer(401, {"error": "a bearer token is needed"})
            return False
        return self.server.let_in(self.connection)

    def body(self, most: int) -> bytes | None:
        """The body of a request; None if it has too many bytes, which is answered."""
        length = self.headers.get("Content-Length", "0")
        if not is_number(length, 12) or int(length) > most:
            self.close_connection = True
            self.answer(413, {"error": f"a body has at most {most:,} bytes, and a Content-Length"})
            return None
        self._arriving.expect(int(length))
        found = self.rfile.read(int(length))
        return found if len(found) == int(length) else None

    def answer(self, status: int, body: dict[str, Any]) -> None:
        self.send(status, "application/json", json.dumps(body).encode())

    def send(self, status: int, kind: str, body: bytes) -> None:
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


def is_number(text: str, digits: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= digits
