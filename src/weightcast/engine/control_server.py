"""The control server of an engine: `Control` over HTTP, for agents with the token.

    GET  /report                    the state of the engine
    POST /ask, /run                 a request, or a job, for every worker
    POST /meet, /renew, /leave      the lease of the owner
    POST /update                    a version

Bodies and answers are those of `protocol`. It listens on a socket that only this user can reach, or on the loopback
interface; each start makes a token of its own, unless one is given.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from weightcast.disk.durable import locked
from weightcast.engine.address import (
    RUNTIME,
    Address,
    make_private,
    new_token,
    record_path,
    write_record,
)
from weightcast.engine.bounded_http import BoundedRequests, BoundedServer
from weightcast.engine.client import OWNER
from weightcast.engine.control import Control
from weightcast.engine.protocol import MAX_LENGTH, decode_update, encode
from weightcast.errors import BusyError, EngineBusyError, EngineError, EngineGoneError, WeightcastError

_MOST_NAME, _SHORTEST_ID = 200, 16
_log = logging.getLogger("weightcast")


class ControlServer(BoundedServer):
    def __init__(self, control: Control, place: Path | tuple[str, int], token: str):
        self.control = control
        super().__init__(place, _Requests, token)


@contextmanager
def serving_control(
    control: Control, folder: Path, port: int, listen: tuple[str, int] | None = None
) -> Iterator[Address]:
    """Serve an engine's control, and leave a record of it under the engine's own ``port``.

    It listens on a socket in ``folder``, or at ``listen``. `BusyError` while another engine has a record of that port
    there, as one in another container may that shares the folder.
    """
    make_private(folder)
    record = record_path(folder, port)
    token, place = new_token(), folder / f"{port}.sock"
    with _owning(folder, port), closing(ControlServer(control, listen or place, token)) as server:
        address = Address(token, None, listen[0], server.port) if listen else Address(token, place)
        write_record(record, address)
        try:
            yield address
        finally:
            record.unlink(missing_ok=True)


@contextmanager
def _owning(folder: Path, port: int) -> Iterator[None]:
    with ExitStack() as held:
        try:
            held.enter_context(locked(folder / f"{port}.lock", patience=0))
        except BusyError:
            problem = f"another engine of port {port} is controlled through this folder"
            hint = f"Give each a port of its own, or a folder of its own with {RUNTIME}."
            raise BusyError(problem, file=str(folder), hint=hint) from None
        yield


class _Requests(BoundedRequests):
    server: ControlServer

    def do_GET(self) -> None:  # noqa: N802 -- http.server calls it
        if self.let_in():
            self._respond(lambda control, owner, body: encode(control.report()), {"/report"}, b"")

    def do_POST(self) -> None:  # noqa: N802 -- http.server calls it
        if not self.let_in():
            return
        body = self.body(MAX_LENGTH)
        if body is not None:
            self._respond(_ROUTES.get(self.path), _ROUTES, body)

    def _respond(self, act: Callable[[Control, str, str], str] | None, paths: Any, body: bytes) -> None:
        if act is None or self.path not in paths:
            self.answer(404, {"error": f"there is no {self.path[:100]}", "hint": "Is this the engine that you meant?"})
            return
        owner = self.headers.get(OWNER, "")
        try:
            answer = act(self.server.control, owner, body.decode(errors="replace"))
        except WeightcastError as error:
            self.answer(409 if isinstance(error, EngineBusyError) else 400, _error(error))
        except Exception as error:  # noqa: BLE001 -- the agent gets it instead
            _log.exception("a request failed")
            self.answer(500, {"error": f"{type(error).__name__}: {error}"})
        else:
            self.send(200, "application/json", answer.encode())


def _error(error: WeightcastError) -> dict[str, Any]:
    """What `HttpEngine` raises again."""
    return {
        "error": error.problem,
        "hint": error.hint,
        "tensor": error.tensor,
        "holder": error.holder if isinstance(error, EngineBusyError) else None,
        "gone": isinstance(error, EngineGoneError),
    }


def _meet(control: Control, owner: str, body: str) -> str:
    if not 0 < len(body) <= _MOST_NAME or not body.isprintable() or len(owner) < _SHORTEST_ID:
        raise EngineError("an owner has a name and an id", url=control.url)
    return encode(control.meet(owner, body))


def _renew(control: Control, owner: str, body: str) -> str:
    control.renew(owner)
    return "{}"


_ROUTES: dict[str, Callable[[Control, str, str], str]] = {
    "/ask": lambda control, owner, body: json.dumps({"answers": control.exchange(owner, body)}),
    "/run": lambda control, owner, body: json.dumps({"answers": control.run(owner, body)}),
    "/meet": _meet,
    "/renew": _renew,
    "/leave": lambda control, owner, body: encode(control.leave(owner)),
    "/update": lambda control, owner, body: encode(control.update(owner, decode_update(body))),
}
