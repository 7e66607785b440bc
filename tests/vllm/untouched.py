"""What the entry point changes in a process of vLLM: `python untouched.py` prints it as JSON."""

import json
import os
import sys
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "VLLM_NO_USAGE_STATS": "1"}

import vllm._custom_ops
import vllm.model_executor.layers.utils
import vllm.v1.worker.cpu_worker  # noqa: F401 -- one more that could be touched
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.v1.worker.worker_base import WorkerBase


def attributes() -> dict[str, Any]:
    """Of every module that is there, and of the classes that a backend has to do with."""
    owners = {name: module for name, module in sys.modules.items() if module is not None}
    owners |= {"the factory": WeightTransferEngineFactory, "the worker": WorkerBase}
    return {name: dict(vars(owner)) for name, owner in owners.items() if hasattr(owner, "__dict__")}


if __name__ == "__main__":
    registry, before = dict(WeightTransferEngineFactory._registry), attributes()
    from importlib.metadata import entry_points

    (plugin,) = [one for one in entry_points(group="vllm.general_plugins") if one.name == "weightcast"]
    plugin.load()()
    after = attributes()
    changed = [
        f"{owner}.{name}"
        for owner, was in before.items()
        for name in was.keys() | after[owner].keys()
        if owner.startswith(("vllm", "torch", "numba", "llvmlite", "the "))
        and was.get(name) is not after[owner].get(name)
    ]
    heavy = [name for name in ("weightcast", "numba", "llvmlite") if name in sys.modules and name not in before]
    added = sorted(WeightTransferEngineFactory._registry.keys() - registry.keys())
    print(json.dumps({"changed": changed, "imported": heavy, "registered": added}))
