"""TRL: `AsyncGRPOTrainer(…, weight_transfer=WeightcastTransfer(url))` is the whole change.

    TRL's iterator → detect, as it arrives → upload, commit → live in the engines

TRL calls `pause`, `send_weights` and `resume` for each sync. The first and the last do nothing: engines serve while all
of that happens, and are paused by the agent that writes into them, only while it writes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position
from weightcast.engine.agent import Agent
from weightcast.engine.client import Engine, HttpEngine
from weightcast.engine.followers import Followers
from weightcast.errors import EngineError, MisfitError, UsageError, WeightcastError
from weightcast.follow.mirror_folder import default_mirror
from weightcast.follow.update import Phases
from weightcast.format.codec import CodecName
from weightcast.format.scan import Detect, WireDtype
from weightcast.publish.open import channel_in
from weightcast.publish.receipt import Receipt
from weightcast.publish.stream_publisher import StreamPublisher
from weightcast.store import open_store
from weightcast.store.backoff import Backoff
from weightcast.store.base import Store
from weightcast.torch.model import wire_name
from weightcast.torch.structure import structure_of

_log = logging.getLogger("weightcast")

_SOON = 5.0
"""Seconds after which the log says what the first sync waits for, unless ``patience`` is shorter."""

_CHECK_EVERY, _LONGEST = 0.03, 2.0
"""Seconds between two checks whether the engines are live: half the first pause, and the longest."""


@dataclass(frozen=True)
class Sync:
    """The outcome of one `send_weights`."""

    version: int
    """The newest that the bucket has."""
    live: bool
    """Whether these weights are that version, and every engine that follows serves it."""
    changed: int
    """Elements."""
    nbytes: int
    """Bytes uploaded; 0 if the bucket had these weights already, or does not have them yet."""
    broadcast: int
    """Bytes that TRL streamed: what it would have sent to the engine itself."""
    pause: float | None
    """Seconds that the engine was paused; the longest pause if there are several engines. None while not live."""
    seconds: Mapping[str, float]
    """Seconds that the trainer waited, by phase: detect, upload, live."""

    def __str__(self) -> str:
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self.seconds.items())
        paused = "not live yet" if self.pause is None else f"paused {1000 * self.pause:.1f} ms"
        share = f"{self.nbytes:,} of {self.broadcast:,} bytes"
        return f"version {self.version}: {self.changed:,} changed, {share}, {paused}; seconds: {phases}"


@dataclass
class _Counted:
    """TRL's stream; ``nbytes`` of it were read."""

    stream: Iterable[tuple[str, torch.Tensor]]
    nbytes: int = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.stream:
            self.nbytes += tensor.nbytes
            yield name, tensor


@dataclass(frozen=True)
class _Sent:
    """The newest version in the bucket after a sync; ``is_there``: it is what was sent."""

    position: Position
    changed: int = 0
    nbytes: int = 0
    is_there: bool = True


@dataclass(frozen=True)
class _Live:
    """Whether a version is live: ``pause`` is what it cost; if that is None, ``problem`` says what is missing."""

    pause: float | None
    problem: str = ""
    no_engine: bool = False
    """Whether the problem is that no engine follows the channel."""


class WeightcastTransfer:
    """Carries a TRL trainer's weights to engines through a channel; satisfies TRL's `WeightTransferProtocol`.

    >>> transfer = WeightcastTransfer("hf://buckets/me/run-42")
    >>> trainer = AsyncGRPOTrainer(model, weight_transfer=transfer, …)            # doctest: +SKIP

    An agent that follows the channel (`weightcast attach`) brings every version into its engine. If none does and
    ``engine`` is given (the URL of a vLLM on this host, or an `InProcess` one), this object updates that engine itself.

    `send_weights` returns once the new version is live, so that TRL's count of versions is right for the rollouts it
    starts afterwards. It waits at most ``patience`` seconds: if a bucket or an engine is away for longer, the log says
    so, training goes on, and what was published meanwhile arrives together. Only the first sync waits for at least
    ``joining`` seconds, because an engine that joins may have to fetch a whole model; then it raises, because no engine
    was ever there. With ``patience=0`` it does not wait. `patience` may be changed between syncs.
    """

    def __init__(
        self,
        channel: str | Path | Store,
        *,
        model: torch.nn.Module | None = None,
        engine: str | Engine | None = None,
        mirror: Path | str | None = None,
        detect: Detect | None = None,
        dtype: WireDtype | torch.dtype | None = "BF16",
        patience: float = 60.0,
        joining: float = 600.0,
        codec: CodecName = "banded",
        writer: str | None = None,
        threads: int | None = None,
        retry_after: float = 5.0,
    ):
        """``model`` is the model that TRL trains, or one on the meta device of the same structure: mixtures need it.

        TRL streams experts fused, as transformers holds them; with the model they are published apart, as in its
        checkpoint. ``dtype`` is what float32 is rounded to in a new channel; ``mirror`` is a folder for ``engine``.
        The other parameters are those of `StreamPublisher`.
        """
        self._store = open_store(channel)
        self._engine = HttpEngine(engine) if isinstance(engine, str) else engine
        self._mirror = mirror
        self.patience, self._joining = patience, joining
        self._open = partial(
            StreamPublisher,
            self._store,
            model=None if model is None else structure_of(model),  # now: TRL wraps, shards and adapts it later
            detect=detect,
            dtype=wire_name(dtype),
            codec=codec,
            writer=writer,
            threads=threads,
            retry_after=retry_after,
        )
        self._opened, self._driving = ExitStack(), ExitStack()
        self._publisher: StreamPublisher | None = None
        self._is_first = True
        self._followers: Followers | None = None
        self._agent: Agent | None = None
        self._chain: Chain | None = None
        self.last: Sync | None = None

    # -- what TRL calls ----------------------------------------------------------------------------------------------

    def init_weight_transfer(self) -> None:
        """Look up the channel, so that a wrong address fails before anything is computed."""
        self.destroy()  # an earlier training that did not call it
        self._chain = channel_in(self._store)
        self._publisher, self._is_first = self._opened.enter_context(self._open()), True

    def pause(self) -> None:
        """Does nothing: the engine is paused later, when all that it needs is staged."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish the trainer's current weights, and wait until they are live."""
        publisher = self._publisher
        if publisher is None:
            hint = "TRL's trainer calls it when training begins, but only once: to train again, make another trainer."
            raise UsageError("init_weight_transfer was not called", hint=hint)
        clock, stream = Phases(), _Counted(iterator)
        first, began = self._is_first, time.monotonic()
        if first:
            with clock.phase("upload"):
                sent = self._begin(publisher, stream)
            began = time.monotonic()  # patience does not count the upload of a whole model
        else:
            with clock.phase("detect"):
                receipt = publisher.send(stream)
            with clock.phase("upload"):
                sent = self._committed(publisher, receipt, began + self.patience)
        patience = max(self.patience, self._joining) if first and self.patience else self.patience
        with clock.phase("live"):
            pause = self._make_live(sent, began, patience, first)
        seconds = {phase: round(value, 4) for phase, value in clock.seconds.items()}
        live = sent.is_there and pause is not None
        self.last = Sync(
            sent.position.version, live, sent.changed, sent.nbytes, stream.nbytes, pause if live else None, seconds
        )
        _log.info("%s", self.last)

    def resume(self) -> None:
        """Does nothing: the engine was not paused."""

    def destroy(self) -> None:
        """Upload what is not in the bucket yet, and close; raises if that fails."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            self._agent = self._followers = None
            with self._opened, self._driving:
                pass

    # -- publish -----------------------------------------------------------------------------------------------------

    def _begin(self, publisher: StreamPublisher, stream: _Counted) -> _Sent:
        """Continue the channel where it is, or start it."""
        before = self._chain.head() if self._chain is not None else None
        receipt = publisher.send(stream)
        self._is_first = False
        self._chain = Chain.open(self._store)
        publisher.flush()  # raises an error for which the receipt would wait
        head = receipt.result()
        if before is not None and head.position == before.position:
            return _Sent(head.position)
        return _Sent(head.position, head.changed, publisher.table.nbytes if head.base is None else head.nbytes)

    def _committed(self, publisher: StreamPublisher, receipt: Receipt, deadline: float) -> _Sent:
        """Wait for the commit of these weights, until the deadline."""
        try:
            manifest = receipt.result(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
            if not receipt.is_new:  # the head had these weights
                return _Sent(manifest.position)
            return _Sent(manifest.position, manifest.changed, manifest.nbytes)
        except TimeoutError:
            if self.patience:
                hint = "the upload is retried, together with the next version; training goes on"
                _log.warning("%s did not take the weights in %g s; %s", self._store.url, self.patience, hint)
        return _Sent(publisher.position, is_there=False)

    # -- live --------------------------------------------------------------------------------------------------------

    def _make_live(self, sent: _Sent, began: float, patience: float, first: bool) -> float | None:
        """Wait until a version is live; the pause that it took, or None if it took too long."""
        if (self._engine is None and patience == 0) or (patience and not sent.is_there):
            return None
        deadline, backoff, warned = began + patience, Backoff(_CHECK_EVERY, _LONGEST), False
        while True:
            cause = None
            try:
                live = self._check(sent.position)
            except WeightcastError as error:  # training need not end because of an engine or its mirror
                if first and isinstance(error, MisfitError):
                    raise  # waiting does not help
                live, cause = _Live(None, str(error)), error
            if live.pause is not None:
                return live.pause
            if time.monotonic() >= deadline:
                break
            if first and not warned and time.monotonic() >= began + min(self.patience, _SOON):
                warned = True
                _log.warning("waiting for version %s to be live: %s", sent.position.version, live.problem)
            time.sleep(min(backoff.failed(), max(0.0, deadline - time.monotonic())))
        problem = f"version {sent.position.version} is not live after {patience:g} s: {live.problem}"
        if first:
            url = self._engine.url if self._engine else self._store.url
            raise EngineError(problem, url=url, hint=self._remedy(live)) from cause
        _log.warning("%s; training goes on", problem)
        return None

    def _check(self, position: Position) -> _Live:
        """Whether all engines are at a position. Updates ``engine`` itself if no agent follows the channel."""
        assert self._chain is not None
        self._followers = self._followers or Followers(self._chain)
        engines = self._followers.now()
        if not engines and self._engine is not None:
            return self._drive(self._engine, position)
        if self._agent is not None:
            self._step_aside()
        if not engines:
            return _Live(None, "no engine follows the channel", no_engine=True)
        late = [
            f"{beat.replica} is at {beat.position.version}" + (f" ({beat.error})" if beat.error else "")
            for beat in engines
            if beat.position != position  # not numbers: a channel that was reset uses a number again
        ]
        return _Live(None, ", ".join(late)) if late else _Live(max(beat.pause or 0.0 for beat in engines))

    def _drive(self, engine: Engine, position: Position) -> _Live:
        """Do what an agent would do."""
        if self._agent is None:
            assert self._chain is not None
            mirror = self._mirror or default_mirror(self._chain.channel.id)
            self._agent = self._driving.enter_context(Agent(self._store, engine, mirror))
            _log.info("no agent follows %s: this trainer updates %s itself", self._store.url, engine.url)
        self._agent.step()
        at, last = self._agent.position, self._agent.last
        if at != position:  # the same number may be another writer's, or of a channel that was reset
            return _Live(None, f"the engine is at {at}, not at {position}")
        return _Live(last.pause if last is not None else 0.0)

    def _step_aside(self) -> None:
        """An agent follows now: two of them must not update one engine."""
        self._agent = None
        self._driving.close()
        _log.info("an agent follows %s now: this trainer no longer updates the engine itself", self._store.url)

    def _remedy(self, live: _Live) -> str:
        if self._agent is not None:
            return "Is it on this host? If not, run `weightcast attach` next to it instead of passing engine=…."
        if live.no_engine:
            return f"Run `weightcast attach {self._store.url} --engine http://127.0.0.1:8000` next to vLLM."
        return "If it only takes longer, pass a longer patience=…."
