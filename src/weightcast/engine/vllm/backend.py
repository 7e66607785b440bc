"""The backend in a vLLM worker. vLLM imports this in its workers, and only if the backend was selected."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import vllm
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.worker.worker_base import WorkerBase

from weightcast.engine.layout import Layout
from weightcast.engine.learn import learn
from weightcast.engine.packing import packing_of, probed, repacked
from weightcast.engine.vllm.compatibility import keep_plain_weights, refuse_other_vllm
from weightcast.engine.vllm.derived import derived_in_vllm
from weightcast.engine.vllm.start import settled
from weightcast.engine.worker import EngineWorker
from weightcast.errors import UsageError
from weightcast.format.spec import TensorTable


@dataclass
class InitInfo(WeightTransferInitInfo):
    """There is nothing to set up."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Nothing comes by vLLM's own route: agents use the control server."""


class WeightcastEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Patches the live parameters of this worker's model in place."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any):
        refuse_other_vllm(vllm.__version__)
        refuse_unseen(vllm_config)
        super().__init__(config, vllm_config, device, model)
        with settled(Path(self.model_config.model), get_world_group().barrier) as has_changed:
            if device.type == "cpu":
                keep_plain_weights(model, vllm_config)
            if has_changed:
                self._load_again()
        self._derived = derived_in_vllm(model, vllm_config)
        if self._derived.unsupported is not None:
            hint = "vLLM itself does not compute it again when it reloads weights."
            raise UsageError(f"this model cannot be updated while it runs: {self._derived.unsupported}", hint=hint)
        parallel = self.parallel_config
        folder, rank, world = self.model_config.model, parallel.rank, parallel.world_size
        self.worker = EngineWorker(
            model,
            self._learn,
            self._reload,
            folder,
            rank,
            world,
            self._cannot_reload,
            written=self._derived.derive_again,
            moved=() if self.device.type == "cpu" else self._derived.moved,  # there the packing itself is learned
        )
        WorkerBase.weightcast = _answer

    def _load_again(self) -> None:
        """Load what the folder holds now; `UsageError` where only a start can do so."""
        if problem := self._cannot_reload():
            changed = "the mirror's files changed since this process began"
            hint = "Start it in a new process, while nothing writes to the mirror."
            raise UsageError(f"{changed}, and {problem}", file=self.model_config.model, hint=hint)
        loader: Any = get_model_loader(self.vllm_config.load_config)
        with set_current_vllm_config(self.vllm_config):
            self._reload(loader.get_all_weights(self.model_config, self.model))

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """There is no connection to open."""

    def start_weight_update(self) -> None:
        raise UsageError("weightcast updates weights by its own control server", hint="Run `weightcast attach`.")

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.start_weight_update()

    def finish_weight_update(self) -> None:
        """There is no update of this kind."""

    def shutdown(self) -> None:
        self.worker.close()

    def _learn(self, table: TensorTable) -> Layout:
        layout = learn(self.model, self.model.load_weights, table)
        if self.device.type == "cpu":
            layout = with_packed_experts(layout, self.model)
        return layout.without(self._derived.reload, self._derived.made)

    def _cannot_reload(self) -> str | None:
        packed = self.device.type == "cpu" and any(True for _ in packed_experts(self.model))
        return "on a CPU vLLM packs experts, and its own reload leaves them unpacked" if packed else None

    def _reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(weights)
        finally:  # without it the parameters are lost
            finalize_layerwise_reload(self.model, self.model_config)


_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding that have no weights of their own."""


def refuse_unseen(config: Any) -> None:
    """`UsageError` for options with which vLLM holds or changes parameters that the backend does not see."""
    parallel = config.parallel_config
    # vLLM resets the size for each core of a dense model, but neither the index nor the elastic maximum.
    if max(parallel.data_parallel_size, parallel.elastic_ep_max_dp_size or 1) > 1 or parallel.data_parallel_index > 0:
        hint = "Start one server for each replica without --data-parallel-size, and an agent for each."
        raise UsageError("the weightcast backend does not work with data parallelism", hint=hint)
    if parallel.enable_eplb:
        hint = "Start vLLM without --enable-eplb: it moves experts to other places while the engine runs."
        raise UsageError("the weightcast backend does not work with expert load balancing", hint=hint)
    speculative = config.speculative_config
    if speculative is not None and speculative.method not in _WITHOUT_WEIGHTS:
        hint = "Leave --speculative-config out, or use its method ngram, which has no weights."
        raise UsageError(f"the weightcast backend does not update the drafts of {speculative.method}", hint=hint)
    if config.model_config.enable_sleep_mode or config.model_config.enable_cumem_allocator:
        hint = "Start vLLM without --enable-sleep-mode and --enable-cumem-allocator: either lets it drop weights."
        raise UsageError("the weightcast backend does not work with sleep mode", hint=hint)


def _answer(self: Any, request: str) -> dict[str, str]:
    """The method of vLLM's worker that `collective_rpc("weightcast", …)` calls; vLLM does not return plain text."""
    for name in ("reload_weights", "reset_weights"):  # the second came with vLLM 0.32
        if hasattr(self, name) and name not in vars(self):
            setattr(self, name, _forgetting(self, getattr(self, name)))
    return {"json": self.weight_transfer_engine.worker.answer(request)}


def _forgetting(worker: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of vLLM's worker that changes parameters by itself."""

    def changed(*args: Any, **kwargs: Any) -> Any:
        worker.weight_transfer_engine.worker.forget()
        return method(*args, **kwargs)

    return changed


def packed_experts(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, CPUUnquantizedExperts]]:
    """The experts of a mixture that vLLM packs on a CPU after its loader has run."""
    for name, module in model.named_modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if isinstance(experts, CPUUnquantizedExperts) and not experts._use_zentorch:
            yield name, module, experts


def with_packed_experts(layout: Layout, model: torch.nn.Module) -> Layout:
    """Have vLLM pack the numbers of elements, and find where they are afterwards."""
    for name, module, experts in packed_experts(model):
        for parameter in ("w13_weight", "w2_weight"):
            shape = tuple(getattr(module, parameter).shape[1:])
            places = probed(shape, partial(_packed, experts.isa))
            packing = None if places is None else packing_of(places)
            if packing is not None:
                layout = repacked(layout, [f"{name}.{parameter}"], packing)
    return layout


def _packed(isa: str, matrix: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    stack = torch.from_numpy(matrix.view(np.int16)).view(torch.bfloat16)[None]
    packed: npt.NDArray[np.int16] = cpu_prepack_moe_weight(stack, isa)[0].view(torch.int16).numpy()
    return packed.view(np.uint16)
