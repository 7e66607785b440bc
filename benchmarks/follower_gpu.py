"""What a version costs a follower whose model is on a GPU: `wc.Subscriber(channel, model)`.

    python benchmarks/follower_gpu.py [--lr 1.1e-6] [--steps 8] [--threads 16] [--size 0.6B|7.6B|tiny]

A bf16 model of Qwen3's shapes is trained with random gradients and published; a second one follows. Prints JSON with
medians in ms: `poll` (fetch, decode on the GPU, verify, stage) and `apply`; of `poll`, the kernels that decode, with
the coded bytes sent there but nothing back; beside them what they replace: a copy of the model to the host, and
decoding there. The floor of the kernels is to read the old bits once, at the speed of a copy on the GPU. At the end
both models have the same digests.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
from step_to_live import SIZES, Trainer, resize

import weightcast as wc
from weightcast.format.codec.blocks import most_changes
from weightcast.format.codec.coded import Blocks
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import BytesSource
from weightcast.torch.batch import batches_of
from weightcast.torch.decoder import DecodingKernels
from weightcast.torch.model import TorchTarget


def timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began)


def kernels_alone(target: TorchTarget, coded: bytes) -> float:
    """Milliseconds to decode a patch on the GPU; nothing comes back."""
    reader = PatchReader(BytesSource(coded))
    streams = {row.spec.name: Blocks(row.blocks, reader.coded(row).streams["blocks"]) for row in reader.rows}
    batches = batches_of([target.slots[row.spec.name] for row in reader.rows])

    def work() -> None:
        for batch in batches:
            kernels = target.kernels(batch.device)
            assert isinstance(kernels, DecodingKernels)
            kernels.decode(batch, [streams[spec.name] for spec in batch.specs], most_changes(reader.rows))

    return min(timed(work) for _ in range(5))


def on_the_host(target: TorchTarget, coded: bytes, workers: wc.Workers) -> tuple[float, float]:
    """Milliseconds for what decoding on the GPU replaces: a copy of the model to the host, and decoding there."""
    bits: dict[str, np.ndarray] = {}
    copied = timed(lambda: bits.update({spec.name: target.read(spec.name) for spec in target.table}))
    arrays = {spec.name: bits[spec.name].reshape(spec.shape) for spec in target.table}
    old = wc.Arrays(arrays, {spec.name: spec.dtype for spec in target.table})
    return copied, min(timed(lambda: wc.decode(coded, old, workers)) for _ in range(3))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    table = resize(options.size)
    torch.manual_seed(0)
    model, follower = Trainer(table, "cuda"), Trainer(table, "cuda")
    follower.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
    polls, applies, kernels, changed = [], [], [], []
    url = folder / "channel"
    with (
        wc.Workers(options.threads) as workers,
        wc.Publisher(url, model, optimizer=optimizer, threads=options.threads) as publisher,
        wc.Subscriber(url, follower, threads=options.threads) as subscriber,
    ):
        subscriber.sync()
        target = TorchTarget(follower, workers)
        for step in range(options.steps):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            commit = publisher.publish(step=step).result()
            coded = (url / commit.objects[0].key).read_bytes()
            kernels.append(kernels_alone(target, coded))
            if step == options.steps - 1:
                copied, decoded = on_the_host(target, coded, workers)
            began = time.perf_counter()
            staged = subscriber.poll()
            polls.append(1000 * (time.perf_counter() - began))
            assert staged is not None
            applies.append(timed(lambda staged=staged: subscriber.apply(staged)))  # type: ignore[misc]
            changed.append(commit.changed)
        exact = TorchTarget(model).digests() == target.digests()
    room = torch.empty(min(table.nbytes, 1 << 33), dtype=torch.uint8, device="cuda")
    half = room.numel() // 2
    rate = 2 * half / min(timed(lambda: room[:half].copy_(room[half : 2 * half])) for _ in range(5))
    counted = slice(2, None)  # the first versions compile
    return {
        "hardware": torch.cuda.get_device_name(),
        "parameters": table.elements,
        "threads": options.threads,
        "changed": median(changed[counted]) / table.elements,
        "milliseconds": {
            "poll": round(median(polls[counted]), 1),
            "of it the kernels that decode": round(median(kernels[counted]), 2),
            "floor of the kernels": round(table.nbytes / rate, 2),
            "apply": round(median(applies[counted]), 1),
            "instead: a copy of the model to the host": round(copied, 1),
            "instead: decoding on the host": round(decoded, 1),
        },
        "same digests": exact,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.6B")
    parser.add_argument("--lr", type=float, default=1.1e-6)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    wc.warm_up()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        print(json.dumps(measure(options, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
