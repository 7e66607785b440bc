"""Agents reach an engine's control server over HTTP: found by its record, with its token, and with errors that help."""

from __future__ import annotations

import http.client
import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from local_engine import Host, Local, Training, attached, must_be  # noqa: E402

from weightcast.engine.address import RUNTIME, Address, engines_here, record_path, write_record  # noqa: E402
from weightcast.engine.agent import Agent  # noqa: E402
from weightcast.engine.bounded_http import CONNECTIONS  # noqa: E402
from weightcast.engine.client import HttpEngine  # noqa: E402
from weightcast.engine.control import Control  # noqa: E402
from weightcast.engine.control_server import serving_control  # noqa: E402
from weightcast.engine.messages import ApplyUpdate, Hello, Learn, ReadJob  # noqa: E402
from weightcast.engine.proof import prove  # noqa: E402
from weightcast.engine.protocol import encode  # noqa: E402
from weightcast.errors import BusyError, EngineBusyError, EngineError, EngineGoneError, UsageError  # noqa: E402

PORT = 8000
URL = f"http://127.0.0.1:{PORT}"
TOKEN = "a token of some length"


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of records of these tests."""
    folder = tmp_path / "run"
    monkeypatch.setenv(RUNTIME, str(folder))
    return folder


@contextmanager
def served(engine: Local, runtime: Path, listen: tuple[str, int] | None = None) -> Iterator[Address]:
    with serving_control(engine.control, runtime, PORT, listen) as address:
        yield address


def asked(address: Address, method: str, path: str, body: bytes | str | None = None, **headers: str) -> tuple[int, str]:
    """A request as anybody may send it."""
    connection = http.client.HTTPConnection("localhost", timeout=30)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(address.socket))
    with closing(connection):
        with suppress(BrokenPipeError):  # a server that refuses the head does not wait for the body
            connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


# -- an engine of this host --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listen", [None, ("127.0.0.1", 0)], ids=["socket", "loopback"])
def test_agent_follows_over_http(
    listen: tuple[str, int] | None, engine: Local, runtime: Path, training: Training, tmp_path: Path
) -> None:
    with served(engine, runtime, listen), Agent(training.url, HttpEngine(URL), tmp_path / "mirror") as agent:
        for version in range(3):
            if version:
                training.step(version)
            agent.step()
            proof = prove(HttpEngine(URL), agent.subscriber.chain)
            assert (proof.version, proof.holds, engine.served) == (version, True, str(version))
    assert [path.suffix for path in runtime.iterdir()] == [".lock"], "a server that ends leaves nothing behind"


def test_version_takes_one_request_in_the_pause_and_three_in_all(
    engine: Local, runtime: Path, training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[tuple[str, bool]] = []
    real = http.client.HTTPConnection.request

    def counted(self: http.client.HTTPConnection, method: str, path: str, *given: object) -> None:
        requests.append((path, engine.paused))
        real(self, method, path, *given)  # type: ignore[arg-type]

    with served(engine, runtime), Agent(training.url, HttpEngine(URL), tmp_path / "mirror") as agent:
        for version in (1, 2):
            training.step(version)
            agent.step()
        training.step(3)
        monkeypatch.setattr(http.client.HTTPConnection, "request", counted)
        assert agent.step() is not None
        assert requests == [("/meet", False), ("/run", False), ("/update", False)]


def test_engine_without_a_record_is_gone_and_the_hint_starts_it(runtime: Path) -> None:
    with pytest.raises(EngineGoneError, match="no engine of this host") as gone:
        HttpEngine(URL).report()
    assert "--middleware weightcast_vllm.Middleware" in (gone.value.hint or "")
    assert '{"backend": "weightcast"}' in (gone.value.hint or "")


def test_engine_that_was_killed_is_gone_and_its_successor_takes_the_place(engine: Local, runtime: Path) -> None:
    with served(engine, runtime) as address:
        record = record_path(runtime, PORT).read_bytes()
    record_path(runtime, PORT).write_bytes(record)
    record_path(runtime, PORT).chmod(0o600)
    assert address.socket is not None
    with closing(socket.socket(socket.AF_UNIX)) as left:
        left.bind(str(address.socket))
    with pytest.raises(EngineGoneError, match="does not answer"):
        HttpEngine(URL).report()
    with served(engine, runtime):
        assert HttpEngine(URL).report().served == "default"


def test_second_engine_of_a_port_does_not_take_the_place_of_one_that_runs(
    engine: Local, runtime: Path, training: Training
) -> None:
    """Such as two in containers that share the folder."""
    engine.served, other = "first", Local(training.weights)
    other.served = "second"
    with served(engine, runtime):
        with pytest.raises(BusyError, match=f"another engine of port {PORT}") as refused, served(other, runtime):
            pass
        assert RUNTIME in (refused.value.hint or "")
        assert HttpEngine(URL).report().served == "first"
    with served(other, runtime):
        assert HttpEngine(URL).report().served == "second"


def test_engines_of_this_host_are_listed(engine: Local, runtime: Path) -> None:
    assert engines_here() == []
    with served(engine, runtime):
        assert engines_here() == [URL]


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_engine_requests_ignore_proxy_variables(
    variable: str, engine: Local, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:1")  # nobody listens there
    monkeypatch.delenv("no_proxy", raising=False)
    with served(engine, runtime, ("127.0.0.1", 0)):
        assert not HttpEngine(URL).report().paused


# -- who is let in -----------------------------------------------------------------------------------------------------


ROUTES = [("GET", "/report")] + [("POST", path) for path in ("/ask", "/run", "/meet", "/renew", "/leave", "/update")]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_nothing_is_answered_without_the_token(method: str, path: str, engine: Local, runtime: Path) -> None:
    with served(engine, runtime) as address:
        for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": f"Bearer {address.token[:-1]}"}):
            status, text = asked(address, method, path, encode(Hello()), **headers)
            assert (status, json.loads(text)) == (401, {"error": "a bearer token is needed"})
    assert engine.calls == []


@pytest.mark.parametrize("listen", [None, ("127.0.0.1", 0)], ids=["socket", "loopback"])
def test_connections_without_the_token_keep_no_agent_out(
    listen: tuple[str, int] | None, engine: Local, runtime: Path
) -> None:
    with served(engine, runtime, listen) as address, ExitStack() as opened:
        for request in (b"", b"POST /meet HTTP/1.0\r\n", b"POST /meet HTTP/1.0\r\nContent-Length: 9\r\n\r\n"):
            for _ in range(CONNECTIONS):
                kind = socket.AF_UNIX if address.socket else socket.AF_INET
                stranger = opened.enter_context(closing(socket.socket(kind)))
                stranger.connect(str(address.socket) if address.socket else (address.host, address.port))
                stranger.sendall(request)
            assert HttpEngine(URL).report().served == "default"


def test_socket_record_and_folder_are_for_this_user_alone(engine: Local, runtime: Path) -> None:
    with served(engine, runtime) as address:
        assert address.socket is not None
        for path, mode in ((runtime, 0o700), (record_path(runtime, PORT), 0o600), (address.socket, 0o600)):
            assert path.stat().st_mode & 0o777 == mode
        with served(engine, runtime / "other") as second:
            assert second.token != address.token


def test_folder_that_others_can_enter_is_refused(engine: Local, runtime: Path) -> None:
    runtime.mkdir(mode=0o777)
    runtime.chmod(0o777)
    with pytest.raises(UsageError, match="others may use the folder"), served(engine, runtime):
        pass


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"token": 1, "socket": null, "port": 1}', b"{" * 5000])
def test_malformed_record_is_refused(content: bytes, runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    record_path(runtime, PORT).write_bytes(content)
    record_path(runtime, PORT).chmod(0o600)
    with pytest.raises(UsageError, match="record is malformed"):
        HttpEngine(URL).report()


def test_record_that_others_could_have_written_is_refused(runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    write_record(record_path(runtime, PORT), Address(TOKEN, None, "127.0.0.1", 1))
    record_path(runtime, PORT).chmod(0o644)
    with pytest.raises(UsageError, match="others could have written"):
        HttpEngine(URL).report()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a file of somebody else")
def test_record_of_somebody_else_is_refused_by_root_unless_its_folder_was_named(
    engine: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may make the folder of root's records in the folder for temporary files."""
    monkeypatch.delenv(RUNTIME, raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "weightcast-0"
    with served(engine, folder):
        os.chown(record_path(folder, PORT), 12345, 12345)
        with pytest.raises(UsageError, match="others could have written"):
            HttpEngine(URL).report()
        monkeypatch.setenv(RUNTIME, str(folder))
        assert HttpEngine(URL).report().served == "default"


def test_record_that_is_a_pipe_holds_nobody_up(runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    os.mkfifo(record_path(runtime, PORT), 0o600)
    with pytest.raises(UsageError, match="record is malformed"):
        HttpEngine(URL).report()


@pytest.mark.parametrize(
    ("engine", "token", "problem"),
    [
        ("127.0.0.1:8000", None, "not the address"),
        ("ftp://127.0.0.1", None, "not the address"),
        ("http://127.0.0.1:x", None, "not the address"),
        ("http://gpu-7:8000", None, "another host"),
        ("http://gpu-7:8000", TOKEN, "clear text"),
        ("https://gpu-7:8000", "short", "too short"),
    ],
)
def test_name_that_cannot_be_reached_safely_is_refused_at_once(engine: str, token: str | None, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        HttpEngine(engine, token)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_second_agent_is_refused_by_name_until_the_lease_ends(
    engine: Local, runtime: Path, training: Training, tmp_path: Path
) -> None:
    with served(engine, runtime), Agent(training.url, HttpEngine(URL), tmp_path / "mirror", replica="gpu-1") as first:
        first.step()
        training.step(1)
        with Agent(training.url, HttpEngine(URL), tmp_path / "other", replica="gpu-2") as second:
            with pytest.raises(EngineBusyError, match="gpu-1 updates this engine") as busy:
                second.step()
            assert busy.value.holder == "gpu-1"
            with pytest.raises(EngineBusyError):
                HttpEngine(URL).ask(Learn(second.subscriber.chain.channel))
            assert engine.served == "0"
            assert prove(HttpEngine(URL), second.subscriber.chain).holds, "whoever only looks is let in"
            first.close()
            assert second.step() is not None
            must_be(engine, second, 1)


def test_write_outside_of_an_update_is_refused(
    engine: Local, runtime: Path, training: Training, tmp_path: Path
) -> None:
    with served(engine, runtime), attached(training, engine, tmp_path) as agent:
        agent.step()
        position = agent.position
        assert position is not None
        with pytest.raises(EngineError, match="an update is sent as a whole"):
            HttpEngine(URL).ask(ApplyUpdate(None, position, "mirror", (), True))


@pytest.mark.parametrize("body", ["", "{", '{"protocol":1,"kind":"hello"}', '{"protocol":99}', "\ud800", "[" * 9999])
@pytest.mark.parametrize("path", ["/run", "/update"])
def test_malformed_request_is_refused(path: str, body: str, engine: Local, runtime: Path) -> None:
    with served(engine, runtime) as address:
        authorized = {"Authorization": f"Bearer {address.token}"}
        status, text = asked(address, "POST", path, body.encode(errors="replace"), **authorized)
        assert status == 400
        assert json.loads(text)["error"]
        assert asked(address, "POST", path, b"", **authorized, **{"Content-Length": str(1 << 40)})[0] == 413
        assert asked(address, "POST", "/other", b"", **authorized)[0] == 404
        assert asked(address, "GET", path, **authorized)[0] == 404
        assert HttpEngine(URL).report().served == "default"


@pytest.mark.parametrize("name", ["", "x" * 201, "two\nlines"])
def test_owner_needs_a_name(name: str, engine: Local, runtime: Path) -> None:
    with served(engine, runtime), pytest.raises(EngineError, match="a name and an id"):
        HttpEngine(URL).meet(name)


def test_errors_arrive_as_what_they_are(engine: Local, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(text: str) -> list[str]:
        raise EngineGoneError("the engine has died", url=URL, hint="Restart it")

    with served(engine, runtime):
        with monkeypatch.context() as dying:
            dying.setattr(engine, "exchange", dead)
            with pytest.raises(EngineGoneError, match="has died") as gone:
                HttpEngine(URL).ask(Hello())
            assert gone.value.hint == "Restart it"
        with pytest.raises(EngineError, match="ReadJob is not a job"):
            HttpEngine(URL).run(ReadJob("x"))  # type: ignore[arg-type]


# -- servers that are something else -----------------------------------------------------------------------------------


@contextmanager
def answering(status: int, text: str) -> Iterator[str]:
    """A server that gives this answer to all requests."""

    class Requests(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_POST = do_GET  # noqa: N815 -- http.server looks for that name

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Requests)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("status", "text", "problem"),
    [
        (401, "", "refuses the token"),
        (404, "<html>", "answered with 404: <html>"),
        (500, '{"error": {"message": "no"}}', "answered with 500"),
        (400, '{"error": "no room", "hint": 7, "gone": 1}', "no room"),
        (200, "", "malformed"),
        (200, '{"protocol":1,"kind":"done"}', "answers /report with a Done"),
        (200, "[" * 9999, "malformed"),
    ],
)
def test_strange_answer_is_an_error_that_names_it(status: int, text: str, problem: str) -> None:
    with answering(status, text) as url, pytest.raises(EngineError, match=problem) as refused:
        HttpEngine(url, TOKEN).report()
    assert not isinstance(refused.value, EngineGoneError)


@pytest.mark.parametrize("text", ["", "{}", '{"answers": 3}', '{"answers": []}', '{"answers": [3]}'])
def test_strange_answers_of_workers_are_an_error(text: str) -> None:
    with answering(200, text) as url, pytest.raises(EngineError):
        HttpEngine(url, TOKEN).ask(Hello())


def test_control_of_a_busy_engine_answers_in_time(engine: Local) -> None:
    control = Control(Host(engine), URL, patience=0.05)
    going, held = threading.Event(), threading.Event()

    def slow(text: str) -> list[str]:
        going.set()
        held.wait(30)
        return [one.answer(text) for one in engine.workers]

    engine.exchange = slow  # type: ignore[method-assign]
    meeting = threading.Thread(target=control.meet, args=("a" * 32, "gpu-1"))
    meeting.start()
    assert going.wait(30)
    with pytest.raises(EngineError, match="is being updated"):
        control.meet("a" * 32, "gpu-1")
    control.renew("a" * 32)
    with pytest.raises(EngineBusyError, match="gpu-1"):
        control.renew("b" * 32)
    held.set()
    meeting.join()
