"""An engine as an agent reaches it: through the control server of its process, or in the agent's own process."""

from __future__ import annotations

import hmac
import json
import uuid
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from socket import AF_UNIX, SOCK_STREAM, socket
from typing import Any, Protocol, TypeVar

from weightcast.engine.address import Address, check_engine, find_address
from weightcast.engine.control import Control
from weightcast.engine.host import other_protocol, read_answers
from weightcast.engine.jobs import read_results
from weightcast.engine.messages import EngineReport, JobRequest, Outcome, Request, UpdateEngine
from weightcast.engine.protocol import MAX_LENGTH, ProtocolError, decode_answer, encode
from weightcast.errors import EngineBusyError, EngineError, EngineGoneError, FormatError

_QUICK, _LONG = 60.0, 2000.0
"""Seconds that a request may take; the second for a job or an update, which may read or load a whole model."""

_MAX_ERROR = 4000
"""Bytes of an error's answer that are read."""

A = TypeVar("A")
R = TypeVar("R")


class Engine(Protocol):
    """An engine whose workers hold the parameters. All methods raise `EngineError`.

    Each object is an owner of its own: what changes the engine is refused with `EngineBusyError` while another owns it.
    """

    @property
    def url(self) -> str: ...

    def report(self) -> EngineReport:
        """The state of the engine."""
        ...

    def ask(self, request: Request[A]) -> list[A]:
        """Send a request to every worker; their answers, in the order of ranks."""
        ...

    def run(self, request: JobRequest[R]) -> list[R]:
        """Have every worker do a job, and wait for it; their results, in the order of ranks."""
        ...

    def meet(self, name: str) -> EngineReport:
        """Become or stay the owner, under a name that others are told, and end a pause that an update left behind."""
        ...

    def renew(self) -> None:
        """Stay the owner. It may be called from any thread, also during the other calls."""
        ...

    def update(self, update: UpdateEngine) -> Outcome: ...

    def leave(self) -> EngineReport:
        """Give the engine back."""
        ...


class LocalEngine:
    """An engine in this process."""

    def __init__(self, control: Control):
        self._control, self._owner = control, uuid.uuid4().hex
        self.url = control.url

    def report(self) -> EngineReport:
        return self._control.report()

    def ask(self, request: Request[A]) -> list[A]:
        return read_answers(request, self._control.exchange(self._owner, encode(request)), self.url)

    def run(self, request: JobRequest[R]) -> list[R]:
        return read_results(request, self._control.run(self._owner, encode(request)), self.url)

    def meet(self, name: str) -> EngineReport:
        return self._control.meet(self._owner, name)

    def renew(self) -> None:
        self._control.renew(self._owner)

    def update(self, update: UpdateEngine) -> Outcome:
        return self._control.update(self._owner, update)

    def leave(self) -> EngineReport:
        return self._control.leave(self._owner)


class HttpEngine:
    """An engine of this host, or one elsewhere behind TLS; `find_address` says what ``engine`` may be."""

    def __init__(self, engine: str, token: str | None = None, identity: str | None = None):
        """Without a ``token`` it is the one that the engine has left for agents of this host.

        An ``identity`` lasts: an agent that is restarted under the same one still owns the engine.
        """
        self._engine, self._token = engine, token
        check_engine(engine, token)
        self._identity = identity or uuid.uuid4().hex
        self.url = engine.rstrip("/")

    def report(self) -> EngineReport:
        return self._decoded("GET", "/report", None, EngineReport)

    def ask(self, request: Request[A]) -> list[A]:
        return read_answers(request, self._answers("/ask", encode(request), _QUICK), self.url)

    def run(self, request: JobRequest[R]) -> list[R]:
        return read_results(request, self._answers("/run", encode(request), _LONG), self.url)

    def meet(self, name: str) -> EngineReport:
        return self._decoded("POST", "/meet", name, EngineReport)

    def renew(self) -> None:
        self._call("POST", "/renew", "", _QUICK)

    def update(self, update: UpdateEngine) -> Outcome:
        return self._decoded("POST", "/update", encode(update), Outcome, _LONG)

    def leave(self) -> EngineReport:
        return self._decoded("POST", "/leave", "", EngineReport)

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    def _answers(self, path: str, body: str, timeout: float) -> list[object]:
        found = _json(self._call("POST", path, body, timeout), path, self.url)
        answers = found.get("answers") if isinstance(found, dict) else None
        if not isinstance(answers, list):
            raise EngineError(f"the engine's answer to {path} has no answers", url=self.url)
        return answers

    def _decoded(self, method: str, path: str, body: str | None, kind: type[A], timeout: float = _QUICK) -> A:
        try:
            answer = decode_answer(self._call(method, path, body, timeout).decode(errors="replace"))
        except ProtocolError as error:
            raise other_protocol(error.found, self.url) from error
        except FormatError as error:
            raise EngineError(f"the engine's answer to {path} is malformed: {error.problem}", url=self.url) from error
        if not isinstance(answer, kind):
            raise EngineError(f"the engine answers {path} with a {type(answer).__name__}", url=self.url)
        return answer

    def _call(self, method: str, path: str, body: str | None, timeout: float) -> bytes:
        """One request, straight to the engine: proxies are for the web."""
        address = find_address(self._engine, self._token)
        connection = _connection(address, timeout)
        # Others are told the names of owners. Their ids are secrets: they depend on the token.
        owner = hmac.new(address.token.encode(), self._identity.encode(), "sha256").hexdigest()
        headers = {"Authorization": f"Bearer {address.token}", OWNER: owner}
        try:
            with suppress(BrokenPipeError):  # a server that refuses the head does not wait for the body
                connection.request(method, path, None if body is None else body.encode(), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise self._refused(path, answer)
            data = answer.read(MAX_LENGTH + 1)
        except (OSError, HTTPException) as error:
            hint = "It is still starting, or it is dead; the agent waits for it."
            raise EngineGoneError(f"the engine does not answer: {error}", url=self.url, hint=hint) from error
        finally:
            connection.close()
        if len(data) > MAX_LENGTH:
            raise EngineError(f"the engine's answer to {path} has more than {MAX_LENGTH:,} bytes", url=self.url)
        return data

    def _refused(self, path: str, answer: HTTPResponse) -> EngineError:
        text = answer.read(_MAX_ERROR).decode(errors="replace")
        if answer.status == 401:
            remedy = "Pass the token of the engine that runs now: it makes another one when it starts."
            return EngineError("the engine refuses the token", url=self.url, hint=remedy)
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("error"), str):
            remedy = "Is this the control server of an engine, and not its API?"
            return EngineError(f"{path} is answered with {answer.status}: {text[:200]}", url=self.url, hint=remedy)
        problem: str = found["error"]
        hint, tensor, holder = (_text(found.get(name)) for name in ("hint", "tensor", "holder"))
        if holder is not None:
            return EngineBusyError(problem, url=self.url, holder=holder, hint=hint)
        kind = EngineGoneError if found.get("gone") is True else EngineError
        return kind(problem, url=self.url, tensor=tensor, hint=hint)


OWNER = "X-Weightcast-Owner"


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str, timeout: float):
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket(AF_UNIX, SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connection(address: Address, timeout: float) -> HTTPConnection:
    if address.socket is not None:
        return _UnixConnection(str(address.socket), timeout)
    kind = HTTPSConnection if address.is_tls else HTTPConnection
    return kind(address.host, address.port, timeout=timeout)


def _json(data: bytes, path: str, url: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise EngineError(f"the engine's answer to {path} is not JSON", url=url) from None


def _text(value: object) -> str | None:
    return value[:_MAX_ERROR] if isinstance(value, str) else None
