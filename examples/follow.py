"""A trainer and two followers, three processes and a folder in place of a bucket; all end at the same bits.

    python examples/follow.py [--steps 16] [--lr 3e-6] [--warm-up 40]

The trainer learns to add and publishes every step. The first follower keeps a model in memory, as an engine does, from
the first step on. The second is `weightcast pull --follow`: it joins halfway and keeps a checkpoint folder.
"""

from __future__ import annotations

import argparse
import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor, nn

import weightcast as wc
from weightcast.torch import TorchTarget

ALPHABET = "0123456789+= "
LENGTH = 12
POLL_EVERY = 0.02
"""Seconds between two polls of a follower."""
ROLLOUTS = 0.3
"""Seconds that stand for the rollouts of an RL step."""
PATIENCE = 60.0
"""Seconds without a message from any process after which something is wrong."""


# -- the model ---------------------------------------------------------------------------------------------------------


class Adder(nn.Module):
    """A causal transformer over characters, 3.2 M parameters."""

    def __init__(self, width: int = 256, layers: int = 4, heads: int = 4):
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), width)
        self.place = nn.Embedding(LENGTH, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(ALPHABET), bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.blocks(hidden, mask=causal, is_causal=True))
        return logits


def sums(count: int, generator: torch.Generator) -> Tensor:
    """Lines such as `517+94=611  `, as token numbers."""
    pairs = torch.randint(0, 1000, (count, 2), generator=generator).tolist()
    lines = [f"{a}+{b}={a + b}".ljust(LENGTH) for a, b in pairs]
    return torch.tensor([[ALPHABET.index(character) for character in line] for line in lines])


def train(model: Adder, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> float:
    lines = sums(64, generator)
    logits = model(lines[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), lines[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


# -- the trainer's and the first follower's processes ------------------------------------------------------------------


def trainer(bucket: Path, steps: int, lr: float, warm_up: int) -> None:
    """Learn without publishing first, at a large learning rate; then publish every step at an RL-like one."""
    torch.set_num_threads(1)  # more threads would wait for each other: the followers use the other cores
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Adder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    for _ in range(warm_up):
        train(model, optimizer, generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    with wc.Publisher(bucket, model, optimizer=optimizer, dtype="BF16") as publisher:  # fp32 masters, bf16 on the wire
        table = publisher.table
        report(event="begun", elements=table.elements, nbytes=table.nbytes)
        for step in range(1, steps + 1):
            time.sleep(ROLLOUTS)
            loss = train(model, optimizer, generator)
            commit = publisher.publish(step=step).result()
            density, version = commit.changed / table.elements, commit.position.version
            report(event="step", step=step, loss=loss, version=version, density=density, nbytes=commit.object.size)
    rounded = {name: wc.round_to("BF16", value.numpy()) for name, value in model.state_dict().items()}
    proof = wc.fingerprint(wc.Arrays(rounded, dict.fromkeys(rounded, "BF16")))
    report(event="end", digest=proof.digest)


def follower(bucket: Path) -> None:
    """An engine that begins with random weights: keep them at the newest version until stopped."""
    engine = TorchTarget(Adder().to(torch.bfloat16))
    with subscribed(bucket, engine) as subscriber:
        signal.signal(signal.SIGTERM, lambda number, frame: subscriber.stop())
        for update in subscriber.follow(POLL_EVERY):
            report(event="version", version=update.position.version)
    report(event="end", digest=wc.fingerprint(engine).digest)


def subscribed(bucket: Path, engine: TorchTarget) -> wc.Subscriber:
    """A subscriber, once there is a channel."""
    while True:
        try:
            return wc.Subscriber(bucket, engine)
        except wc.errors.ChannelError:
            time.sleep(POLL_EVERY)


def report(**fields: Any) -> None:
    print(json.dumps({"time": time.time(), **fields}), flush=True)


# -- the process that watches them -------------------------------------------------------------------------------------

Message = tuple[str, dict[str, Any]]
"""The name of a process, and what it reports."""


@contextmanager
def started(name: str, command: list[str], messages: queue.Queue[Message]) -> Iterator[subprocess.Popen[str]]:
    """A process whose lines go to ``messages``, and which is ended if it does not end by itself."""

    def listen() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            messages.put((name, json.loads(line)))
        messages.put((name, {"event": "gone"}))

    # A session of its own: Ctrl-C reaches us alone, and we end it.
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        listener.join()


class Board:
    """What was reported so far, as a table: a row per version, and how long after its commit each follower had it."""

    def __init__(self, lr: float):
        self.title = f"AdamW at {lr:g}"
        self.full = 0
        self.steps: list[dict[str, Any]] = []
        self.reached: dict[str, dict[int, float]] = {"first": {}, "second": {}}
        self.digests: dict[str, str] = {}
        self.stopping = False

    def receive(self, name: str, message: dict[str, Any]) -> None:
        if message["event"] == "begun":
            self.full = message["nbytes"]
            self.title = f"{message['elements']:,} parameters, {self.full:,} bytes in bf16, {self.title}"
        elif message["event"] == "step":
            self.steps.append(message)
        elif message["event"] == "version":
            self.reached[name][message["version"]] = message["time"]
        elif message["event"] == "end" and "digest" in message:
            self.digests[name] = message["digest"]
        elif message["event"] == "gone" and name not in self.digests and not self.stopping:
            raise SystemExit(f"the {name} ended too early")

    def caught_up(self) -> bool:
        """The trainer is done, and both followers are where it is."""
        return "trainer" in self.digests and all(self.steps[-1]["version"] in seen for seen in self.reached.values())

    def lag(self, name: str, step: dict[str, Any]) -> str:
        seen = self.reached[name]
        if step["version"] in seen:
            return f"{max(0.0, seen[step['version']] - step['time']):.2f} s"
        return "skipped" if seen and min(seen) < step["version"] < max(seen) else ""

    def __rich__(self) -> Table | str:
        if not self.full:
            return "learning to add; nothing is published yet"
        table = Table(
            box=None, title=self.title, caption="lag: from a version's commit until a follower has applied it"
        )
        for column in ("step", "loss", "version", "changed", "bytes", "to full", "first lags", "second lags"):
            table.add_column(column, justify="right", no_wrap=True)
        for step in self.steps:
            table.add_row(
                str(step["step"]),
                f"{step['loss']:.3f}",
                str(step["version"]),
                f"{step['density']:.2%}",
                f"{step['nbytes'] / 1000:.0f} kB",
                f"1 : {self.full / step['nbytes']:.0f}",
                self.lag("first", step),
                self.lag("second", step),
            )
        return table


def watch(bucket: Path, mirror: Path, args: argparse.Namespace, console: Console) -> dict[str, str]:
    """Run all three until both followers are where the trainer is; the digest of what each holds."""
    messages: queue.Queue[Message] = queue.Queue()
    board = Board(args.lr)
    options = ["--steps", str(args.steps), "--lr", str(args.lr), "--warm-up", str(args.warm_up)]
    this = [sys.executable, __file__, *options, "--bucket", str(bucket), "--role"]
    pull = [sys.executable, "-m", "weightcast", "pull", str(bucket), str(mirror)]
    with ExitStack() as running, Live(board, console=console, refresh_per_second=8):
        running.enter_context(started("trainer", [*this, "trainer"], messages))
        first = running.enter_context(started("first", [*this, "follower"], messages))
        second = None
        while not board.caught_up():
            name, message = messages.get(timeout=PATIENCE)
            board.receive(name, message)
            if message["event"] == "step" and message["step"] == (args.steps + 1) // 2:
                late = [*pull, "--follow", "--every", str(POLL_EVERY), "--json"]
                second = running.enter_context(started("second", late, messages))
        board.stopping = True
        assert second is not None
        for child in (first, second):
            child.terminate()
            child.wait(PATIENCE)
        while "first" not in board.digests:
            board.receive(*messages.get(timeout=PATIENCE))
    with wc.Checkpoint(mirror) as files:
        return board.digests | {"second": wc.fingerprint(files).digest}


def stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-6)
    parser.add_argument("--warm-up", type=int, default=40)
    parser.add_argument("--role", choices=["trainer", "follower"], help=argparse.SUPPRESS)
    parser.add_argument("--bucket", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    wc.warm_up()
    if args.role == "trainer":
        trainer(args.bucket, args.steps, args.lr, args.warm_up)
        return
    if args.role == "follower":
        follower(args.bucket)
        return
    console = Console()
    signal.signal(signal.SIGTERM, stop)
    try:
        with tempfile.TemporaryDirectory(prefix="weightcast-demo-") as folder:
            digests = watch(Path(folder) / "bucket", Path(folder) / "mirror", args, console)
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None
    except queue.Empty:
        raise SystemExit(f"no process reported anything for {PATIENCE:.0f} s") from None
    if len(set(digests.values())) != 1:
        raise SystemExit(f"they hold different bits: {digests}")
    console.print(f"\nThe trainer and both followers hold the same bits: {digests['trainer']}.", soft_wrap=True)


if __name__ == "__main__":
    main()
