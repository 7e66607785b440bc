"""The agent's http endpoint under load: bounded connections, waits, sizes and arrival times."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from local_engine import Local, Training  # noqa: E402

from weightcast.engine.agent import Agent  # noqa: E402
from weightcast.engine.bounded_http import BoundedRequests, BoundedServer  # noqa: E402
from weightcast.engine.endpoint import Endpoint, Watch  # noqa: E402
from weightcast.events.metrics import Metrics  # noqa: E402

CONNECTIONS, WAITING = 64, 32


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    with closing(Training(tmp_path)) as training:
        yield Watch(Agent(training.url, Local(training.weights), tmp_path / "mirror"), Metrics())


@pytest.fixture
def endpoint(watch: Watch) -> Iterator[Endpoint]:
    with closing(Endpoint(watch, "127.0.0.1", 0, None)) as serving:
        yield serving


def get(endpoint: BoundedServer, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}{path}", timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def connect(endpoint: BoundedServer, text: str = "") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", endpoint.port), timeout=30)
    connection.sendall(text.encode())
    return connection


def everything(connection: socket.socket) -> bytes:
    """What the server says before it closes."""
    found = b""
    while some := connection.recv(1 << 16):
        found += some
    return found


def dribble(connection: socket.socket) -> None:
    for _ in range(3000):
        connection.sendall(b"x")
        time.sleep(0.01)


def metrics(endpoint: Endpoint) -> dict[str, float]:
    """The value of each sample, by name and labels."""
    lines = get(endpoint, "/metrics")[1].decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def test_metrics_have_units_in_their_names_and_the_agents_values(tmp_path: Path) -> None:
    with closing(Training(tmp_path)) as training:
        kept = Metrics()
        agent = Agent(training.url, Local(training.weights), tmp_path / "mirror", on_event=kept)
        watch = Watch(agent, kept)
        with agent, closing(Endpoint(watch, "127.0.0.1", 0, None)) as endpoint:
            unknown = metrics(endpoint)
            assert unknown["weightcast_version"] == -1
            assert math.isnan(unknown["weightcast_lag_versions"])
            agent.step()
            training.step(1)
            update = agent.step()
            assert update is not None
            watch.updated(update)
            watch.failed()
            found = metrics(endpoint)
            assert json.loads(get(endpoint, "/status")[1])["last"] == update.as_json()
    expected = {
        "weightcast_version": 1,
        "weightcast_lag_versions": 0,
        "weightcast_unproven_tensors": 0,
        "weightcast_updates_total": 1,
        "weightcast_written_elements_total": update.changed,
        "weightcast_errors_total": 1,
        "weightcast_pause_seconds_count": 1,
        'weightcast_phase_seconds_count{phase="apply",role="engine"}': 1,
        'weightcast_applied_version{role="engine"}': 1,
    }
    assert {name: found.get(name) for name in expected} == expected


def test_idle_connections_make_way_the_oldest_first(endpoint: Endpoint) -> None:
    with ExitStack() as opened:
        idle = [opened.enter_context(connect(endpoint)) for _ in range(CONNECTIONS)]
        for number in range(3):
            assert get(endpoint, "/status")[0] == 200
            assert everything(idle[number]) == b""
        idle[-1].sendall(b"GET /status HTTP/1.0\r\n\r\n")
        assert everything(idle[-1]).startswith(b"HTTP/1.0 200 ")


def test_connection_beyond_the_limit_is_refused_at_once_and_others_are_served_again() -> None:
    going_on, entered = threading.Event(), threading.Semaphore(0)

    class Held(BoundedRequests):
        def do_GET(self) -> None:  # noqa: N802 -- http.server calls it
            if self.let_in():
                entered.release()
                assert going_on.wait(60)
                self.answer(200, {})

    with closing(BoundedServer(("127.0.0.1", 0), Held, None)) as server, ExitStack() as opened:
        for _ in range(CONNECTIONS):
            opened.enter_context(connect(server, "GET / HTTP/1.0\r\n\r\n"))
        assert all(entered.acquire(timeout=60) for _ in range(CONNECTIONS))
        with connect(server) as late:
            refused = everything(late)
        assert refused.startswith(b"HTTP/1.0 503 ")
        assert json.loads(refused.partition(b"\r\n\r\n")[2]) == {"error": "too many connections"}
        going_on.set()
        end = time.monotonic() + 30
        while get(server, "/")[0] != 200:  # until the server has seen that the others are gone
            assert time.monotonic() < end


def test_waiting_requests_leave_room_for_status_and_metrics(endpoint: Endpoint) -> None:
    with ExitStack() as opened:
        for _ in range(WAITING):
            opened.enter_context(connect(endpoint, "GET /wait?version=9&seconds=60 HTTP/1.0\r\n\r\n"))
        end = time.monotonic() + 30
        while True:  # until all of them are inside
            status, body = get(endpoint, "/wait?version=9&seconds=0")
            assert status == 503
            if json.loads(body) == {"error": f"{WAITING} requests wait already"}:
                break
            assert time.monotonic() < end
        assert get(endpoint, "/status")[0] == 200
        assert get(endpoint, "/metrics")[0] == 200


def test_request_that_is_too_large_is_refused(endpoint: Endpoint) -> None:
    headers = "".join(f"x-{i}: {'a' * 1000}\r\n" for i in range(17))
    with connect(endpoint, f"GET /status HTTP/1.0\r\n{headers}") as connection:
        assert everything(connection).startswith(b"HTTP/1.0 431 ")
    assert get(endpoint, "/status")[0] == 200


def test_client_that_sends_too_slowly_is_disconnected(watch: Watch) -> None:
    with closing(Endpoint(watch, "127.0.0.1", 0, None, arrival=0.2)) as endpoint:
        with connect(endpoint, "GET /status HTTP/1.0\r\n") as connection:
            assert everything(connection) == b""
        with connect(endpoint) as connection, pytest.raises((BrokenPipeError, ConnectionResetError)):
            dribble(connection)  # nor does it help to send something now and then
        assert get(endpoint, "/status")[0] == 200
