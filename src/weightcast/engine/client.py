"""How an agent speaks to an engine: over http, or in its own process."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any, Protocol

from weightcast.errors import EngineError, EngineGoneError

_QUICK, _LONG = 60.0, 1800.0
"""Seconds that an answer may take: of a question, and of an update, which may load a whole model."""

_MOST = 1 << 28
"""Bytes of an answer."""

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Uses no proxy: `http_proxy` is for the web, and an engine's control plane is on this host or beside it."""


class Engine(Protocol):
    """An engine whose workers hold the parameters. All methods raise `EngineError`."""

    @property
    def url(self) -> str: ...

    def ask(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Put a request to every worker; their answers, in the order of ranks."""
        ...

    def is_paused(self) -> bool: ...

    def pause(self, clear_cache: bool) -> None:
        """Keep requests in flight where they are. With ``clear_cache`` what was computed from old weights goes."""
        ...

    def resume(self) -> None: ...

    def update(self, info: Mapping[str, Any]) -> None:
        """Have all workers write; `finish` must follow."""
        ...

    def finish(self, version: str | None) -> None:
        """End an update, and name the version that the engine serves; None leaves the name as it is."""
        ...

    def name_version(self, version: str) -> None: ...


class HttpEngine:
    """A vLLM server. It must run with ``VLLM_SERVER_DEV_MODE=1``, which opens the routes for updates."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")

    def ask(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        body = {"method": "weightcast", "args": [json.dumps(request)]}
        with understood(self.url):
            answers = [_answer_of(one) for one in self._post("/collective_rpc", body)["results"]]
        refuse_errors(answers, self.url)
        return answers

    def is_paused(self) -> bool:
        return bool(self._call("GET", "/is_paused")["is_paused"])

    def pause(self, clear_cache: bool) -> None:
        self._post(f"/pause?mode=keep&clear_cache={'true' if clear_cache else 'false'}")

    def resume(self) -> None:
        self._post("/resume")

    def update(self, info: Mapping[str, Any]) -> None:
        try:
            self._post("/start_weight_update")
        except EngineGoneError:
            raise
        except EngineError:  # an agent before us was killed between start and finish
            self._post("/finish_weight_update")
            self._post("/start_weight_update")
        self._post("/update_weights", {"update_info": info}, _LONG)

    def finish(self, version: str | None) -> None:
        self._post("/finish_weight_update", {} if version is None else {"weight_version": version})

    def name_version(self, version: str) -> None:
        self._post("/update_weight_version", {"new_version": version})

    def _post(self, path: str, body: Mapping[str, Any] | None = None, timeout: float = _QUICK) -> dict[str, Any]:
        return self._call("POST", path, body, timeout)

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float = _QUICK
    ) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if body is not None else {}
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)
        try:
            with _direct.open(request, timeout=timeout) as answer:
                text = answer.read(_MOST)
        except urllib.error.HTTPError as error:
            raise self._refused(path, error) from None
        except (OSError, HTTPException) as error:
            hint = "It is starting, or dead; the agent waits for it."
            raise EngineGoneError(f"the engine does not answer: {error}", url=self.url, hint=hint) from error
        try:
            found = json.loads(text) if text else {}
        except ValueError:
            raise EngineError(f"the engine's answer to {path} is no JSON", url=self.url) from None
        return found if isinstance(found, dict) else {}

    def _refused(self, path: str, error: urllib.error.HTTPError) -> EngineError:
        text = error.read(2000).decode(errors="replace").strip()
        if error.code == 404:
            hint = "Start vLLM 0.32 with VLLM_SERVER_DEV_MODE=1: it opens the routes for updates."
            return EngineError(f"the engine has no route {path.partition('?')[0]}", url=self.url, hint=hint)
        if path == "/collective_rpc" and error.code == 500:
            hint = """Start vLLM with --weight-transfer-config '{"backend": "weightcast"}', and weightcast installed."""
            return EngineError(f"the engine's workers know no weightcast: {text}", url=self.url, hint=hint)
        return EngineError(f"the engine answers {path.partition('?')[0]} with {error.code}: {text}", url=self.url)


class InProcess:
    """A `vllm.LLM` of this very process. Between two calls of `generate` nothing runs, so pausing it is nothing."""

    url = "this process"

    def __init__(self, llm: Any):
        self._llm = llm

    def ask(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        with understood(self.url):
            answers = [_answer_of(one) for one in self._llm.collective_rpc("weightcast", args=(json.dumps(request),))]
        refuse_errors(answers, self.url)
        return answers

    def is_paused(self) -> bool:
        return False

    def pause(self, clear_cache: bool) -> None:
        if clear_cache and not self._llm.reset_prefix_cache():
            raise EngineError("the prefix cache cannot be cleared", url=self.url)

    def resume(self) -> None:
        """It was never paused."""

    def update(self, info: Mapping[str, Any]) -> None:
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": dict(info)})

    def finish(self, version: str | None) -> None:
        self._llm.finish_weight_update(version)

    def name_version(self, version: str) -> None:
        self._llm.update_weight_version(version)


@contextmanager
def understood(url: str) -> Iterator[None]:
    """`EngineError` for answers that make no sense: an engine is no part of us."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        problem = f"the engine's workers answer what makes no sense: {type(error).__name__}: {error}"
        raise EngineError(problem, url=url, hint="Install the same weightcast on both sides.") from error


def _answer_of(result: Any) -> dict[str, Any]:
    answer = json.loads(result["json"])
    if not isinstance(answer, dict):
        raise TypeError("no object")
    return answer


def refuse_errors(answers: list[dict[str, Any]], url: str) -> None:
    """`EngineError` if a worker could not do what it was asked."""
    if not answers:
        raise EngineError("the engine has no workers", url=url)
    for rank, answer in enumerate(answers):
        if "error" in answer:
            raise EngineError(f"worker {rank}: {answer['error']}", url=url)
