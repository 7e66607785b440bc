"""What detection costs on a GPU: kernel by kernel, in a real training step, and in memory.

    python benchmarks/trainer_gpu.py [--steps 20]

A model of 596 M parameters in 311 tensors, as Qwen3-0.6B has them, about 1.2 % of its bf16 bits changed. Beside each
time stands its floor: bytes that must be read or written, over the bandwidth that a copy reaches in the same run. The
training step is that of a Qwen3-0.6B of transformers with random weights, bf16, fused AdamW at 1e-6; every step is
published to a folder. Times are of CUDA events on the training stream, medians.

The table goes to stderr, one JSON object to stdout; the exit code is 1 if something is above its bar.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch
from catchup import table
from speed import qwen3_shapes
from trainer_cpu import Parameters

import weightcast as wc
from weightcast.format.spec import TensorSpec
from weightcast.torch.batch import Batch, Slot, batches_of
from weightcast.torch.kernels.gpu import GpuKernels

DENSITY = 0.012
Row = dict[str, object]


def timed(action: Callable[[], object]) -> float:
    """Milliseconds on the current stream, from an idle device on."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    action()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def milliseconds(action: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(3):
        action()
    return median(timed(action) for _ in range(repeats))


def row(what: str, found: float, bar: float | None, floor: float | None = None, unit: str = "ms") -> Row:
    return {"what": what, "found": found, "unit": unit, "floor": floor, "bar": bar}


# -- kernels -----------------------------------------------------------------------------------------------------------


def model_of(dtype: torch.dtype) -> tuple[Batch, torch.Tensor]:
    """Random weights in the shapes of a Qwen3-0.6B, and their number."""
    torch.manual_seed(0)
    tensors = {name: (torch.randn(shape, device="cuda") * 0.02).to(dtype) for name, shape in qwen3_shapes(1.0).items()}
    slots = [
        Slot(TensorSpec(name, "BF16", tuple(tensor.shape)), tensor, 0, dtype == torch.float32)
        for name, tensor in tensors.items()
    ]
    (batch,) = batches_of(slots)
    return batch, torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def change(batch: Batch) -> None:
    """Move a few of the elements by a bf16 step, some by three."""
    for slot in batch.slots:
        words = slot.words()
        chosen = torch.rand(words.shape, device="cuda") < DENSITY
        step = torch.where(torch.rand(words.shape, device="cuda") < 0.85, 1, 3).to(words.dtype)
        words += torch.where(chosen, step << (16 if batch.narrow else 0), torch.zeros_like(step))


def kernel_rows(dtype: torch.dtype) -> tuple[list[Row], dict[str, float]]:
    batch, flat = model_of(dtype)
    kernels, elements, size = GpuKernels(), sum(batch.sizes), flat.element_size()
    there = torch.empty_like(flat)
    copy = milliseconds(lambda: there.copy_(flat))
    bandwidth = 2 * flat.numel() * size / copy  # bytes per millisecond
    plain = milliseconds(lambda: (flat != there).nonzero(), 5)
    pinned = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
    out = milliseconds(lambda: pinned.copy_(flat), 5)
    old = kernels.take(batch)
    change(batch)
    flips = kernels.differ(batch, old)
    changed = kernels.count(flips)
    now = torch.empty_like(flips.was)
    name, both = ("bf16", 2 + 2) if size == 2 else ("fp32 masters", 4 + 2)
    floor = elements * both / bandwidth
    facts = {"changed": changed / elements, "copy": copy, "ne_nonzero": plain, "to_pinned": out}
    rows = [
        row(f"detect and extract, {name}", milliseconds(lambda: kernels.differ(batch, old)),
            2.0 if size == 2 else 2 * floor + 1, floor),
        row(f"copy before a step, {name}", milliseconds(lambda: kernels.take(batch)), None, floor),
    ]  # fmt: skip
    if size == 2:
        indices = torch.randint(0, elements, (changed,), device="cuda").unique()
        values = flat[indices]
        facts["index_copy"] = milliseconds(lambda: there.index_copy_(0, indices, values))
        rows += [
            row(
                "band ranks", milliseconds(lambda: kernels._rank(batch, old, flips, now)), 10, elements * 2 / bandwidth
            ),
            row("scatter of a staged patch", milliseconds(lambda: kernels.put(old, flips)), 0.5),
            row(
                "digest of the live weights", milliseconds(lambda: kernels.digests(batch)), 5, elements * 2 / bandwidth
            ),
        ]
    return rows, facts


# -- a training step ---------------------------------------------------------------------------------------------------


class Stopwatch:
    """Events on the training stream around hooks and `publish`."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        optimizer.register_step_pre_hook(lambda *_: self.start())
        optimizer.register_step_post_hook(lambda *_: self.start())

    def close_in(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(lambda *_: self.stop())
        optimizer.register_step_post_hook(lambda *_: self.stop())

    def start(self) -> None:
        self._pairs.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        self._pairs[-1][0].record()

    def stop(self) -> None:
        self._pairs[-1][1].record()

    def read(self) -> float:
        torch.cuda.synchronize()
        spent = float(sum(begin.elapsed_time(end) for begin, end in self._pairs))
        self._pairs.clear()
        return spent


def step_rows(steps: int) -> tuple[list[Row], dict[str, object]]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    model: torch.nn.Module = Qwen3ForCausalLM(config)
    model.to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    tokens = torch.randint(0, 151936, (16, 1024), device="cuda")

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    before = median(timed(step) for _ in range(steps))
    watch, within, whole, waits, commits = Stopwatch(optimizer), [], [], [], []
    receipt: wc.Receipt | None = None
    with (
        tempfile.TemporaryDirectory() as folder,
        wc.Publisher(f"{folder}/channel", model, optimizer=optimizer) as publisher,
    ):
        watch.close_in(optimizer)

        def published() -> None:
            nonlocal receipt
            step()
            watch.start()
            began = time.perf_counter()
            receipt = publisher.publish()
            waits.append(1000 * (time.perf_counter() - began))
            watch.stop()

        for i in range(steps + 5):
            spent = timed(published)
            began = time.perf_counter()
            inside = watch.read()
            publisher.flush()
            if i >= 5:
                whole.append(spent)
                within.append(inside)
                commits.append(1000 * (time.perf_counter() - began))
    after = median(timed(step) for _ in range(steps))  # clocks and neighbours drift
    assert receipt is not None
    commit = receipt.result()
    facts: dict[str, object] = {
        "step_alone": [before, after],
        "step_published": median(whole),
        "publish_returns_after": median(waits[5:]),
        "committed_after": median(commits),
        "changed": commit.changed / sum(parameter.numel() for parameter in model.parameters()),
        "patch_bytes": float(commit.nbytes),
    }
    rows = [
        row("added to a training step: hooks and publish()", median(within), 15),
        row("the same, as the difference of whole steps", median(whole) - (before + after) / 2, None),
    ]
    return rows, facts


# -- memory ------------------------------------------------------------------------------------------------------------


def peak(activations: int, kind: str, published: bool) -> tuple[int, int]:
    """Most bytes allocated and reserved over a few steps, with so many bytes of activations per parameter."""
    torch.cuda.empty_cache()
    shapes = qwen3_shapes(1.0)
    model = Parameters({n: (torch.randn(s, device="cuda") * 0.02).to(torch.bfloat16) for n, s in shapes.items()})
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=kind == "fused", foreach=kind == "foreach")
    elements = sum(parameter.numel() for parameter in model.parameters())

    def steps(after: Callable[[], object]) -> tuple[int, int]:
        for _ in range(4):
            room = torch.empty(activations * elements, dtype=torch.uint8, device="cuda")
            del room
            optimizer.step()
            after()
            torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    steps(lambda: None)
    torch.cuda.reset_peak_memory_stats()
    if not published:
        return steps(lambda: None)
    with (
        tempfile.TemporaryDirectory() as folder,
        wc.Publisher(f"{folder}/channel", model, optimizer=optimizer) as publisher,
    ):
        torch.cuda.reset_peak_memory_stats()
        return steps(lambda: publisher.publish().result())


def memory_rows() -> list[Row]:
    rows = []
    elements = sum(spec.numel() for spec in (torch.empty(s, device="meta") for s in qwen3_shapes(1.0).values()))
    for kind, activations, bar in (("fused", 8, 0.0), ("foreach", 8, None), ("fused", 2, None), ("foreach", 2, None)):
        without, with_it = (peak(activations, kind, published)[0] for published in (False, True))
        what = f"extra peak of a step, {kind} AdamW, {activations} B of activations per parameter"
        rows.append(row(what, (with_it - without) / elements, bar, unit="B per parameter"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    wc.warm_up()
    rows, facts = kernel_rows(torch.bfloat16)
    more, facts_fp32 = kernel_rows(torch.float32)
    rows += more
    torch.cuda.empty_cache()
    more, facts_step = step_rows(args.steps)
    rows += more + memory_rows()
    shown = [
        {
            "what": one["what"],
            "found": f"{one['found']:.2f} {one['unit']}",
            "floor": "" if one["floor"] is None else f"{one['floor']:.2f}",
            "bar": "" if one["bar"] is None else f"{one['bar']:.2f}",
        }
        for one in rows
    ]
    print(table(shown), file=sys.stderr)
    hardware = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    found = {"hardware": hardware, "rows": rows, "bf16": facts, "fp32": facts_fp32, "step": facts_step}
    print(json.dumps(found))
    sys.exit(any(one["bar"] is not None and float(str(one["found"])) > float(str(one["bar"])) for one in rows))


if __name__ == "__main__":
    main()
