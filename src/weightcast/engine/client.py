"""An engine as an agent reaches it: over HTTP, or in the same process."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from http.client import HTTPException
from typing import Any, Protocol, TypeVar

from weightcast.engine import protocol
from weightcast.engine.messages import ApplyUpdate, Failed, Request
from weightcast.engine.protocol import MAX_LENGTH, ProtocolError, decode_answer, encode
from weightcast.errors import EngineError, EngineGoneError, FormatError, UsageError

_QUICK, _LONG = 60.0, 1800.0
"""Seconds that a request may take; the second for an update, which may load a whole model."""

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Uses no proxy: `http_proxy` is for the web, and an engine's control plane is on this host or next to it."""

_PLUGIN = """Start vLLM with --weight-transfer-config '{"backend": "weightcast"}', and weightcast installed."""

_NO_METHOD = "Method 'weightcast' is not implemented", "has no attribute 'weightcast'"
"""How vLLM, with its two executors, reports that workers lack the plug-in's method; it has no code for that."""

A = TypeVar("A")


class Engine(Protocol):
    """An engine whose workers hold the parameters. All methods raise `EngineError`."""

    @property
    def url(self) -> str: ...

    def ask(self, request: Request[A]) -> list[A]:
        """Send a request to every worker; their answers, in the order of ranks."""
        ...

    def is_paused(self) -> bool: ...

    def pause(self, clear_cache: bool) -> None:
        """Hold requests in flight where they are; ``clear_cache`` drops what was computed from old weights."""
        ...

    def resume(self) -> None: ...

    def update(self, update: ApplyUpdate) -> None:
        """Have all workers write; `finish` must follow."""
        ...

    def finish(self, version: str | None) -> None:
        """End an update, and name the version that the engine serves; None leaves the name as it is."""
        ...

    def name_version(self, version: str) -> None: ...


class HttpEngine:
    """A vLLM server. It must run with ``VLLM_SERVER_DEV_MODE=1``, which opens the routes for updates."""

    def __init__(self, url: str):
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"{url[:200]!r} is not the address of an engine", hint="Write http://host:port.")
        self.url = url.rstrip("/")

    def ask(self, request: Request[A]) -> list[A]:
        found = self.call("/collective_rpc", {"method": "weightcast", "args": [encode(request)]})
        results = self._field(found, "/collective_rpc", "results", list)
        return read_answers(request, [one.get("json") if isinstance(one, dict) else one for one in results], self.url)

    def is_paused(self) -> bool:
        return bool(self._field(self.call("/is_paused", method="GET"), "/is_paused", "is_paused", bool))

    def pause(self, clear_cache: bool) -> None:
        self.call(f"/pause?mode=keep&clear_cache={'true' if clear_cache else 'false'}")

    def resume(self) -> None:
        self.call("/resume")

    def update(self, update: ApplyUpdate) -> None:
        try:
            self.call("/start_weight_update")
        except EngineGoneError:
            raise
        except EngineError:  # an earlier agent was killed between start and finish
            self.call("/finish_weight_update")
            self.call("/start_weight_update")
        self.call("/update_weights", {"update_info": {"message": encode(update)}}, _LONG)

    def finish(self, version: str | None) -> None:
        self.call("/finish_weight_update", {} if version is None else {"weight_version": version})

    def name_version(self, version: str) -> None:
        self.call("/update_weight_version", {"new_version": version})

    def call(
        self, path: str, body: Mapping[str, Any] | None = None, timeout: float = _QUICK, method: str = "POST"
    ) -> dict[str, Any]:
        """One HTTP request; the JSON object that it answers."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if body is not None else {}
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)
        try:
            with _direct.open(request, timeout=timeout) as answer:
                text = answer.read(MAX_LENGTH)
        except urllib.error.HTTPError as error:
            raise self._refused(path, error) from None
        except (OSError, HTTPException) as error:
            hint = "It is still starting, or it is dead; the agent waits for it."
            raise EngineGoneError(f"the engine does not answer: {error}", url=self.url, hint=hint) from error
        try:
            found = json.loads(text) if text else {}
        except (ValueError, RecursionError):
            raise EngineError(f"the engine's answer to {path} is not JSON", url=self.url) from None
        return found if isinstance(found, dict) else {}

    def _field(self, found: Mapping[str, Any], path: str, name: str, kind: type) -> Any:
        if not isinstance(found.get(name), kind):
            raise EngineError(f"the engine's answer to {path} has no {name}", url=self.url)
        return found[name]

    def _refused(self, path: str, error: urllib.error.HTTPError) -> EngineError:
        text = error.read(2000).decode(errors="replace").strip()
        route = path.partition("?")[0]
        if error.code == 404:
            hint = "Start vLLM 0.32 with VLLM_SERVER_DEV_MODE=1: it opens the routes for updates."
            return EngineError(f"the engine has no route {route}", url=self.url, hint=hint)
        if error.code == 500 and self._is_dead():
            hint = "Restart it; its log has the reason. The agent waits, and brings it to the newest version."
            return EngineGoneError(f"the engine has died; it answers {route} with: {text}", url=self.url, hint=hint)
        if error.code == 500 and any(reason in text for reason in _NO_METHOD):
            return EngineError("vLLM is running without the weightcast plug-in", url=self.url, hint=_PLUGIN)
        return EngineError(f"the engine answers {route} with {error.code}: {text}", url=self.url)

    def _is_dead(self) -> bool:
        """vLLM's web server may outlive its engine: only its health tells one failed call from a dead engine."""
        try:
            _direct.open(f"{self.url}/health", timeout=_QUICK).close()
        except urllib.error.HTTPError as error:
            return error.code == 503
        except (OSError, HTTPException):
            return True
        return False


class InProcess:
    """A `vllm.LLM` of this process. Nothing runs between two calls of `generate`, so there is nothing to pause."""

    url = "this process"

    def __init__(self, llm: Any):
        self._llm = llm

    def ask(self, request: Request[A]) -> list[A]:
        try:
            results = self._llm.collective_rpc("weightcast", args=(encode(request),))
        except NotImplementedError as error:  # vLLM raises it for a method that its worker does not have
            raise EngineError("vLLM is running without the weightcast plug-in", url=self.url, hint=_PLUGIN) from error
        return read_answers(request, [one["json"] for one in results], self.url)

    def is_paused(self) -> bool:
        return False

    def pause(self, clear_cache: bool) -> None:
        if clear_cache and not self._llm.reset_prefix_cache():
            raise EngineError("the prefix cache cannot be cleared", url=self.url)

    def resume(self) -> None:
        """It was never paused."""

    def update(self, update: ApplyUpdate) -> None:
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": {"message": encode(update)}})

    def finish(self, version: str | None) -> None:
        self._llm.finish_weight_update(version)

    def name_version(self, version: str) -> None:
        self._llm.update_weight_version(version)


def read_answers(request: Request[A], texts: Iterable[object], url: str) -> list[A]:
    """The workers' answers; `EngineError` if one could not do what it was asked, or answers something else."""
    answers = [_read_answer(request, text, rank, url) for rank, text in enumerate(texts)]
    if not answers:
        raise EngineError("the engine has no workers", url=url)
    return answers


def _read_answer(request: Request[A], text: object, rank: int, url: str) -> A:
    try:
        if not isinstance(text, str):
            raise FormatError("the answer is not text")
        answer = decode_answer(text)
        if not isinstance(answer, (request.answer, Failed)):
            raise FormatError(f"{type(answer).__name__} does not answer {type(request).__name__}")
    except ProtocolError as error:
        hint = "Install the same weightcast on the agent's side and on the engine's, and restart both."
        problem = f"the engine's plug-in uses protocol {error.found}, this agent uses {protocol.PROTOCOL}"
        raise EngineError(problem, url=url, hint=hint) from error
    except FormatError as error:
        raise EngineError(f"worker {rank} sent a malformed answer: {error.problem}", url=url) from error
    if isinstance(answer, Failed):
        raise EngineError(f"worker {rank}: {answer.problem}", url=url)
    return answer  # type: ignore[return-value]
