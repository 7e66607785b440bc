"""Peak memory of each role, on top of the model itself, in bytes per parameter.

    python benchmarks/memory.py [--scales 0.25 1.0] [--threads 2]

Each role runs in a process of its own with a bf16 model of Qwen3-0.6B's shapes (fewer layers and words below a scale of
1), on a GPU where there is one; channel and mirror are in /dev/shm, whose pages are not counted. About 1 % changes per
version. `open` is the peak while the role begins, `run` while it takes or publishes three versions. Host memory is the
process's resident memory, device memory that of torch's allocator: both over the peak of the same training without a
publisher, or for followers over the model, libraries and kernels. Prints JSON, and a table to stderr.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
from catchup import table
from speed import qwen3_shapes
from trl_sync import change

import weightcast as wc

VERSIONS = 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DETECTS = ("device", "host") if DEVICE == "cuda" else ("device",)
ROLES = [
    *(f"trainer {detect}" for detect in ("transient", *DETECTS)),
    *(f"stream {detect}" for detect in DETECTS),
    "mirror",
    "follower arrays",
    "follower model",
]


class Model(torch.nn.Module):
    def __init__(self, scale: float):
        super().__init__()
        torch.manual_seed(0)
        for i, (name, shape) in enumerate(qwen3_shapes(scale).items()):
            weights = (torch.randn(shape, device=DEVICE) * 0.02).bfloat16()
            self.register_parameter(f"{i:03d} {name}".replace(".", "_"), torch.nn.Parameter(weights))

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.named_parameters()}


class Steps(torch.optim.Optimizer):
    """An optimizer without states: what is measured is the publisher's memory."""

    def __init__(self, model: Model):
        super().__init__(model.parameters(), {})
        self.model = model

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for tensor in self.model.tensors().values():
            for piece in torch.split(tensor.view(-1), 1 << 20):  # little memory of its own
                change({"": piece})


class Peak:
    """The most memory in use since the last `take`, over a base: what was in use at most when it was made."""

    def __init__(self) -> None:
        self._base = (0, 0)
        self._base = self.take()

    def take(self) -> tuple[int, int]:
        """Host and device bytes; begins anew."""
        found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
        assert found
        Path("/proc/self/clear_refs").write_text("5")
        device = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        return max(0, 1024 * int(found[1]) - self._base[0]), max(0, device - self._base[1])


def measure(
    opened: Callable[[], AbstractContextManager[object]], act: Callable[[object], None], elements: int, peak: Peak
) -> dict[str, float]:
    with opened() as role:
        opening = peak.take()
        for _ in range(VERSIONS):
            act(role)
        running = peak.take()
    return {
        "host, open": round(opening[0] / elements, 2),
        "host, run": round(running[0] / elements, 2),
        "device, open": round(opening[1] / elements, 2),
        "device, run": round(running[1] / elements, 2),
    }


def publishing(role: str, scale: float, threads: int, folder: Path) -> dict[str, float]:
    kind, detect = role.split()
    model = Model(scale)
    optimizer, elements = Steps(model), sum(one.numel() for one in model.parameters())
    wc.init(folder, bits_of(model))
    Peak()
    optimizer.step()
    peak = Peak()
    if kind == "trainer":

        def publish(publisher: object) -> None:
            assert isinstance(publisher, wc.Publisher)
            optimizer.step()
            publisher.publish().result()

        watched = optimizer if detect == "transient" else None
        return measure(
            lambda: wc.Publisher(folder, model, optimizer=watched, detect=detect, threads=threads),  # type: ignore[arg-type]
            publish, elements, peak,
        )  # fmt: skip

    def send(publisher: object) -> None:
        assert isinstance(publisher, wc.StreamPublisher)
        optimizer.step()
        publisher.send(model.tensors().items()).result()

    def begun() -> wc.StreamPublisher:
        publisher = wc.StreamPublisher(folder, detect=detect, threads=threads)  # type: ignore[arg-type]
        publisher.send(model.tensors().items()).result()
        return publisher

    return measure(begun, send, elements, peak)


def bits_of(model: Model) -> wc.Arrays:
    bits = {name: one.view(torch.int16).cpu().numpy().view(np.uint16) for name, one in model.tensors().items()}
    return wc.Arrays(bits, dict.fromkeys(bits, "BF16"))


def following(role: str, scale: float, threads: int, folder: Path) -> dict[str, float]:
    """Follow a channel of versions that another process made, each on its own."""
    model = Model(scale)
    elements = sum(one.numel() for one in model.parameters())
    holds: object = {"mirror": folder / "mirror", "follower arrays": bits_of(model), "follower model": model}[role]
    if role == "mirror":
        del model
    Peak()  # what making the model took

    def follow(subscriber: object) -> None:
        assert isinstance(subscriber, wc.Subscriber)
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)

    def opened() -> wc.Subscriber:
        subscriber = wc.Subscriber(folder / "channel", holds, wc.Pinned(0), threads=threads)  # type: ignore[arg-type]
        subscriber.sync()
        subscriber.policy = wc.Every()
        return subscriber

    return measure(opened, follow, elements, Peak())


def make_channel(scale: float, folder: Path) -> None:
    model = Model(scale)
    optimizer = Steps(model)
    with wc.Publisher(folder / "channel", model, optimizer=optimizer) as publisher:
        for _ in range(VERSIONS):
            optimizer.step()
            publisher.publish().result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scales", type=float, nargs="+", default=[0.25, 1.0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    given = parser.parse_args()
    wc.warm_up()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if given.role:
            (scale,) = given.scales
            if given.role.startswith(("trainer", "stream")):
                print(json.dumps(publishing(given.role, scale, given.threads, Path(folder))))
            else:
                code = f"import memory, pathlib; memory.make_channel({scale}, pathlib.Path({folder!r}))"
                subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)
                print(json.dumps(following(given.role, scale, given.threads, Path(folder))))
            return
    rows: list[dict[str, object]] = []
    for scale in given.scales:
        elements = sum(int(np.prod(shape)) for shape in qwen3_shapes(scale).values())
        for role in ROLES:
            command = [
                sys.executable,
                __file__,
                "--role",
                role,
                "--scales",
                str(scale),
                "--threads",
                str(given.threads),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append({"role": role, "parameters": elements, **json.loads(done.stdout)})
            print(rows[-1], file=sys.stderr)
    print(table(rows), file=sys.stderr)
    print(json.dumps({"device": DEVICE, "threads": given.threads, "rows": rows}))


if __name__ == "__main__":
    main()
