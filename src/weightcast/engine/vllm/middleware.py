"""What weightcast adds to vLLM's API server: the control server, and versions in requests and responses.

    vllm serve … --weight-transfer-config '{"backend": "weightcast"}' --middleware weightcast_vllm.Middleware

The control server listens on a socket of its own; nothing of it can be reached through the API's port.

A request with ``x-weight-version-at-least: 41`` waits until the engine serves version 41 or a later one, for as many
seconds as ``x-weight-version-wait`` says, and gets 503 otherwise. Every response carries ``x-weight-version``: the
version when it began and, if an update was applied before it was complete, the last one too (``40-41``). A stream sends
its headers first, so it names only the version it began with.

An engine that has just restarted serves no version until its agent has connected. Requests wait for that, a minute
unless they say otherwise: a trainer cannot use a rollout from unknown weights.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from weightcast.engine.address import runtime_folder
from weightcast.engine.bounded_http import is_number
from weightcast.engine.control import Control
from weightcast.engine.control_server import serving_control
from weightcast.engine.vllm.host import ServerHost
from weightcast.errors import BusyError, UsageError, WeightcastError

LISTEN = "WEIGHTCAST_LISTEN"
"""A port of the loopback interface for the control server, in place of a socket in the file system."""

AT_LEAST, WAIT, VERSION = b"x-weight-version-at-least", b"x-weight-version-wait", b"x-weight-version"
_WAIT, _LONGEST, _EVERY = 60.0, 3600.0, 0.02
_RETRY = 0.5
"""Seconds between two attempts at the place of an engine that has not ended."""

MOST_WAITING = 1000
"""Requests that wait for a version at the same time; each is a connection of a client."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = logging.getLogger("weightcast")


class Middleware:
    """ASGI middleware of a vLLM server."""

    def __init__(self, app: App, most_waiting: int = MOST_WAITING):
        self._app, self._most_waiting = app, most_waiting
        self._asking = asyncio.Lock()
        self._version, self._asked = "", -_EVERY
        self._waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            async with controlled(scope["app"].state):
                await self._app(scope, receive, send)
        elif scope["type"] == "http" and scope["path"].startswith(("/v1/", "/inference/")) and _has_key(scope):
            await self._answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        try:
            wanted, patience = _number(headers, AT_LEAST), _number(headers, WAIT)
        except ValueError as error:
            await _refuse(send, 400, str(error))
            return
        client = scope["app"].state.engine_client
        began = await self._reached(client, wanted or 0, min(_WAIT if patience is None else patience, _LONGEST))
        if wanted is not None and _as_number(began) < wanted:
            await _refuse(send, 503, f"the engine serves version {began}, not {wanted:.0f} or a later one")
            return

        async def with_version(message: Message) -> None:
            if message["type"] == "http.response.start":
                now = await client.get_weight_version()
                value = began if now == began else f"{began}-{now}"
                message["headers"] = [*message.get("headers", ()), (VERSION, value.encode())]
            await send(message)

        await self._app(scope, receive, with_version)

    async def _reached(self, client: Any, wanted: float, patience: float) -> str:
        """The served version, once it is the wanted one or the time is up."""
        version = await client.get_weight_version()
        if _as_number(version) >= wanted or self._waiting >= self._most_waiting:
            return str(version)
        loop = asyncio.get_running_loop()
        end = loop.time() + patience
        self._waiting += 1
        try:
            while _as_number(version) < wanted and loop.time() < end:
                await asyncio.sleep(_EVERY)
                version = await self._recent(client)
        finally:
            self._waiting -= 1
        return str(version)

    async def _recent(self, client: Any) -> str:
        """The version, at most a moment old: the engine is asked once for all requests that wait."""
        async with self._asking:
            now = asyncio.get_running_loop().time()
            if now - self._asked >= _EVERY:
                self._version, self._asked = await client.get_weight_version(), now
            return self._version


@asynccontextmanager
async def controlled(state: Any) -> AsyncIterator[None]:
    """Serve the control of the engine in ``state``; without it the engine serves what it has, and the log says why."""
    if state.engine_client is None:  # vLLM's renderer has no engine
        yield
        return
    config, args = state.engine_client.vllm_config, state.args
    transfer = config.weight_transfer_config
    if getattr(transfer, "backend", None) != "weightcast":
        _log.error("""weightcast: start vLLM with --weight-transfer-config '{"backend": "weightcast"}' to update it""")
        yield
        return
    if config.parallel_config._api_process_rank > 0:  # the first of several API servers has the control
        yield
        return
    url = f"http://127.0.0.1:{args.port}"
    control = Control(ServerHost(state.engine_client, asyncio.get_running_loop(), url), url)
    with ExitStack() as opened:
        waiting = None if _open(control, args.port, opened) else asyncio.create_task(_wait(control, args.port, opened))
        try:
            yield
        finally:
            if waiting is not None:
                waiting.cancel()


def _open(control: Control, port: int, opened: ExitStack, *, is_told: bool = False) -> bool:
    """Serve the control, or log why not; False while another engine has its place."""
    try:
        address = opened.enter_context(serving_control(control, runtime_folder(), port, _listen()))
    except BusyError as error:
        if not is_told:
            _log.error("weightcast: this engine cannot be updated before that one has ended: %s", error)
        return False
    except WeightcastError as error:
        _log.error("weightcast: this engine cannot be updated: %s", error)
    else:
        place = address.socket or f"port {address.port} of this host"
        _log.info("weightcast: agents control this engine through %s", place)
    return True


async def _wait(control: Control, port: int, opened: ExitStack) -> None:
    """Take the place once it is free: an engine may end late that this one replaces."""
    while not _open(control, port, opened, is_told=True):
        await asyncio.sleep(_RETRY)


def _listen() -> tuple[str, int] | None:
    port = os.environ.get(LISTEN)
    if not port:
        return None
    if not is_number(port, 5) or int(port) >= 65536:
        raise UsageError(f"{LISTEN}={port[:100]!r} is not a port", hint="Write the number of a port, as in 9000.")
    return "127.0.0.1", int(port)


def _has_key(scope: Scope) -> bool:
    """Whether a request has the API's key, if there is one: who has none must not wait here. vLLM refuses it."""
    given = dict(scope["headers"]).get(b"authorization", b"")
    scheme, _, key = given.partition(b" ")
    args = scope["app"].state.args
    keys = [one for one in (args.api_key or [os.environ.get("VLLM_API_KEY")]) if one]
    matching = [hmac.compare_digest(key, one.encode()) for one in keys]
    return not keys or (scheme.lower() == b"bearer" and any(matching))


def _as_number(version: str) -> int:
    """The version's number; -1 for an engine that serves no version of a channel."""
    return int(version) if version.isascii() and version.isdigit() else -1


def _number(headers: dict[bytes, bytes], name: bytes) -> float | None:
    text = headers.get(name, b"").decode("latin-1").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 12:
        raise ValueError(f"{name.decode()} must be a number")
    return float(text)


async def _refuse(send: Send, status: int, problem: str) -> None:
    body = json.dumps({"error": {"message": problem, "type": "weight_version", "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
