"""What vLLM finds of weightcast: an entry point, which only names our backend, and a middleware for its API server.

It is no part of the package `weightcast`, whose import takes seconds and brings numba: vLLM 0.32 on a CPU looks into
every module that is there when a worker begins, and stumbles over numba's.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

BACKEND = "weightcast"
BEGAN = time.time()
"""In seconds since 1970: when this process had loaded no weights yet."""


def _begin() -> None:
    global BEGAN
    BEGAN = time.time()


os.register_at_fork(after_in_child=_begin)


def register() -> None:
    """The entry point of the group ``vllm.general_plugins``."""
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    except ImportError:  # an older vLLM, whose user may not even know that we are installed
        logging.getLogger("weightcast").debug("this vLLM has no weight transfer")
        return
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "weightcast.engine.vllm.backend", "WeightcastEngine")


class Middleware:
    """For ``--middleware weightcast_vllm.Middleware``; the real one is imported when it is used."""

    def __init__(self, app: Any):
        from weightcast.engine.vllm.middleware import Middleware as Real

        self._real = Real(app)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._real(scope, receive, send)
