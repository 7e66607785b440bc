"""FSDP2 by accelerate on a CPU: `import fsdp_on_cpu` before the first `Accelerator` is made.

accelerate 1.15 takes up an `fsdp_plugin` only where the processes have GPUs or the like (`AcceleratorState.__init__`
lists MULTI_GPU and others, not MULTI_CPU); on a CPU it leaves the model whole and says nothing. Here its state has on a
CPU what it has there. All that follows is accelerate's own: `Accelerator._prepare_fsdp2`, `fsdp2_prepare_model`.
"""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

_begin = AcceleratorState.__init__


def _begin_with_fsdp(
    state: AcceleratorState, *args: Any, fsdp_plugin: FullyShardedDataParallelPlugin | None = None, **options: Any
) -> None:
    _begin(state, *args, fsdp_plugin=fsdp_plugin, **options)
    if fsdp_plugin is None or state.distributed_type != DistributedType.MULTI_CPU:
        return
    if state.mixed_precision != "no":
        fsdp_plugin.set_mixed_precision(state.mixed_precision)
    state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


AcceleratorState.__init__ = _begin_with_fsdp
