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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import weightcast as wc
from examples.wordle.evaluation import Evaluation
from examples.wordle.events import report
from examples.wordle.grpo import learn
from examples.wordle.players import FirstRollouts, Player, measure, wait_for
from examples.wordle.policy import CHECKPOINT, load
from examples.wordle.rollouts import Games, Rollouts

WORDS, REPEATS = 32, 8
"""Of a step: different words, and games of each."""
STALEST = 4
"""Rollouts that lag the newest version by more than so many versions are not learned from."""
RAMP = 10
"""Steps until the learning rate is reached."""
SAVE_EVERY = 5
"""Steps."""


@dataclass
class Training:
    """All that a trainer must remember to go on after it was killed."""

    model: Any
    optimizer: torch.optim.Optimizer
    file: Path
    step: int = 0
    before: Evaluation | None = None
    """The policy that training began with."""

    @classmethod
    def resume(cls, file: Path, checkpoint: Path, lr: float) -> Training:
        """From the file if there is one, else from the checkpoint."""
        model = load(checkpoint)
        # An eps above the gradients' rms (2e-4): large gradients move weights, small ones flip no bits in bf16.
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.97, 0.99), eps=1e-3, weight_decay=0.0)
        training = cls(model, optimizer, file)
        if file.exists():
            state = torch.load(file, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            training.step = state["step"]
            training.before = Evaluation(**state["before"])
        return training

    def save(self) -> None:
        assert self.before is not None
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "before": self.before.as_json(),
        }
        partial = self.file.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.file)  # killed in between, the state before is still whole


class Ledger:
    """Reports each commit when it is there, without keeping the trainer."""

    def __init__(self, elements: int, head: int):
        self.version = head
        """The newest that is committed."""
        self._elements = elements
        self._receipts: queue.SimpleQueue[tuple[wc.Receipt, float]] = queue.SimpleQueue()
        threading.Thread(target=self._follow, daemon=True).start()

    def add(self, receipt: wc.Receipt, stepped: float) -> None:
        """``stepped`` is when the optimizer's step had ended."""
        self._receipts.put((receipt, stepped))

    def _follow(self) -> None:
        while True:
            receipt, stepped = self._receipts.get()
            commit = receipt.result()
            self.version = commit.position.version
            if receipt.is_new:
                report(
                    "commit",
                    step=receipt.step,
                    version=self.version,
                    changed=commit.changed / self._elements,
                    nbytes=commit.object.size,
                    stepped=stepped,
                )


def fresh(ready: queue.Queue[Rollouts], ledger: Ledger) -> tuple[Rollouts, int]:
    """The next rollouts that are not too old, and by how many versions they lag."""
    while True:
        rollouts = ready.get()
        staleness = ledger.version - rollouts.oldest
        if staleness <= STALEST:
            return rollouts, staleness
        report("dropped", staleness=staleness, games=len(rollouts.won))


def train(training: Training, publisher: wc.Publisher, ledger: Ledger, ready: queue.Queue[Rollouts], to: int) -> None:
    """Learn, publish, repeat."""
    rate = training.optimizer.param_groups[0]["initial_lr"]
    while training.step < to:
        rollouts, staleness = fresh(ready, ledger)
        began = time.monotonic()
        training.optimizer.param_groups[0]["lr"] = rate * min(1, (training.step + 1) / RAMP)
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


def rounded(model: torch.nn.Module) -> wc.Fingerprint:
    """The fingerprint that the published weights must have: the model's own, rounded to bf16 by other means."""
    arrays = {name: wc.round_to("BF16", value.numpy()) for name, value in model.state_dict().items()}
    return wc.fingerprint(wc.Arrays(arrays, dict.fromkeys(arrays, "BF16")))


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
    return parser.parse_args()


def main() -> None:
    given = arguments()
    torch.set_num_threads(given.threads)
    wc.warm_up()
    training = Training.resume(given.state, given.checkpoint, given.lr)
    for group in training.optimizer.param_groups:
        group.setdefault("initial_lr", given.lr)
    channel = given.channel
    with wc.Publisher(channel, training.model, optimizer=training.optimizer, dtype="BF16") as publisher:
        table = publisher.table
        head = publisher.publish(step=training.step).result().position
        report("begin", elements=table.elements, nbytes=table.nbytes, version=head.version, step=training.step)
        ledger = Ledger(table.elements, head.version)
        if training.before is None:
            there = wait_for(given.replicas, head.version, patience=5)
            training.before = measure(given.environment, there, head.version, given.evaluate)
            training.save()
        report("evaluation", when="before", **training.before.as_json())

        seeds = itertools.count(10**6 * (1 + training.step))
        ready: queue.Queue[Rollouts] = queue.Queue(maxsize=1)
        first = FirstRollouts()

        def next_games() -> Games:
            return Games(next(seeds), WORDS, REPEATS)

        players = [Player(given.environment, url, next_games, ready, first) for url in given.replicas]
        for player in players:
            player.start()
        train(training, publisher, ledger, ready, given.steps)
        for player in players:
            player.stop()

        last = publisher.publish(step=training.step).result().position
        there = wait_for(given.replicas, last.version, patience=60)
        after = measure(given.environment, there, last.version, given.evaluate)
        report("evaluation", when="after", **after.as_json())
        report("end", version=last.version, digest=last.digest, exact=last.digest == rounded(training.model).digest)


if __name__ == "__main__":
    main()
