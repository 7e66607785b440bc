"""An SGLang server, which loads a folder when it is asked over HTTP.

Written from SGLang's source at v0.5.18 and at cce0a1244b5a3ee60411fb403f65f856a1d012f0 (github.com/sgl-project/sglang:
python/sglang/srt/entrypoints/http_server.py, managers/io_struct.py, managers/tokenizer_manager.py,
managers/scheduler_components/weight_updater.py, model_executor/model_runner_components/weight_updater.py) and from its
documentation (docs/docs/advanced_features/sglang_for_rl.mdx, docs/docs/basic_usage/native_api.mdx). It was never run
against SGLang itself. The routes are there since v0.5.9:

    GET  /model_info                    200 {"model_path": …, "weight_version": "6", …}; "default" after a start
    POST /update_weights_from_disk      {"model_path", "load_format", "weight_version", "flush_cache", …}
                                        200 {"success": true, "message", …} or 400 {"success": false, "message", …}
    POST /update_weight_version         {"new_version", "abort_all_requests"}

Nothing is paused. Without a pause the server takes a lock for the update that requests share: those that run are
finished with the old weights, new ones wait, and then the weights are loaded and the caches flushed. With
`/pause_generation` that lock is not taken. In the modes `retract` and `in_place` requests are left over, and the server
asserts that its caches can be flushed, which they cannot while there are any; `abort` ends requests. And an agent that
dies in a pause leaves the engine paused.

When a load fails, the server "rolls back" by loading the folder that it was given, which is the new one: its weights
may be a mix of versions, under the old one's name. So it gets another name then.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from weightcast.channel.keys import Position
from weightcast.engine.reload.http import Answer, address_of, ask, shown
from weightcast.errors import EngineError, EngineGoneError

_QUICK = 60.0
"""Seconds for an answer that needs no work."""

_LONG = 1800.0
"""Seconds for a load, which begins when the last running request has ended."""

_MIXED = "updating"
"""The version that an engine names whose weights may be a mix of versions."""

_GATEWAY = (502, 503, 504)
"""What something in between answers: the engine itself may still be at work."""


class SGLangEngine:
    """A server of SGLang 0.5.9 or later. It reads the mirror itself, so the folder must have the same path there.

    With `--tokenizer-worker-num` above 1 the processes of the web server do not share what they know of versions:
    updates are not reliable then.
    """

    def __init__(self, url: str, *, api_key: str | None = None, clear_cache: bool = True, patience: float = _LONG):
        """``api_key`` is the server's `--admin-api-key`, or else its `--api-key`; a load may take ``patience`` seconds.

        Without ``clear_cache`` prefixes that were computed with old weights are kept.
        """
        self.url = address_of(url)
        self._api_key, self._clear_cache, self._patience = api_key, clear_cache, patience

    def version(self) -> str:
        name = self._call("/model_info").fields.get("weight_version")
        if not isinstance(name, str):
            hint = "SGLang 0.5.9 or later names it."
            raise EngineError("the engine does not name the version of its weights", url=self.url, hint=hint)
        return name

    def load(self, folder: Path, position: Position, step: int | None) -> None:
        name = str(position.version)
        body = {
            "model_path": str(folder.absolute()),
            "load_format": "safetensors",  # the server's own may be "dummy", which cannot be loaded
            "weight_version": name,
            "flush_cache": self._clear_cache,
        }
        answer = self._call("/update_weights_from_disk", body, self._patience)
        if answer.fields.get("success") is not True:
            self._disown()
            said = shown(answer.fields.get("message", answer.text))
            hint = "Its weights may be a mix of versions until a load succeeds. The folder must be readable there."
            raise EngineError(f"the engine could not load version {name}: {said}", url=self.url, hint=hint)
        served = self.version()
        if served != name:
            hint = "Is there a load balancer in between, or another agent? Each agent needs an engine of its own."
            raise EngineError(f"the engine loaded version {name} and names {shown(served)!r}", url=self.url, hint=hint)

    def _disown(self) -> None:
        """Take the name of a version from weights that may not be it; requests go on."""
        with suppress(EngineError):
            self._call("/update_weight_version", {"new_version": _MIXED, "abort_all_requests": False})

    def _call(self, path: str, body: Mapping[str, Any] | None = None, seconds: float = _QUICK) -> Answer:
        """An answer with 200, or with 400: that is how a load fails."""
        answer = ask(self.url, path, body, seconds=seconds, token=self._api_key)
        if answer.status in (200, 400):
            return answer
        problem = f"the engine answers {path} with {answer.status}: {answer.shown}"
        if answer.status in _GATEWAY:
            raise EngineGoneError(problem, url=self.url, hint="It is still starting, or it is dead; the agent waits.")
        if answer.status in (401, 403):
            hint = "Pass the server's --admin-api-key, or else its --api-key, with --api-key-file."
            raise EngineError("the engine asks for a key", url=self.url, hint=hint)
        if answer.status == 404:
            hint = "Is it SGLang 0.5.9 or later, and not a router in front of it?"
            raise EngineError(f"the engine has no route {path}", url=self.url, hint=hint)
        raise EngineError(problem, url=self.url)
