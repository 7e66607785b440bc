"""Box 2, the trainer: asynchronous GRPO in fp32, published to a channel in bf16 after every step.

    python -m examples.wordle.trainer --channel hf://buckets/me/wordle \\
        --environment http://env:8000 --replicas http://tokyo:8001 http://paris:8001

It never speaks to a replica about weights: replicas follow the channel by themselves, and every rollout says which
version it was made with. Killed and started again, it goes on from its last saved state, and so does the channel.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import weightcast as wc
from examples.wordle.evaluation import Evaluation
from examples.wordle.events import report
from examples.wordle.grpo import learn
from examples.wordle.players import FirstRollouts, Player, measure, wait_for
from examples.wordle.policy import CHECKPOINT, load, published
from examples.wordle.rollouts import Games, Rollouts

WORDS, REPEATS = 32, 8
"""Of a step: different words, and games of each."""
STALEST = 4
"""Rollouts that lag the policy by more than so many steps are not learned from."""
RAMP = 10
"""Steps until the learning rate is reached."""
SAVE_EVERY = 5
"""Steps."""


@dataclass
class Training:
    """All that a trainer must remember to go on after it was killed."""

    model: Any
    optimizer: torch.optim.Optimizer
    lr: float
    channel: str
    file: Path
    step: int = 0
    before: Evaluation | None = None
    """The policy that training began with."""

    @classmethod
    def resume(cls, channel: str, file: Path, checkpoint: Path, lr: float) -> Training:
        """From the file if there is one, else from the checkpoint."""
        model = load(checkpoint)
        # An eps above the gradients' rms (2e-4): large gradients move weights, small ones flip no bits in bf16.
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.97, 0.99), eps=1e-3, weight_decay=0.0)
        training = cls(model, optimizer, lr, channel, file)
        if file.exists():
            state = torch.load(file, weights_only=True)
            if state["channel"] != channel:
                raise SystemExit(f"{file} is of a training on {state['channel']}: name another with --state")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            training.step = state["step"]
            training.before = Evaluation(**state["before"])
        return training

    def save(self) -> None:
        assert self.before is not None
        state = {
            "channel": self.channel,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "before": self.before.as_json(),
        }
        partial = self.file.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.file)  # killed in between, the state before is still whole


class Ledger:
    """Reports each commit when it is there, without keeping the trainer, and knows the step of each version."""

    def __init__(self, elements: int, head: wc.Position, step: int):
        self._elements = elements
        self._steps = {head.version: step}
        self._error: BaseException | None = None
        self._receipts: queue.SimpleQueue[tuple[wc.Receipt, float]] = queue.SimpleQueue()
        threading.Thread(target=self._follow, daemon=True).start()

    def add(self, receipt: wc.Receipt, stepped: float) -> None:
        """``stepped`` is when the optimizer's step had ended."""
        self._receipts.put((receipt, stepped))

    def step_of(self, version: int) -> int:
        """Of versions that are not known, older ones or one that is just committed: as if each had been a step."""
        self.check()
        steps = dict(self._steps)
        nearest = min(steps, key=lambda known: abs(known - version))
        return steps[nearest] + version - nearest

    def check(self) -> None:
        """Raises what prevented a commit."""
        if self._error is not None:
            raise self._error

    def _follow(self) -> None:
        try:
            while True:
                self._report(*self._receipts.get())
        except BaseException as error:  # noqa: BLE001 - raised in the trainer's own thread
            self._error = error

    def _report(self, receipt: wc.Receipt, stepped: float) -> None:
        commit = receipt.result()
        assert receipt.step is not None
        self._steps[commit.position.version] = receipt.step
        if receipt.is_new:
            report(
                "commit",
                step=receipt.step,
                version=commit.position.version,
                changed=commit.changed / self._elements,
                nbytes=commit.nbytes,
                stepped=stepped,
            )


def fresh(ready: queue.Queue[Rollouts | BaseException], ledger: Ledger, step: int) -> tuple[Rollouts, int]:
    """The next rollouts that are not too old, and by how many steps they lag."""
    while True:
        try:
            rollouts = ready.get(timeout=1)
        except queue.Empty:
            ledger.check()
            continue
        if isinstance(rollouts, BaseException):
            raise rollouts
        staleness = step - ledger.step_of(rollouts.oldest)
        if staleness <= STALEST:
            return rollouts, staleness
        report("dropped", staleness=staleness, games=len(rollouts.won))


def train(
    training: Training,
    publisher: wc.Publisher,
    ledger: Ledger,
    ready: queue.Queue[Rollouts | BaseException],
    to: int,
) -> None:
    """Learn, publish, repeat."""
    while training.step < to:
        rollouts, staleness = fresh(ready, ledger, training.step)
        began = time.monotonic()
        training.optimizer.param_groups[0]["lr"] = training.lr * min(1, (training.step + 1) / RAMP)
        learned = learn(training.model, training.optimizer, rollouts)
        training.step += 1
        stepped = time.time()
        ledger.add(publisher.publish(step=training.step), stepped)
        report(
            "step",
            step=training.step,
            of=to,
            staleness=staleness,
            reward=float(rollouts.rewards.mean()),
            wins=float(rollouts.won.mean()),
            kl=learned.kl,
            clipped=learned.clipped,
            norm=learned.norm,
            seconds=time.monotonic() - began,
        )
        if training.step % SAVE_EVERY == 0 or training.step == to:
            training.save()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channel", required=True, help="a folder, s3://bucket/prefix, hf://buckets/OWNER/NAME")
    parser.add_argument("--environment", required=True, metavar="URL")
    parser.add_argument("--replicas", required=True, metavar="URL", nargs="+")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="what training begins with")
    parser.add_argument("--state", type=Path, default=Path("wordle-trainer.pt"), help="training resumes from it")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--evaluate", type=int, default=8, metavar="N", help="games of every word, before and after")
    parser.add_argument("--threads", type=int, default=1, help="that compute")
    parser.add_argument("--events", type=Path, metavar="FILE", help="append what phases took")
    return parser.parse_args()


@contextmanager
def playing(given: argparse.Namespace, step: int) -> Iterator[queue.Queue[Rollouts | BaseException]]:
    """Players of all replicas, and the queue that they fill. It is short: what waits in it grows old."""
    ready: queue.Queue[Rollouts | BaseException] = queue.Queue(maxsize=1)
    seeds, first = itertools.count(10**6 * (1 + step)), FirstRollouts()

    def next_games() -> Games:
        return Games(next(seeds), WORDS, REPEATS)

    players = [Player(given.environment, url, next_games, ready, first) for url in given.replicas]
    for player in players:
        player.start()
    try:
        yield ready
    finally:
        for player in players:
            player.stop()


def evaluated(given: argparse.Namespace, version: int, patience: float) -> Evaluation:
    """How good a version is, measured on the replicas that have it."""
    there = wait_for(given.replicas, version, patience)
    return measure(given.environment, there, version, given.evaluate)


def main() -> None:
    given = arguments()
    torch.set_num_threads(given.threads)
    wc.warm_up()
    training = Training.resume(given.channel, given.state, given.checkpoint, given.lr)
    on_event = [wc.JsonLines(given.events)] if given.events else []
    with wc.Publisher(
        given.channel, training.model, optimizer=training.optimizer, dtype="BF16", writer="trainer", on_event=on_event
    ) as publisher:
        table = publisher.table
        head = publisher.publish(step=training.step).result().position
        report("begin", elements=table.elements, nbytes=table.nbytes, version=head.version, step=training.step)
        if training.before is None:
            training.before = evaluated(given, head.version, patience=5)
            training.save()
        report("evaluation", when="before", **training.before.as_json())
        with playing(given, training.step) as ready:
            train(training, publisher, Ledger(table.elements, head, training.step), ready, given.steps)
        last = publisher.publish(step=training.step).result().position
        report("evaluation", when="after", **evaluated(given, last.version, patience=60).as_json())
        report("end", version=last.version, digest=last.digest, exact=last.digest == published(training.model).digest)


if __name__ == "__main__":
    main()
