"""What can be reached of an engine: its API alone, whatever others try."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from engines import Engine, runtime_folder, serving

KEY = "a-key-of-the-api"

OURS = ("/report", "/ask", "/run", "/meet", "/renew", "/leave", "/update")
DEVELOPERS = ("/pause", "/resume", "/is_paused", "/collective_rpc", "/update_weights", "/start_weight_update",
              "/finish_weight_update", "/init_weight_transfer_engine", "/update_weight_version", "/weight_info",
              "/reset_prefix_cache", "/reset_weights", "/sleep", "/wake_up", "/server_info",
              "/get_world_size")  # fmt: skip
OPEN = {"/detokenize", "/generative_scoring", "/health", "/invocations", "/is_scaling_elastic_ep", "/kv_event_sources",
        "/load", "/metrics", "/ping", "/scale_elastic_ep", "/tokenize", "/version"}  # fmt: skip
"""What vLLM itself answers to whoever has no key."""


@pytest.fixture(scope="module")
def engine(model: Callable[[str], Path]) -> Iterator[Engine]:
    """As it would run in production: without the development mode, with a key."""
    with serving(model("qwen3"), extra_args=["--api-key", KEY]) as running:
        yield running


def status_of(port: int, method: str, path: str, *, patience: float = 60, **headers: str) -> int | None:
    """Of the answer over HTTP; None if what listens there does not speak it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience)
    with closing(connection):
        try:
            connection.request(method, path, b"{}" if method == "POST" else None, headers)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None


def listening(engine: Engine) -> set[int]:
    """The TCP ports that the processes of an engine listen on."""
    sockets = set()
    for pid in engine.pids():
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # one that was just closed
                sockets.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            place, state, inode = (line.split()[column] for column in (1, 3, 9))
            if state == "0A" and inode in sockets:
                ports.add(int(place.rpartition(":")[2], 16))
    return ports


def test_port_of_the_api_has_no_route_of_ours_or_of_developers(engine: Engine) -> None:
    port = int(engine.url.rpartition(":")[2])
    for path in (*OURS, *DEVELOPERS):
        for method in ("GET", "POST"):
            for headers in ({}, {"Authorization": f"Bearer {KEY}"}):
                assert status_of(port, method, path, **headers) == 404, (method, path)
    assert status_of(port, "GET", "/v1/models") == 401
    at_once = {"x-weight-version-wait": "0"}  # no agent has named a version yet
    assert status_of(port, "GET", "/v1/models", Authorization=f"Bearer {KEY}", **at_once) == 200


def test_port_of_the_api_answers_only_what_vllm_leaves_open_to_those_without_the_key(engine: Engine) -> None:
    port = int(engine.url.rpartition(":")[2])
    routes = engine.get("/openapi.json")["paths"]
    assert {"/v1/completions", "/v1/models"} <= routes.keys()
    answered = {
        route
        for route, methods in routes.items()
        for method in methods
        if status_of(port, method.upper(), route.replace("{response_id}", "x")) != 401
    }
    assert answered <= OPEN


def test_no_other_port_of_an_engine_answers_over_http(engine: Engine) -> None:
    api = int(engine.url.rpartition(":")[2])
    ports = listening(engine)
    assert api in ports
    for port in ports - {api}:
        assert status_of(port, "GET", "/report", patience=1) is None, port


def test_control_socket_needs_the_token_and_another_user_cannot_reach_it(engine: Engine) -> None:
    name = engine.url.rpartition(":")[2]
    place = Path(runtime_folder()) / f"{name}.sock"
    assert place.stat().st_mode & 0o777 == 0o600
    assert place.parent.stat().st_mode & 0o777 == 0o700
    for method, path in (("GET", "/report"), *(("POST", path) for path in OURS[1:])):
        with closing(socket.socket(socket.AF_UNIX)) as connection:
            connection.connect(str(place))
            connection.sendall(f"{method} {path} HTTP/1.0\r\nContent-Length: 0\r\n\r\n".encode())
            assert connection.recv(64).split()[1] == b"401"


def test_request_without_the_key_does_not_wait_for_a_version(engine: Engine) -> None:
    port = int(engine.url.rpartition(":")[2])
    wanted = {"x-weight-version-at-least": "7", "x-weight-version-wait": "60"}
    assert status_of(port, "GET", "/v1/models", **wanted) == 401
