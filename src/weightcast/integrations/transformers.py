"""Publish from `transformers.Trainer`, and from every trainer of TRL: one callback."""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from weightcast.channel.records import Manifest
from weightcast.channel.trust import Trust
from weightcast.errors import UsageError, WeightcastError
from weightcast.events.emitter import OnEvent
from weightcast.format.scan import Detect, WireDtype
from weightcast.publish.codec_choice import CodecChoice
from weightcast.publish.committer import CutFor
from weightcast.publish.publisher import Publisher
from weightcast.publish.receipt import Receipt
from weightcast.store.base import Store
from weightcast.torch import Merged
from weightcast.torch.sharded import is_sharded

_log = logging.getLogger("weightcast")


class WeightcastCallback(TrainerCallback):
    """Keeps a channel on the weights that a trainer trains.

    >>> from transformers import Trainer
    >>> callback = WeightcastCallback("s3://bucket/run-42", every=1, dtype="BF16")
    >>> trainer = Trainer(model, args, train_dataset=dataset, callbacks=[callback])     # doctest: +SKIP
    >>> trainer.train()                                                                 # doctest: +SKIP

    When training begins, the publisher continues the channel at its head, or begins it with the whole model: with
    many processes the others wait for that upload, so begin a large one with `weightcast init`. Every so many
    optimizer steps the weights are published, and once more at the end if the model is not what was published last.
    Each call of `train` has a `Publisher` of its own. The process of rank 0 publishes, the others do nothing; but where
    the model is sharded, each process publishes what it has.

    Training waits until it is known what changed, never for the bucket. Failed uploads are retried in the background;
    if something is still not in the bucket at the end, `train` raises. By then the model is trained and the trainer's
    last checkpoint is written, and the next publisher sends what is missing. An error that a retry cannot cure, such as
    another writer on the channel, raises at the next publish or log. If training itself raises, uploads go on as long
    as Python runs; the next `train` closes that publisher and continues where it ended.

    The trainer's logs of the loss also get `weightcast/version`, `weightcast/changed` (the fraction of the elements)
    and `weightcast/bytes` of the newest version that is in the bucket by then: `state.log_history` has them, and
    callbacks after this one see them. transformers puts those of ``report_to`` before it, so they do not; pass
    ``report_to="none"`` and ``callbacks=[WeightcastCallback(…), WandbCallback()]`` instead.
    """

    def __init__(
        self,
        channel: str | Path | Store,
        *,
        every: int = 1,
        dtype: WireDtype | torch.dtype | None = None,
        detect: Detect | None = None,
        check_every: int | None = None,
        codec: CodecChoice = "banded",
        writer: str | None = None,
        cut: CutFor = (),
        merged: bool = False,
        on_event: OnEvent = (),
        sign: str | Path | None = None,
        trust: Trust | str | None = None,
    ):
        """Publish to ``channel`` whenever the number of optimizer steps is a multiple of ``every``.

        Of a model of PEFT the adapter is published; with ``merged`` the whole model with the adapter merged. The
        other arguments are those of `Publisher`.
        """
        if every < 1:
            raise UsageError(f"nothing can be published every {every} steps", hint="Pass every=1 or more.")
        self._every, self._merged = every, merged
        self._open = partial(
            Publisher,
            channel,
            dtype=dtype,
            detect=detect,
            check_every=check_every,
            codec=codec,
            writer=writer,
            cut=cut,
            on_event=on_event,
            sign=sign,
            trust=trust,
        )
        self._publisher: Publisher | None = None
        self._receipt: Receipt | None = None
        self._underway: deque[Receipt] = deque()
        self._newest: Manifest | None = None
        self._published_step: int | None = None

    @property
    def publisher(self) -> Publisher | None:
        """The publisher of the current or the last training; None before the first, and in other processes."""
        return self._publisher

    @property
    def receipt(self) -> Receipt | None:
        """The receipt of the last publish in the current or the last training."""
        return self._receipt

    # -- what the trainer calls ----------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open a publisher. A checkpoint to resume from is loaded by now, and accelerate has wrapped the optimizer."""
        self._abandon()
        if not state.is_world_process_zero and not is_sharded(kwargs["model"]):
            return
        model = Merged(kwargs["model"]) if self._merged else kwargs["model"]
        self._publisher = self._open(model, optimizer=kwargs["optimizer"])
        self._published_step = state.global_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._publisher is not None and state.global_step % self._every == 0:
            self._publish(self._publisher, state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        # An evaluation logs the very dict that is its result, and the objective of a search is the sum of all in it.
        if logs is None or "loss" not in logs:
            return
        found = self._metrics()
        logs.update(found)
        if state.log_history:  # has a copy of the logs, made just before
            state.log_history[-1].update(found)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Publish what the model ends with, and wait until it is in the bucket; raises what prevents that."""
        if self._publisher is None:
            return
        try:
            if args.load_best_model_at_end and state.best_model_checkpoint is not None:
                self._publish(self._publisher, state.best_global_step)  # the trainer has just loaded that one
            elif state.global_step != self._published_step:
                self._publish(self._publisher, state.global_step)
        finally:
            self._publisher.close()

    # -- publish -------------------------------------------------------------------------------------------------------

    def _publish(self, publisher: Publisher, step: int | None) -> None:
        self._receipt = publisher.publish(step=step)
        self._drain()
        self._underway.append(self._receipt)
        self._published_step = step

    def _metrics(self) -> dict[str, float]:
        """Of the newest commit that is known without waiting; raises what ended the publisher."""
        self._drain()
        if self._newest is None or self._publisher is None:
            return {}
        return {
            "weightcast/version": self._newest.position.version,
            "weightcast/changed": self._newest.changed / self._publisher.table.elements,
            "weightcast/bytes": self._newest.nbytes,
        }

    def _drain(self) -> None:
        while self._underway and self._underway[0].done():
            self._newest = self._underway.popleft().result()

    def _abandon(self) -> None:
        """Close what a training that raised has left open: the trainer makes no call then."""
        publisher, self._publisher = self._publisher, None
        self._receipt = self._newest = None
        self._underway.clear()
        if publisher is None:
            return
        try:
            publisher.close()
        except WeightcastError as error:
            _log.warning("the last training could not send everything it published; this one sends the rest: %s", error)
