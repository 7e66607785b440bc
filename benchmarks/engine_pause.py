"""The pause of an update in vLLM: our scatter, vLLM's own sparse loader, and a full reload through vLLM.

    .venv-vllm/bin/python benchmarks/engine_pause.py [--changed 0.01] [--repeats 7]

One process, one vLLM, one model (134 M parameters in bf16, random), and the same patch for all three, in turn: each
repeat changes the same elements there and back. Times are medians of what runs while the engine is paused; memory is
the peak of the process above what it was. Prints JSON, and a table on standard error.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    ONEDNN_MAX_CPU_ISA="AVX512_CORE_BF16",
    TORCH_COMPILE_DISABLE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

import numpy as np
import torch

# Some virtual machines advertise AMX and then die in it.
torch.cpu._is_amx_tile_supported = lambda: False
torch.cpu._is_amx_fp16_supported = lambda: False

from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from vllm import LLM  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.model_executor.model_loader.checkpoint_weight_patch import (  # noqa: E402
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

import weightcast as wc  # noqa: E402
from weightcast.engine.agent import Agent  # noqa: E402
from weightcast.engine.messages import Outcome, UpdateEngine  # noqa: E402
from weightcast.engine.vllm.host import InProcess  # noqa: E402

Arm = tuple[float, int]
"""Seconds, and bytes of memory above what there was."""


def make_model(folder: Path) -> Path:
    config = Qwen3Config(
        vocab_size=32000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model: Any = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    return folder


def measured(action: Callable[[], object]) -> Arm:
    """How long it takes, and how much the process grows meanwhile."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not serve as room
    Path("/proc/self/clear_refs").write_text("5")
    before, began = _memory("VmRSS"), time.perf_counter()
    action()
    seconds = time.perf_counter() - began
    return seconds, max(0, _memory("VmHWM") - before)


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"there is no {field}")


class Trained:
    """Weights that change by one unit in the last place in some places, and a channel of them."""

    def __init__(self, model: Path, channel: str, changed: float):
        with wc.Checkpoint(model) as files:
            self.specs = list(files.table)
            arrays = {spec.name: files.read(spec.name).reshape(spec.shape).copy() for spec in files.table}
            self.weights = wc.Arrays(arrays, dtypes={spec.name: spec.dtype for spec in files.table})
        rng = np.random.default_rng(0)
        self.places = {
            spec.name: np.sort(rng.choice(spec.elements, max(1, int(spec.elements * changed)), replace=False))
            for spec in self.specs
        }
        self._publisher = wc.Publisher(channel, self.weights)

    def step(self) -> None:
        for name, places in self.places.items():
            self.weights.read(name)[places] ^= 1
        self._publisher.publish().result()

    def patches(self) -> list[CheckpointWeightPatch]:
        """The last step as vLLM takes it."""
        return [
            CheckpointWeightPatch(
                spec.name,
                spec.shape,
                torch.bfloat16,
                torch.from_numpy(self.weights.read(spec.name)[self.places[spec.name]].view(np.int16)).view(
                    torch.bfloat16
                ),
                torch.from_numpy(self.places[spec.name]),
            )
            for spec in self.specs
        ]

    def close(self) -> None:
        self._publisher.close()


class Measured(InProcess):
    """Measures what runs between pause and resume."""

    def __init__(self, llm: Any):
        super().__init__(llm)
        self.last: Arm = (0.0, 0)

    def update(self, update: UpdateEngine) -> Outcome:
        outcomes: list[Outcome] = []
        self.last = measured(lambda: outcomes.append(InProcess.update(self, update)))
        return outcomes[0]


def in_worker(llm: LLM, work: Callable[[torch.nn.Module], object]) -> None:
    llm.collective_rpc(lambda worker: work(worker.model_runner.get_model()) and None)


def reloaded(worker: Any, folder: str) -> None:
    """vLLM's own reload; not by the worker's method, which would forget where it stands. The bits are those there."""
    with set_current_vllm_config(worker.vllm_config):
        worker.model_runner.reload_weights(weights_path=folder)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--changed", type=float, default=0.01)
    arguments.add_argument("--repeats", type=int, default=7)
    options = arguments.parse_args()
    wc.warm_up()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make_model(folder / "model")
        llm = LLM(
            str(model), dtype="bfloat16", max_model_len=128, enforce_eager=True, skip_tokenizer_init=True,
            weight_transfer_config={"backend": "weightcast"},
        )  # fmt: skip
        trained = Trained(model, str(folder / "channel"), options.changed)
        engine = Measured(llm)
        arms: dict[str, list[Arm]] = {"weightcast": [], "vllm_sparse": [], "vllm_reload": []}
        phases: dict[str, list[float]] = {}
        with Agent(str(folder / "channel"), engine, folder / "mirror") as agent:
            agent.step()
            for _ in range(options.repeats + 1):
                trained.step()
                update = agent.step()
                assert update is not None
                staged = update.nbytes
                arms["weightcast"].append(engine.last)
                for phase, seconds in update.seconds.items():
                    phases.setdefault(phase, []).append(seconds)
                patches = trained.patches()
                arms["vllm_sparse"].append(
                    measured(lambda: in_worker(llm, lambda m: load_checkpoint_weight_patches(m, patches)))  # noqa: B023
                )
                agent.subscriber.fold()
                arms["vllm_reload"].append(
                    measured(lambda: llm.collective_rpc(reloaded, args=(str(folder / "mirror"),)))
                )
        trained.close()
    found = {
        name: {"seconds": median(seconds for seconds, _ in runs[1:]), "extra_bytes": median(b for _, b in runs[1:])}
        for name, runs in arms.items()
    }
    ours = found["weightcast"]["seconds"]
    largest = max(spec.nbytes for spec in trained.specs)
    result = {
        "changed": options.changed,
        "parameters": sum(spec.elements for spec in trained.specs),
        "largest_tensor_bytes": largest,
        "staged_bytes": staged,
        "arms": found,
        "phases": {phase: median(times[1:]) for phase, times in phases.items()},
        "to_vllm_sparse": ours / found["vllm_sparse"]["seconds"],
        "to_vllm_reload": ours / found["vllm_reload"]["seconds"],
    }
    print(json.dumps(result))
    print("| inside the pause | ms | extra memory, MB |\n|---|---|---|", file=sys.stderr)
    for name, values in found.items():
        print(f"| {name} | {1000 * values['seconds']:.1f} | {values['extra_bytes'] / 1e6:.1f} |", file=sys.stderr)
    print("\n| phase | ms |\n|---|---|", file=sys.stderr)
    for phase, seconds in result["phases"].items():
        print(f"| {phase} | {1000 * seconds:.1f} |", file=sys.stderr)


if __name__ == "__main__":
    main()
