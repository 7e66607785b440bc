"""One HTTP request to an engine's control plane: bounded in time and size, without proxies and redirects."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from weightcast.errors import EngineError, EngineGoneError, UsageError

_LARGEST = 1 << 20
"""Bytes of an answer."""

_CONNECT = 10.0
"""Seconds in which a connection must be made."""

_SHOWN = 400
"""Characters of an answer that are shown in an error."""

_HINT = "It is still starting, or it is dead; the agent waits for it."


class Answer(NamedTuple):
    status: int
    text: str

    @property
    def fields(self) -> dict[str, Any]:
        """The JSON object that was answered; empty if it is none."""
        try:
            found = json.loads(self.text)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def shown(self) -> str:
        """The beginning of the answer, on one line."""
        return shown(self.text)


def shown(text: object) -> str:
    """The beginning of a text from outside, on one line."""
    line = " ".join(str(text)[: 4 * _SHOWN].split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"


def address_of(url: str) -> str:
    """An engine's address as it was given; `UsageError` unless it is one."""
    parts = _split(url)
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url[:200]!r} is not the address of an engine", hint="Write http://host:port.")
    if parts.username is not None or parts.query or parts.fragment:
        hint = "Write http://host:port; a key goes into a file."
        raise UsageError("the address of an engine is a host and a port alone", hint=hint)
    return url.rstrip("/")


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    return parts


def ask(
    url: str, path: str, body: Mapping[str, Any] | None = None, *, seconds: float, token: str | None = None
) -> Answer:
    """Get ``path``, or post ``body`` to it; `EngineGoneError` if no whole answer came within ``seconds``."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    headers = {"Connection": "close"} | ({"Authorization": f"Bearer {token}"} if token else {})
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    with closing(kind(parts.hostname, parts.port, timeout=min(_CONNECT, seconds))) as connection:
        try:
            connection.connect()
            with _deadline(connection.sock, seconds) as late:
                data = None if body is None else json.dumps(body).encode()
                kinds = {} if body is None else {"Content-Type": "application/json"}
                connection.request("GET" if body is None else "POST", parts.path + path, data, headers | kinds)
                with connection.getresponse() as answer:
                    status, found = answer.status, answer.read(_LARGEST + 1)
                if late.is_set():
                    raise TimeoutError
        except TimeoutError as error:
            raise EngineGoneError(f"no answer to {path} came in {seconds:g} s", url=url, hint=_HINT) from error
        except (OSError, HTTPException, ValueError) as error:
            problem = shown(error) or type(error).__name__
            raise EngineGoneError(f"the engine does not answer {path}: {problem}", url=url, hint=_HINT) from error
    if len(found) > _LARGEST:
        raise EngineError(f"the engine's answer to {path} is longer than {_LARGEST:,} bytes", url=url)
    return Answer(status, found.decode(errors="replace"))


@contextmanager
def _deadline(connection: socket.socket, seconds: float) -> Iterator[threading.Event]:
    """Cut the connection after ``seconds``, however slowly an answer still comes; the event says that it was cut."""
    late = threading.Event()

    def cut() -> None:
        late.set()
        with suppress(OSError):
            socket.socket.shutdown(connection, socket.SHUT_RDWR)  # below TLS, which may be in use by the reader

    connection.settimeout(None)
    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield late
    except (OSError, HTTPException, ValueError) as error:
        if late.is_set():
            raise TimeoutError from error
        raise
    finally:
        timer.cancel()
