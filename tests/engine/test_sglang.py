"""What is asked of SGLang, and what its answers may be: bounded in time and size, whatever they are."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from channels import small_model
from sglang_server import SGLang, serving

from weightcast.channel.keys import Position
from weightcast.engine.reload.sglang import SGLangEngine
from weightcast.errors import EngineError, EngineGoneError, UsageError

AT = Position(0, "0" * 64)


@pytest.fixture
def server() -> Iterator[SGLang]:
    with serving(small_model()) as started:
        yield started


@pytest.mark.parametrize(
    ("status", "data", "said"),
    [
        (200, b"[]", "could not load version 0"),
        (200, b'{"success": "yes"}', "could not load version 0"),
        (200, b"[" * 100_000, "could not load version 0"),
        (400, b"\xff\x00" * 300_000, "could not load version 0"),
        (500, b"Internal Server Error", "answers /update_weights_from_disk with 500"),
        (302, b"", "answers /update_weights_from_disk with 302"),
        (404, b"", "no route"),
        (200, b" " * 2_000_000, "longer than"),
        (401, b"", "asks for a key"),
    ],
)
def test_strange_answers_are_errors_of_bounded_length(server: SGLang, status: int, data: bytes, said: str) -> None:
    server.answers["/update_weights_from_disk"] = status, data
    with pytest.raises(EngineError, match=said) as caught:
        SGLangEngine(server.url).load(Path("/nowhere"), AT, None)
    assert len(str(caught.value)) < 1000
    assert not isinstance(caught.value, EngineGoneError)


@pytest.mark.parametrize("data", [b"", b"null", b"{}", b'{"weight_version": 7}', b"[" * 100_000])
def test_engine_that_names_no_version_is_refused(server: SGLang, data: bytes) -> None:
    server.answers["/model_info"] = 200, data
    with pytest.raises(EngineError, match="does not name the version"):
        SGLangEngine(server.url).version()


def test_requests_need_the_key() -> None:
    with serving(small_model(), key="secret") as server:
        with pytest.raises(EngineError, match="asks for a key"):
            SGLangEngine(server.url).version()
        assert SGLangEngine(server.url, api_key="secret").version() == "default"


def test_proxies_are_not_used(server: SGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert SGLangEngine(f"{server.url}/").version() == "default"


def test_answer_that_drips_is_given_up_in_time(drip: Callable[[bytes], str]) -> None:
    for beginning in (b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"):
        engine = SGLangEngine(drip(beginning), patience=0.3)
        began = time.monotonic()
        with pytest.raises(EngineGoneError, match="no answer"):
            engine.load(Path("/nowhere"), AT, None)
        assert time.monotonic() - began < 20


@pytest.fixture
def drip() -> Iterator[Callable[[bytes], str]]:
    """A server that says a beginning, and then a byte now and then, for ever."""
    ended, threads = threading.Event(), []

    def serve(listener: socket.socket, beginning: bytes) -> None:
        with listener, listener.accept()[0] as connection, suppress(OSError):
            connection.sendall(beginning)
            while not ended.wait(0.02):
                connection.sendall(b"x")

    def start(beginning: bytes) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        threads.append(threading.Thread(target=serve, args=(listener, beginning)))
        threads[-1].start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    ended.set()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    "url", ["localhost:30000", "ftp://host", "http://", "http://a:b@host", "http://host:port", "http://host/?q=1", ""]
)
def test_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="Write http://host:port"):
        SGLangEngine(url)
