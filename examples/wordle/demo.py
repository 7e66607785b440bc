"""All four boxes on this machine, with a folder as the bucket: a policy learns Wordle while its replicas follow.

    python -m examples.wordle.demo            # about five minutes on two cores
    python -m examples.wordle.demo --chaos    # the same, and each box is killed once on the way

While it runs, a page at an address that the view names shows the channel; --report keeps it as a file. Bucket and logs
are gone afterwards, unless --folder says where to keep them.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live

import weightcast as wc
from examples.wordle.boxes import PATIENCE, Box, Boxes, Message, free_port
from examples.wordle.record import Record
from examples.wordle.summary import Proof, failures, summary
from examples.wordle.view import View

LATE = 0.15
"""After this share of all steps the second replica joins."""
KILLS = (("replica-a", 0.3), ("environment", 0.45), ("replica-b", 0.6), ("trainer", 0.75))
"""With --chaos: which box is killed after which share of all steps."""
DOWN = 2.0
"""Seconds that a killed box stays away."""


@dataclass
class Restart:
    box: Box
    at: float


class Demo:
    """Starts the boxes, kills and restarts some, and records what all of them report."""

    must_learn = True

    def __init__(self, boxes: Boxes, given: argparse.Namespace, folder: Path):
        self.record = Record()
        self._boxes, self._steps, self._report = boxes, given.steps, given.report
        self._kills = list(KILLS) if given.chaos else []
        self._restarts: list[Restart] = []
        self._killed: set[tuple[str, int]] = set()
        environment, *self._replicas = (f"http://127.0.0.1:{free_port()}" for _ in range(3))
        channel, events = str(folder / "bucket"), str(folder / "events.jsonl")
        self._watched = [channel, "--events", events]
        boxes.add("dashboard", weightcast("dashboard", *self._watched, "--json"))
        boxes.add("environment", module("environment", "--port", port(environment)))
        for name, url in zip(("replica-a", "replica-b"), self._replicas, strict=True):
            boxes.add(
                name, module("replica", "--channel", channel, "--name", name, "--port", port(url), "--events", events)
            )
        trainer = module("trainer", "--channel", channel, "--environment", environment, "--replicas", *self._replicas)
        options = ("--steps", given.steps, "--lr", given.lr, "--evaluate", given.evaluate, "--events", events)
        boxes.add("trainer", [*trainer, *map(str, options), "--state", str(folder / "trainer.pt")])

    def run(self) -> dict[str, Proof]:
        """Until the trainer is done; then what each replica holds."""
        for name in ("environment", "replica-a", "trainer"):
            self._boxes[name].start()
        while self.record.digest is None:
            if message := self._boxes.receive():
                self._take(message)
            self._start_late_boxes()
        if self._kills:
            raise SystemExit(f"too few steps to kill {', '.join(name for name, _ in self._kills)}")
        named = zip(("replica-a", "replica-b"), self._replicas, strict=True)
        proofs = {name: self._proof(url) for name, url in named}
        self.record.page = None if self._report is None else str(self._report)  # the server ends with the run
        if self._report is not None:
            self._report.parent.mkdir(parents=True, exist_ok=True)
            command = weightcast("report", *self._watched, "-o", str(self._report), "--force")
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return proofs

    def _take(self, message: Message) -> None:
        self.record.take(message)
        fields = message.fields
        if message.box == "trainer" and fields["event"] == "begin" and not self._boxes["dashboard"].starts:
            self._boxes["dashboard"].start()  # there is a channel now
        was_killed = (message.box, fields.get("start")) in self._killed
        if fields["event"] == "gone" and not was_killed and self.record.digest is None:
            raise SystemExit(self._boxes[message.box].exit_message(fields["code"]))
        if fields["event"] == "step" and self._kills and self.record.steps >= self._kills[0][1] * self._steps:
            self._kill(self._kills.pop(0)[0])

    def _kill(self, name: str) -> None:
        box = self._boxes[name]
        self._killed.add((name, box.starts))
        box.kill()
        self.record.news.append(f"{name} was killed (SIGKILL)")
        self._restarts.append(Restart(box, time.monotonic() + DOWN))

    def _start_late_boxes(self) -> None:
        late = self._boxes["replica-b"]
        if not late.starts and self.record.steps >= LATE * self._steps:
            late.start()
        for restart in [one for one in self._restarts if one.at <= time.monotonic()]:
            self._restarts.remove(restart)
            restart.box.start()

    def _proof(self, url: str) -> Proof:
        """What the replica says it holds, once it is at the last version; it may still be on its way there."""
        end = time.monotonic() + PATIENCE
        while True:
            self._start_late_boxes()
            with suppress(OSError):
                found = ask(f"{url}/proof")
                if found["version"] == self.record.head or time.monotonic() > end:
                    return Proof(found["version"], found["digest"])
            if time.monotonic() > end:
                raise SystemExit(f"{url} does not answer")
            time.sleep(0.2)


def module(name: str, *options: str) -> list[str]:
    return [sys.executable, "-m", f"examples.wordle.{name}", *options]


def weightcast(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "weightcast", *arguments]


def port(url: str) -> str:
    return url.rpartition(":")[2]


def ask(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)


def stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class Run(Protocol):
    """Boxes that are run, and what they reported."""

    record: Record
    must_learn: bool
    """Whether the policy must get measurably better."""

    def run(self) -> dict[str, Proof]: ...


def show(title: str, make: Callable[[Boxes, Path], Run], folder: Path, console: Console) -> list[str]:
    """Run it, drawing the view and then the summary; why it did not end well, if it did not."""
    with Boxes(folder) as boxes:
        demo = make(boxes, folder)
        view = View(title, demo.record)
        with Live(view, console=console, refresh_per_second=4, transient=True):
            proofs = demo.run()
        console.print(view)
        console.print(summary(demo.record, proofs))
        return failures(demo.record, proofs, demo.must_learn)


def present(title: str, make: Callable[[Boxes, Path], Run], folder: Path | None, svg: Path | None) -> None:
    """`show` in a folder that is kept, or in one that is not; exits with what went wrong."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    wc.warm_up()
    console = Console(record=svg is not None)
    try:
        if folder is None:
            with tempfile.TemporaryDirectory(prefix="weightcast-demo-") as made:
                wrong = show(title, make, Path(made), console)
        else:
            folder.mkdir(parents=True)
            wrong = show(title, make, folder.resolve(), console)
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None
    if svg is not None:
        console.save_svg(str(svg), title=title)
    if wrong:
        raise SystemExit("\n".join(wrong))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--evaluate", type=int, default=8, metavar="N", help="games of every word, before and after")
    parser.add_argument("--chaos", action="store_true", help="kill each box once on the way")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the channel's page there at the end")
    add_output_options(parser)
    return parser.parse_args()


def add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, help="keep bucket and logs there")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="save what the terminal shows at the end")


def main() -> None:
    given = arguments()
    title = "Wordle by asynchronous RL over one bucket"
    present(title, lambda boxes, folder: Demo(boxes, given, folder), given.folder, given.svg)


if __name__ == "__main__":
    main()
