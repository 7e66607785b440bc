"""The dashboard's server: it answers to its own name, reads only, and sends headers that keep others out."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection, HTTPResponse

import pytest
from watched import make_watched, watching

from weightcast.view.dashboard import Dashboard


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    url = make_watched(tmp_path_factory.mktemp("served") / "channel", 2).url
    with watching(url) as server:
        yield server


def ask(server: Dashboard, path: str = "/", method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def raw(server: Dashboard, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(request)
        return connection.makefile("rb").read()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9", "[::1]:8742", "10.0.0.7", "LOCALHOST"])
def test_host_that_is_an_address_or_localhost_is_answered(server: Dashboard, host: str) -> None:
    assert ask(server, "/state", Host=host)[0].status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8742", "", "[", "[::1", "a b", "0x7f.1"]
)
def test_other_host_is_refused(server: Dashboard, host: str) -> None:
    answer, body = ask(server, "/state", Host=host)
    assert answer.status == 403
    assert b"version" not in body


def test_request_without_a_host_or_with_two_is_refused(server: Dashboard) -> None:
    assert b" 403 " in raw(server, b"GET /state HTTP/1.0\r\n\r\n").partition(b"\r\n")[0]
    two = b"GET /state HTTP/1.0\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    assert b" 403 " in raw(server, two).partition(b"\r\n")[0]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "<script>"])
def test_only_get_and_head_are_answered(server: Dashboard, method: str) -> None:
    answer = raw(server, f"{method} / HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
    assert b" 405 " in answer.partition(b"\r\n")[0]
    assert b"<" not in answer


def test_head_has_the_headers_and_no_body(server: Dashboard) -> None:
    answer, body = ask(server, "/", "HEAD")
    assert (answer.status, body) == (200, b"")
    assert int(answer.headers["Content-Length"]) > 10_000


@pytest.mark.parametrize("path", ["/", "/state", "/nothing"])
def test_every_answer_keeps_others_out(server: Dashboard, path: str) -> None:
    headers = ask(server, path)[0].headers
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Cache-Control"] == "no-store"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert "Access-Control-Allow-Origin" not in headers
    assert "Python" not in headers["Server"]


@pytest.mark.parametrize(
    "path", ["/state?since=-1", "/state?since=99999999999999999999", "/state?since=a&epoch=b", "/state?since=٣"]
)
def test_impossible_revision_gets_everything(server: Dashboard, path: str) -> None:
    answer = raw(server, f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["whole"]


@pytest.mark.parametrize("path", ["/../channel.json", "/channel.json", "/state/", "/?x", "http://evil.example/state"])
def test_nothing_else_is_served(server: Dashboard, path: str) -> None:
    status = raw(server, f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode()).split(b" ")[1]
    assert status == (b"404" if path.startswith("/") and path != "/?x" else b"200")


@pytest.mark.parametrize("path", ["http://[::1", "http://]/state"])
def test_address_that_is_none_is_refused(server: Dashboard, path: str) -> None:
    assert b" 400 " in raw(server, f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode()).partition(b"\r\n")[0]


@pytest.mark.parametrize("more", [b"X: " + b"x" * 20_000, b"\r\n".join(b"X-%d: y" % i for i in range(500))])
def test_request_that_is_too_large_is_refused_and_the_next_is_answered(server: Dashboard, more: bytes) -> None:
    with suppress(ConnectionError):  # the server closes while the rest is on its way
        answer = raw(server, b"GET / HTTP/1.0\r\nHost: localhost\r\n" + more + b"\r\n\r\n")
        assert answer[:12] in (b"HTTP/1.0 431", b"HTTP/1.0 400")
    assert ask(server)[0].status == 200
