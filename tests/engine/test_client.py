"""The agent's http client: straight to the engine, whatever the environment says about web proxies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from weightcast.engine.client import HttpEngine


class _Engine(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"is_paused": true}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _serving() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Engine)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_engine_requests_ignore_proxy_variables(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:1")  # nobody listens there
    monkeypatch.delenv("no_proxy", raising=False)
    with _serving() as url:
        assert HttpEngine(url).is_paused()
