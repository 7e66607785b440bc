"""The agent's http client: straight to the engine, and errors that say what is known of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from weightcast.engine.client import HttpEngine
from weightcast.engine.messages import ApplyUpdate, Hello
from weightcast.errors import EngineError, EngineGoneError

Answers = Mapping[str, tuple[int, str]]

NO_METHOD = [
    "Call to collective_rpc method failed: Method 'weightcast' is not implemented.",
    "Call to collective_rpc method failed: Worker failed with error ''CPUWorker' object has no attribute 'weightcast''",
]
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


@contextmanager
def serving(answers: Answers) -> Iterator[str]:
    """An engine that gives these answers, by path; 404 for all others."""

    class Requests(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = answers.get(self.path, (404, ""))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

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


def error_500(message: str) -> tuple[int, str]:
    """As vLLM answers."""
    return 500, json.dumps({"error": {"message": message, "type": "InternalServerError", "code": 500}})


def refusal(answers: Answers) -> EngineError:
    with serving(answers) as url, pytest.raises(EngineError) as refused:
        HttpEngine(url).ask(Hello())
    return refused.value


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_engine_requests_ignore_proxy_variables(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:1")  # nobody listens there
    monkeypatch.delenv("no_proxy", raising=False)
    with serving({"/is_paused": (200, '{"is_paused": true}')}) as url:
        assert HttpEngine(url).is_paused()


@pytest.mark.parametrize("message", NO_METHOD, ids=["one process", "several processes"])
def test_healthy_engine_without_the_method_runs_without_the_plug_in(message: str) -> None:
    refused = refusal({"/collective_rpc": error_500(message), "/health": (200, "")})
    assert "vLLM is running without the weightcast plug-in" in refused.problem
    assert "--weight-transfer-config" in (refused.hint or "")


def test_dead_engine_is_gone_and_not_without_the_plug_in() -> None:
    refused = refusal({"/collective_rpc": error_500(DEAD), "/health": (503, "")})
    assert isinstance(refused, EngineGoneError)
    assert "plug-in" not in str(refused)
    assert "the engine has died" in refused.problem
    assert "Restart it" in (refused.hint or "")


def test_healthy_engine_with_another_error_is_quoted() -> None:
    refused = refusal({"/collective_rpc": error_500("Server shutting down"), "/health": (200, "")})
    assert not isinstance(refused, EngineGoneError)
    assert "plug-in" not in str(refused)
    assert "answers /collective_rpc with 500" in refused.problem
    assert "Server shutting down" in refused.problem


def test_update_of_a_dead_engine_is_not_started_twice() -> None:
    update = ApplyUpdate(None, None, "mirror", ())  # type: ignore[arg-type]
    with (
        serving({"/start_weight_update": error_500(DEAD), "/health": (503, "")}) as url,
        pytest.raises(EngineGoneError, match="/start_weight_update"),
    ):
        HttpEngine(url).update(update)


def test_engine_without_routes_for_updates_needs_the_development_mode() -> None:
    refused = refusal({})
    assert "has no route /collective_rpc" in refused.problem
    assert "VLLM_SERVER_DEV_MODE=1" in (refused.hint or "")
