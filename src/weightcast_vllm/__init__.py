"""The entry point that vLLM loads in each of its processes, chosen or not: it names our backend, and that is all.

It is no part of the package `weightcast`, whose import takes seconds and brings numba: vLLM 0.32 on a CPU looks into
every module that is there when a worker begins, and stumbles over numba's.
"""

from __future__ import annotations

import logging

BACKEND = "weightcast"


def register() -> None:
    """The entry point of the group ``vllm.general_plugins``."""
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    except ImportError:  # an older vLLM, whose user may not even know that we are installed
        logging.getLogger("weightcast").debug("this vLLM has no weight transfer")
        return
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "weightcast.engine.vllm.backend", "WeightcastEngine")
