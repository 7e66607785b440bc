"""Requests that ask for a version wait for it, and responses name theirs."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weightcast.engine.address import RUNTIME, record_path
from weightcast.engine.vllm.middleware import LISTEN, Middleware, controlled


class Client:
    def __init__(self, *versions: str):
        self._versions = list(versions)
        self.asked = 0

    async def get_weight_version(self) -> str:
        self.asked += 1
        return self._versions.pop(0) if len(self._versions) > 1 else self._versions[0]


def asked(
    client: Client, path: str = "/v1/completions", keys: tuple[str, ...] = (), most_waiting: int = 10, **headers: str
) -> tuple[int, str | None]:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    state = type("State", (), {"engine_client": client, "args": type("Args", (), {"api_key": keys})})
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "headers": pairs, "app": type("App", (), {"state": state})}
    asyncio.run(Middleware(app, most_waiting)(scope, receive, send))
    return sent[0]["status"], dict(sent[0]["headers"]).get(b"x-weight-version", b"").decode() or None


def test_response_names_its_version() -> None:
    assert asked(Client("7")) == (200, "7")
    assert asked(Client("7", "8")) == (200, "7-8")
    assert asked(Client("default", "default", "3")) == (200, "3"), "not before there is one"
    assert asked(Client("default"), x_weight_version_wait="0") == (200, "default")
    assert asked(Client("7"), path="/health") == (200, None)


def test_request_waits_for_its_version() -> None:
    assert asked(Client("6", "6", "7"), x_weight_version_at_least="7") == (200, "7")
    assert asked(Client("6"), x_weight_version_at_least="7", x_weight_version_wait="0") == (503, None)
    assert asked(Client("default"), x_weight_version_at_least="0", x_weight_version_wait="0") == (503, None)
    for bad in ("-1", "x", "9" * 13):
        assert asked(Client("6"), x_weight_version_at_least=bad) == (400, None)


def test_only_requests_with_the_api_key_wait() -> None:
    """Whoever has none must not occupy the server; vLLM itself refuses it."""
    for given in ({}, {"authorization": "Bearer other"}, {"authorization": "key"}):
        client = Client("6")
        assert asked(client, keys=("key", "more"), x_weight_version_at_least="7", **given) == (200, None)
        assert client.asked == 0
    for given in ({"authorization": "Bearer key"}, {"authorization": "bearer more"}):
        assert asked(Client("7"), keys=("key", "more"), x_weight_version_at_least="7", **given) == (200, "7")


def test_number_of_waiting_requests_is_bounded() -> None:
    assert asked(Client("6"), most_waiting=0, x_weight_version_at_least="7", x_weight_version_wait="60") == (503, None)


def state_of_a_server() -> Any:
    config = SimpleNamespace(
        weight_transfer_config=SimpleNamespace(backend="weightcast"),
        parallel_config=SimpleNamespace(_api_process_rank=0),
    )
    return SimpleNamespace(engine_client=SimpleNamespace(vllm_config=config), args=SimpleNamespace(port=8000))


def test_engine_of_a_port_that_another_one_has_takes_its_place_when_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(RUNTIME, str(tmp_path / "run"))
    record = record_path(tmp_path / "run", 8000)

    async def start() -> None:
        async with AsyncExitStack() as second:
            async with controlled(state_of_a_server()):
                first = record.read_bytes()
                await second.enter_async_context(controlled(state_of_a_server()))
                assert record.read_bytes() == first
                assert f"another engine of port {8000}" in caplog.text
                assert RUNTIME in caplog.text
            while not record.exists():
                await asyncio.sleep(0.05)
            assert record.read_bytes() != first
        assert not record.exists()

    asyncio.run(asyncio.wait_for(start(), 60))


@pytest.mark.parametrize("port", ["127.0.0.1:9000", "99999", "\u00b2"])
def test_port_that_is_none_is_not_replaced_by_a_socket(
    port: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(LISTEN, port)

    async def start() -> None:
        async with controlled(state_of_a_server()):
            pass

    asyncio.run(start())
    assert "is not a port" in caplog.text
