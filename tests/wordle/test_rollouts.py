"""What a player makes of an engine's answers."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from examples.wordle.rollouts import EngineClient, MalformedError, RefusedError, Sample

GOOD = {"index": 0, "token_ids": [1, 2], "logprobs": {"token_logprobs": [-0.5, -1.0]}}


@contextmanager
def engine(status: int, headers: dict[str, str], body: bytes) -> Iterator[EngineClient]:
    """An engine that has one answer to everything."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield EngineClient(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


def test_answers_of_two_versions_name_both() -> None:
    with engine(200, {"x-weight-version": "40-41"}, json.dumps({"choices": [GOOD]}).encode()) as client:
        assert client.complete([[0]], count=2) == Sample([[1, 2]], [[-0.5, -1.0]], (40, 41))


@pytest.mark.parametrize(
    ("headers", "answer"),
    [
        ({}, {"choices": [GOOD]}),
        ({"x-weight-version": "updating"}, {"choices": [GOOD]}),
        ({"x-weight-version": "1"}, {"error": "no"}),
        ({"x-weight-version": "1"}, {"choices": []}),
        ({"x-weight-version": "1"}, {"choices": [GOOD, GOOD]}),
        ({"x-weight-version": "1"}, {"choices": [GOOD | {"token_ids": [1]}]}),
        ({"x-weight-version": "1"}, {"choices": [GOOD | {"logprobs": None}]}),
        ({"x-weight-version": "1"}, {"choices": [GOOD | {"token_ids": [1, 105]}]}),
        ({"x-weight-version": "1"}, {"choices": [GOOD | {"token_ids": [1, -1]}]}),
        ({"x-weight-version": "1"}, {"choices": [GOOD | {"logprobs": {"token_logprobs": [-0.5, float("nan")]}}]}),
        ({"x-weight-version": "1"}, ["choices"]),
    ],
    ids=str,
)
def test_malformed_answers_are_as_good_as_none(headers: dict[str, str], answer: object) -> None:
    with engine(200, headers, json.dumps(answer).encode()) as client, pytest.raises(MalformedError):
        client.complete([[0]], count=2)


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_refusals_are_final(status: int) -> None:
    with engine(status, {}, b"wrong key") as client, pytest.raises(RefusedError, match=f"{status}.*wrong key"):
        client.version()


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_other_failures_may_pass(status: int) -> None:
    with engine(status, {}, b"") as client, pytest.raises(OSError, match=str(status)) as raised:
        client.version()
    raised.value.close()  # type: ignore[attr-defined]
