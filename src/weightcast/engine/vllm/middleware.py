"""Requests that ask for a version, and responses that name theirs.

    vllm serve … --middleware weightcast.engine.vllm.middleware.WeightVersions

A request with ``x-weight-version-at-least: 41`` waits until the engine serves version 41 or a later one, for as many
seconds as ``x-weight-version-wait`` says, and gets 503 otherwise. Every response carries ``x-weight-version``: the
version when it began and, if an update was applied before it was complete, the last one too (``40-41``). A stream sends
its headers first, so it names only the version it began with.

An engine that has just restarted serves no version until its agent has connected. Requests wait for that, a minute
unless they say otherwise: a trainer cannot use a rollout from unknown weights.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

AT_LEAST, WAIT, VERSION = b"x-weight-version-at-least", b"x-weight-version-wait", b"x-weight-version"
_WAIT, _LONGEST, _EVERY = 60.0, 3600.0, 0.02

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class WeightVersions:
    """ASGI middleware of a vLLM server."""

    def __init__(self, app: App):
        self._app = app
        self._asking = asyncio.Lock()
        self._version, self._asked = "", -_EVERY

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(("/v1/", "/inference/")):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            wanted = _number(headers, AT_LEAST)
            patience = _number(headers, WAIT)
        except ValueError as error:
            await _refuse(send, 400, str(error))
            return
        client = scope["app"].state.engine_client
        began = await self._reached(client, wanted or 0, min(_WAIT if patience is None else patience, _LONGEST))
        if wanted is not None and _as_number(began) < wanted:
            await _refuse(send, 503, f"the engine serves version {began}, not {wanted} or a later one")
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
        loop = asyncio.get_running_loop()
        end, version = loop.time() + patience, await client.get_weight_version()
        while _as_number(version) < wanted and loop.time() < end:
            await asyncio.sleep(_EVERY)
            version = await self._recent(client)
        return str(version)

    async def _recent(self, client: Any) -> str:
        """The version, at most a moment old: the engine is asked once for all requests that wait."""
        async with self._asking:
            now = asyncio.get_running_loop().time()
            if now - self._asked >= _EVERY:
                self._version, self._asked = await client.get_weight_version(), now
            return self._version


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
