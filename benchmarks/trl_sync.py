"""What a sync costs a TRL trainer: `WeightcastTransfer.send_weights`, phase by phase.

    python benchmarks/trl_sync.py [--syncs 6] [--threads 2] [--scale 0.25]

TRL's part is played by an iterator over 596 M parameters in 311 tensors, as Qwen3-0.6B has them, float32 or bf16, of
which about 1.2 % change between two syncs; the channel is a folder in memory, and its follower says yes to everything,
so that what is timed is the trainer's own work: to take the stream and find what changed (detect), to code and commit
it (upload). On a GPU the bits of the last stream are kept there (device) or in pinned memory (host). Phases are
milliseconds, and multiples of one copy of the bf16 weights to the host in the same run. The floor of `detect` is to
read the stream and the old bits once, and on a GPU to write the stream once, at the speed of a copy there; with pinned
memory, to send the old bits to the device, while the new ones come back. A follower must hold the very bits at the end.

A table goes to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import numpy as np
import torch
from catchup import table
from speed import qwen3_shapes

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import put_heartbeat
from weightcast.channel.records import Heartbeat
from weightcast.integrations.trl import WeightcastTransfer

DENSITY = 0.012


def model_of(dtype: torch.dtype, device: str, scale: float) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = qwen3_shapes(scale)
    return {name: (torch.randn(shape, device=device) * 0.02).to(dtype) for name, shape in shapes.items()}


def change(tensors: dict[str, torch.Tensor]) -> None:
    """Move a few of the elements by a bf16 step, some by three."""
    for tensor in tensors.values():
        words = tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
        chosen = torch.rand(words.shape, device=words.device) < DENSITY
        step = torch.where(torch.rand(words.shape, device=words.device) < 0.85, 1, 3).to(words.dtype)
        words += torch.where(chosen, step << (16 if tensor.dtype == torch.float32 else 0), torch.zeros_like(step))


def copied(nbytes: int, source: str, target: str) -> float:
    """Seconds for a copy of that many bytes; memory of the host is pinned if a GPU has the other side."""
    pinned = {source, target} == {"cpu", "cuda"}
    old = torch.zeros(nbytes, dtype=torch.uint8, device=source, pin_memory=pinned and source == "cpu")
    new = torch.zeros(nbytes, dtype=torch.uint8, device=target, pin_memory=pinned and target == "cpu")
    times = []
    for _ in range(6):
        began = time.perf_counter()
        new.copy_(old)
        if "cuda" in (source, target):
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return median(times[1:])


def floor_of(detect: str, elements: int, itemsize: int, device: str) -> float:
    """Seconds that `detect` takes at least: its bytes at the speed of copies, in the same run."""
    if device == "cuda" and detect == "host":
        return copied(2 * elements, "cpu", "cuda")
    written = itemsize if device == "cuda" else 0
    moved = elements * (itemsize + 2 + written)  # a copy reads and writes two bytes each
    return copied(2 * elements, device, device) * moved / (4 * elements)


@contextmanager
def an_engine_that_says_yes(channel: str) -> Iterator[None]:
    """Heartbeats of an engine that holds each version as soon as it is there, so that the trainer waits for none."""
    chain, ended = Chain.open(wc.open_store(channel)), threading.Event()

    def follow() -> None:
        head = chain.head()
        while not ended.wait(0.05) and head is not None:
            put_heartbeat(chain, Heartbeat("benchmark", head.position, time.time(), None, 0.0))
            head = chain.after(head.position.version) or head

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def bits_of(tensors: dict[str, torch.Tensor]) -> wc.Arrays:
    """Tensors rounded to bf16, on this side."""
    bits = {
        name: tensor.to(torch.bfloat16).view(torch.int16).cpu().numpy().view(np.uint16)
        for name, tensor in tensors.items()
    }
    return wc.Arrays(bits, dict.fromkeys(bits, "BF16"))


def must_hold(channel: str, tensors: dict[str, torch.Tensor]) -> None:
    """A follower of the channel holds the bits of these tensors."""
    expected = bits_of(tensors)
    held = wc.Arrays(
        {name: np.zeros(tuple(tensor.shape), np.uint16) for name, tensor in tensors.items()},
        dict.fromkeys(tensors, "BF16"),
    )
    with wc.Subscriber(channel, held) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
    assert wc.fingerprint(held) == wc.fingerprint(expected)


def until_idle(channel: str, tensors: dict[str, torch.Tensor], detect: wc.Detect, count: int, threads: int) -> float:
    """Seconds from the call of `send` until the GPU has done all that it was given, which `send` does not wait for."""
    found = []
    with wc.StreamPublisher(channel, detect=detect, threads=threads) as publisher:
        publisher.send(tensors.items()).result()
        for _ in range(count):
            change(tensors)
            torch.cuda.synchronize()
            began = time.perf_counter()
            receipt = publisher.send(tensors.items())
            torch.cuda.synchronize()
            found.append(time.perf_counter() - began)
            receipt.result()
    return median(found)


def syncs_of(
    dtype: torch.dtype, detect: wc.Detect, count: int, threads: int, device: str, scale: float
) -> dict[str, object]:
    tensors = model_of(dtype, device, scale)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors.items()

    elements, found = sum(tensor.numel() for tensor in tensors.values()), []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        wc.init(folder, bits_of(tensors), workers=wc.Workers(threads))
        transfer = WeightcastTransfer(folder, detect=detect, patience=600.0, threads=threads)
        with an_engine_that_says_yes(folder):
            transfer.init_weight_transfer()
            transfer.send_weights(stream())
            for _ in range(count):
                change(tensors)
                if device == "cuda":
                    torch.cuda.synchronize()  # the time of that is not the sync's
                transfer.send_weights(stream())
                assert transfer.last is not None
                found.append(transfer.last)
            transfer.destroy()
        idle = until_idle(folder, tensors, detect, count, threads) if device == "cuda" else None
        must_hold(folder, tensors)
    seconds = {phase: median(sync.seconds[phase] for sync in found) for phase in ("detect", "upload")}
    copy, floor = copied(2 * elements, device, "cpu"), floor_of(detect, elements, dtype.itemsize, device)
    return {
        "trained in": str(dtype).removeprefix("torch."),
        "old bits": detect,
        "parameters": elements,
        "changed": f"{median(sync.changed for sync in found) / elements:.2%}",
        **{f"{phase}, ms": round(1000 * value, 1) for phase, value in seconds.items()},
        **{f"{phase}, copies": round(value / copy, 2) for phase, value in seconds.items()},
        **({} if idle is None else {"until the GPU is idle, ms": round(1000 * idle, 1)}),
        "floor of detect, ms": round(1000 * floor, 1),
        "a copy, ms": round(1000 * copy, 1),
        "uploaded": int(median(sync.nbytes for sync in found)),
        "TRL's broadcast": found[-1].broadcast,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--syncs", type=int, default=6)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--scale", type=float, default=1.0, help="of the model: fewer layers and words below 1")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    threads = given.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    detects: tuple[wc.Detect, ...] = ("device", "host") if device == "cuda" else ("device",)
    rows = [
        syncs_of(dtype, detect, given.syncs, threads, device, given.scale)
        for dtype in (torch.float32, torch.bfloat16)
        for detect in detects
    ]
    print(table(rows), file=sys.stderr)
    print(json.dumps({"device": device, "threads": threads, "rows": rows}))


if __name__ == "__main__":
    main()
