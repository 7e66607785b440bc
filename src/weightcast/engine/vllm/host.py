"""vLLM as its own process reaches it: the process of its API server, or one that has a `vllm.LLM`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from weightcast.engine.client import LocalEngine
from weightcast.engine.control import Control
from weightcast.errors import EngineError, EngineGoneError

_LONGEST = 1800.0
"""Seconds that a call may take: an update may load a whole model."""

T = TypeVar("T")


class ServerHost:
    """The engine of an API server, for threads beside the loop that serves its requests."""

    def __init__(self, client: Any, loop: asyncio.AbstractEventLoop, url: str):
        """``client`` is vLLM's `AsyncLLM`."""
        self._client, self._loop, self._url = client, loop, url

    def exchange(self, text: str) -> list[str]:
        found = self._call(lambda: self._client.collective_rpc("weightcast", args=(text,)))
        return [one["json"] for one in found]

    def is_paused(self) -> bool:
        return bool(self._call(self._client.is_paused))

    def pause(self) -> None:
        """Not vLLM's own `pause_generation`: that waits for 20 ms afterwards."""
        self._call(lambda: self._client.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))

    def resume(self) -> None:
        self._call(self._client.resume_generation)

    def clear_caches(self) -> None:
        """Not vLLM's own `pause_generation`: that drops what processors made of pictures, too.

        It does so on one side of the engine's queue after the other. A picture that is sent in between is then known
        to one side alone, and each request with it fails.
        """

        async def clear() -> bool:
            client = self._client  # another client's pause may still be draining
            await client.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
            prefixes = client.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            is_cleared, _ = await asyncio.gather(prefixes, client.reset_encoder_cache())
            return bool(is_cleared)

        if not self._call(clear):
            raise EngineError("vLLM cannot clear its prefix cache", url=self._url)

    def served(self) -> str:
        return str(self._call(self._client.get_weight_version))

    def name_version(self, version: str) -> None:
        self._call(lambda: self._client.update_weight_version(version))

    def _call(self, act: Callable[[], Awaitable[T]]) -> T:
        async def run() -> T:
            return await act()

        future: Future[T] = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result(_LONGEST)
        except TimeoutError:
            future.cancel()
            raise EngineError(f"vLLM does not answer within {_LONGEST:.0f} s", url=self._url) from None
        except Exception as error:
            if self._client.errored:
                hint = "Restart it; its log has the reason. The agent waits, and brings it to the newest version."
                raise EngineGoneError(f"the engine has died: {error}", url=self._url, hint=hint) from error
            raise EngineError(f"vLLM: {type(error).__name__}: {error}", url=self._url) from error


class LlmHost:
    """A `vllm.LLM` of this process. Nothing runs between two calls of `generate`, so there is nothing to pause."""

    def __init__(self, llm: Any):
        self._llm = llm

    def exchange(self, text: str) -> list[str]:
        try:
            return [one["json"] for one in self._llm.collective_rpc("weightcast", args=(text,))]
        except NotImplementedError as error:  # vLLM raises it for a method that its worker does not have
            hint = """Start vLLM with weight_transfer_config={"backend": "weightcast"}."""
            raise EngineError("vLLM is running without the weightcast plug-in", url=_HERE, hint=hint) from error

    def is_paused(self) -> bool:
        return False

    def pause(self) -> None:
        """There is nothing to pause."""

    def resume(self) -> None:
        """It was never paused."""

    def clear_caches(self) -> None:
        engine = self._llm.llm_engine
        if not engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise EngineError("vLLM cannot clear its prefix cache", url=_HERE)
        engine.reset_encoder_cache()

    def served(self) -> str:
        return str(self._llm.llm_engine.get_weight_version())

    def name_version(self, version: str) -> None:
        self._llm.llm_engine.set_weight_version(version)


_HERE = "this process"


class InProcess(LocalEngine):
    """A `vllm.LLM` of this process, for an `Agent`."""

    def __init__(self, llm: Any):
        super().__init__(Control(LlmHost(llm), _HERE))
