"""The plug-in for vLLM: `--weight-transfer-config '{"backend": "weightcast"}'`.

vLLM calls `register` in each of its processes. That names our backend and changes nothing for those who do not choose
it. In a worker, `WeightcastEngine` answers requests that come in by `collective_rpc("weightcast", …)`; updates come by
vLLM's own start, update and finish.
"""

from __future__ import annotations

import logging

from weightcast.errors import UsageError

BACKEND = "weightcast"
WORKS_WITH = ("0.32",)
_log = logging.getLogger("weightcast")


def register() -> None:
    """The entry point of the group ``vllm.general_plugins``."""
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    except ImportError:  # an older vLLM, whose user may not even know that we are installed
        _log.debug("this vLLM has no weight transfer")
        return
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "weightcast.engines.transfer", "WeightcastEngine")
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        let_modules_be_scanned()
        keep_plain_weights()


def refuse_other_vllm(version: str) -> None:
    """`UsageError` for a vLLM whose interface we do not know."""
    if ".".join(version.split(".")[:2]) not in WORKS_WITH:
        known = ", ".join(f"{one}.x" for one in WORKS_WITH)
        hint = f"Install vLLM {known}, or a weightcast that knows vLLM {version}."
        raise UsageError(f"the weightcast backend does not work with vLLM {version}", hint=hint)


def is_chosen() -> bool:
    """Whether the model that is being loaded will be patched by us."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    transfer = None if config is None else config.weight_transfer_config
    return transfer is not None and transfer.backend == BACKEND


def let_modules_be_scanned() -> None:
    """vLLM asks every object of every module for its ``__dict__``; numba's library answers with a function of C."""
    from llvmlite.binding import ffi

    wrapper = type(ffi.lib)
    symbol = wrapper.__getattr__

    def without_dunders(self: object, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return symbol(self, name)

    wrapper.__getattr__ = without_dunders


class _Unless:
    """Something that is true as before, but for engines that we patch."""

    def __init__(self, before: object):
        self._before = before

    def __bool__(self) -> bool:
        return bool(self._before) and not is_chosen()


def keep_plain_weights() -> None:
    """On a CPU vLLM packs weights for its kernels and drops what it packed. What we patch has to stay as it is."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers import utils

    if isinstance(ops._supports_onednn, _Unless):
        return
    ops._supports_onednn = _Unless(ops._supports_onednn)
    small = utils.check_cpu_sgl_kernel
    utils.check_cpu_sgl_kernel = lambda *args, **kwargs: not is_chosen() and small(*args, **kwargs)
