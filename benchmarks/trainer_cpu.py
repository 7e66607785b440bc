"""What publishing adds to a training step on the CPU, as multiples of one memcpy of the model in bf16.

    python benchmarks/trainer_cpu.py [--scale 1.0] [--steps 6]

A model of 596 M parameters in 311 tensors, as Qwen3-0.6B has them, goes back and forth between two states that differ
in about 1.2 % of their bf16 bits: an optimizer whose step is a copy. Timed is what the training thread waits for: the
hooks around the step, and `publish()`. The patch is committed, to a folder, before the next step begins.

The table goes to stderr, one JSON object to stdout; the exit code is 1 if `transient` is above its bar. Timings of a
busy machine mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from catchup import table
from speed import UPDATE, qwen3_shapes

import weightcast as wc
from weightcast.format.scan import Detect

BARS = {"bf16 parameters": 4.0, "fp32 masters": 8.0}


class Parameters(torch.nn.Module):
    """Nothing but parameters, under a checkpoint's names without their dots."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(tensor))


class BackAndForth(torch.optim.Optimizer):
    """An optimizer whose steps lead to one of two states and back again."""

    def __init__(self, model: torch.nn.Module, states: tuple[list[torch.Tensor], list[torch.Tensor]]):
        super().__init__(model.parameters(), {})
        self._states, self._turn = states, 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self._turn ^= 1
        for parameter, value in zip(self.param_groups[0]["params"], self._states[self._turn], strict=True):
            parameter.copy_(value)


class HookClock:
    """Times the hooks that are registered between its making and `close_in`: hooks run in the order they came."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._began = self._spent = 0.0
        optimizer.register_step_pre_hook(lambda *_: self._start())
        optimizer.register_step_post_hook(lambda *_: self._start())

    def close_in(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(lambda *_: self._stop())
        optimizer.register_step_post_hook(lambda *_: self._stop())

    def _start(self) -> None:
        self._began = time.perf_counter()

    def _stop(self) -> None:
        self._spent += time.perf_counter() - self._began

    def read(self) -> float:
        """Seconds since the last reading."""
        spent, self._spent = self._spent, 0.0
        return spent


def states_of(scale: float, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights before and after one optimizer step."""
    rng = np.random.default_rng(1)
    before, after = {}, {}
    for name, shape in qwen3_shapes(scale).items():
        master = rng.standard_normal(shape, np.float32) * np.float32(0.03)
        before[name] = torch.from_numpy(master).to(dtype)
        after[name] = torch.from_numpy(master + rng.standard_normal(shape, np.float32) * np.float32(UPDATE)).to(dtype)
    return before, after


def memcpy_seconds(tensors: list[torch.Tensor]) -> float:
    """One copy of the model in bf16, the best of six, on one thread."""
    source = [tensor.to(torch.bfloat16).view(torch.int16).numpy() for tensor in tensors]
    target = [np.ones_like(array) for array in source]
    times = []
    for _ in range(6):
        began = time.perf_counter()
        for there, here in zip(target, source, strict=True):
            np.copyto(there, here)
        times.append(time.perf_counter() - began)
    return min(times)


def measure(scale: float, dtype: torch.dtype, detect: Detect, steps: int) -> dict[str, object]:
    before, after = states_of(scale, dtype)
    states = list(before.values()), list(after.values())
    copy = memcpy_seconds(states[0])
    model = Parameters({name: tensor.clone() for name, tensor in before.items()})
    optimizer = BackAndForth(model, states)
    hooks, publishes, commits, changed = [], [], [], 0
    clock = HookClock(optimizer)
    with (
        tempfile.TemporaryDirectory() as folder,
        wc.Publisher(f"{folder}/channel", model, optimizer=optimizer, detect=detect, dtype="BF16") as publisher,
    ):
        clock.close_in(optimizer)
        for step in range(steps):
            optimizer.step()
            stepped = time.perf_counter()
            receipt = publisher.publish(step=step)
            published = time.perf_counter()
            commit = receipt.result()
            hooks.append(clock.read())
            publishes.append(published - stepped)
            commits.append(time.perf_counter() - published)
            changed = commit.changed
    around, published_in = median(hooks[1:]), median(publishes[1:])
    return {
        "changed": changed / sum(tensor.numel() for tensor in states[0]),
        "memcpy_seconds": copy,
        "hooks": around / copy,
        "publish": published_in / copy,
        "added": (around + published_in) / copy,
        "until_committed": median(commits[1:]) / copy,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    wc.warm_up()
    facts: dict[str, dict[str, dict[str, object]]] = {}
    for name, dtype in (("bf16 parameters", torch.bfloat16), ("fp32 masters", torch.float32)):
        detectors: tuple[Detect, Detect] = "transient", "device"
        facts[name] = {detect: measure(args.scale, dtype, detect, args.steps) for detect in detectors}
    rows = [
        {
            "training": name,
            "detector": detect,
            "changed": f"{found['changed']:.2%}",
            "hooks": f"{found['hooks']:.2f}",
            "publish()": f"{found['publish']:.2f}",
            "added to a step": f"{found['added']:.2f}",
            "bar": f"{BARS[name]:.0f}" if detect == "transient" else "",
            "until committed": f"{found['until_committed']:.2f}",
        }
        for name, by_detector in facts.items()
        for detect, found in by_detector.items()
    ]
    print(table(rows), file=sys.stderr)
    print(json.dumps({"hardware": f"{platform.machine()}, {torch.get_num_threads()} threads"} | facts))
    sys.exit(any(float(str(facts[name]["transient"]["added"])) > bar for name, bar in BARS.items()))


if __name__ == "__main__":
    main()
