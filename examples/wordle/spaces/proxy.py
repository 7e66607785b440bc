"""Forwards three routes of OpenAI's API and the health check to vLLM, and rejects all others.

    python -m examples.wordle.spaces.proxy --engine http://127.0.0.1:8000 --port 7860

Whoever plays needs no others of vLLM's routes. It reports when the first answer of each version goes out.
"""

from __future__ import annotations

import argparse
import re

import aiohttp
from aiohttp import web

from examples.wordle.events import report

ALLOWED = re.compile(r"/health|/v1/(models|completions|chat/completions)")
"""Paths as they arrive, undecoded: nothing that needs decoding is let through."""
LARGEST = 32 << 20
"""Bytes of a request."""
KEPT = ("Content-Type", "Authorization", "x-weight-version-at-least", "x-weight-version-wait")
RETURNED = ("Content-Type", "x-weight-version")
ENGINE = web.AppKey("engine", str)
CLIENT = web.AppKey("client", aiohttp.ClientSession)


class Newest:
    """The newest version that an answer named."""

    def __init__(self) -> None:
        self._version = -1

    def saw(self, header: str) -> None:
        """``header`` is a version, or the first and the last of an answer: ``40-41``."""
        last = header.rpartition("-")[2]
        if last.isdecimal() and int(last) > self._version:
            self._version = int(last)
            report("first", version=self._version)


NEWEST = web.AppKey("newest", Newest)


async def forward(request: web.Request) -> web.StreamResponse:
    if not ALLOWED.fullmatch(request.raw_path):
        raise web.HTTPNotFound
    if request.method not in ("GET", "POST"):
        raise web.HTTPMethodNotAllowed(request.method, ("GET", "POST"))
    headers = {name: request.headers[name] for name in KEPT if name in request.headers} | {
        "Accept-Encoding": "identity"
    }
    url, body = request.app[ENGINE] + request.raw_path, await request.read()
    try:
        answer = await request.app[CLIENT].request(
            request.method, url, headers=headers, data=body, allow_redirects=False
        )
    except aiohttp.ClientConnectionError as error:
        raise web.HTTPBadGateway(text="the engine does not answer") from error
    async with answer:
        kept = {name: answer.headers[name] for name in RETURNED if name in answer.headers}
        response = web.StreamResponse(status=answer.status, headers=kept)
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
    if request.method == "POST":
        request.app[NEWEST].saw(answer.headers.get("x-weight-version", ""))
    return response


def make_app(engine: str) -> web.Application:
    app = web.Application(client_max_size=LARGEST)
    app[ENGINE], app[NEWEST] = engine.rstrip("/"), Newest()

    async def client(app: web.Application):  # type: ignore[no-untyped-def]  # aiohttp wants a bare generator
        timeout = aiohttp.ClientTimeout(total=600, connect=10)
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as app[CLIENT]:
            yield

    app.cleanup_ctx.append(client)
    app.router.add_route("*", "/{path:.*}", forward)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="http://127.0.0.1:8000")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=7860)
    given = parser.parse_args()
    web.run_app(make_app(given.engine), host=given.host, port=given.port, print=None)


if __name__ == "__main__":
    main()
