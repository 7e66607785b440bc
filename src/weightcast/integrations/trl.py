"""TRL: `AsyncGRPOTrainer(…, weight_transfer=WeightcastTransfer(url))` is the whole change.

    TRL's iterator → detect, as it arrives → upload, commit → live in the engines

TRL calls `pause`, `send_weights` and `resume` for each sync. The first and the last do nothing: engines serve while all
of that happens, and are paused by the agent that writes into them, only while it writes.

Where the model is sharded, TRL gathers each tensor for that iterator; `weightcast.integrations.trl_sharded` avoids it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position
from weightcast.channel.trust import Trust, signing_of
from weightcast.engine.client import Engine, HttpEngine
from weightcast.errors import UsageError
from weightcast.events.emitter import OnEvent
from weightcast.events.phases import Phases
from weightcast.format.scan import Detect, WireDtype
from weightcast.integrations.live import LiveEngines
from weightcast.publish.codec_choice import CodecChoice
from weightcast.publish.committer import CutFor
from weightcast.publish.open import channel_in
from weightcast.publish.publisher import Publisher
from weightcast.publish.receipt import Receipt
from weightcast.publish.stream_publisher import StreamPublisher
from weightcast.store import open_store
from weightcast.store.base import Store
from weightcast.torch.model import wire_name
from weightcast.torch.structure import structure_of

_log = logging.getLogger("weightcast")

Pairs = Iterable[tuple[str, torch.Tensor]]


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
    """Bytes uploaded, by all ranks; 0 if the bucket had these weights already, or does not have them yet."""
    broadcast: int
    """Bytes that TRL streamed, or would have gathered and streamed: what it would have sent to the engine itself."""
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
class _Stream:
    """TRL's stream of whole tensors; ``nbytes`` of it were read."""

    pairs: Pairs
    publisher: StreamPublisher
    nbytes: int = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.pairs:
            self.nbytes += tensor.nbytes
            yield name, tensor

    def publish(self) -> Receipt:
        return self.publisher.send(self)


@dataclass(frozen=True)
class ShardStream:
    """In place of a stream of gathered tensors, on every rank: it has no tensors, and publishes this rank's shards."""

    publish: Callable[[], Receipt]
    nbytes: int
    """Of the tensors that TRL would have gathered."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What TRL does on all ranks but 0, where `send_weights` gets this object."""
        self.publish()
        return iter(())


@dataclass(frozen=True)
class _Sent:
    """The newest version in the bucket after a sync; ``is_there``: it is what was sent."""

    position: Position
    changed: int = 0
    nbytes: int = 0
    is_there: bool = True


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
        codec: CodecChoice = "banded",
        writer: str | None = None,
        threads: int | None = None,
        retry_after: float = 5.0,
        cut: CutFor = (),
        on_event: OnEvent = (),
        sign: str | Path | None = None,
        trust: Trust | str | None = None,
    ):
        """``model`` is the model that TRL trains, or one on the meta device of the same structure: mixtures need it.

        TRL streams experts fused, as transformers holds them; with the model they are published apart, as in its
        checkpoint. ``dtype`` is what float32 is rounded to in a new channel; ``mirror`` is a folder for ``engine``.
        The other parameters are those of `StreamPublisher`.
        """
        self._store = open_store(channel)
        named = HttpEngine(engine) if isinstance(engine, str) else engine
        self._engines = LiveEngines(named, mirror, on_event, trust)
        self._signing = signing_of(trust, sign)
        self.patience, self._joining = patience, joining
        structure = None if model is None else structure_of(model)  # now: TRL wraps, shards and adapts it later
        options: dict[str, Any] = {"detect": detect, "dtype": wire_name(dtype), "codec": codec, "writer": writer}
        options |= {"threads": threads, "retry_after": retry_after, "cut": cut, "on_event": on_event}
        options |= {"sign": sign, "trust": trust}
        self._open = partial(StreamPublisher, self._store, model=structure, **options)
        self._options = options
        self._opened = ExitStack()
        self._streams: StreamPublisher | None = None
        self._shards: Publisher | None = None
        self._is_first = True
        self._chain: Chain | None = None
        self.last: Sync | None = None

    # -- what TRL calls ----------------------------------------------------------------------------------------------

    def init_weight_transfer(self) -> None:
        """Look up the channel, so that a wrong address fails before anything is computed."""
        self.destroy()  # an earlier training that did not call it
        self._chain = channel_in(self._store, self._signing)
        self._streams, self._is_first = self._opened.enter_context(self._open()), True

    def pause(self) -> None:
        """Does nothing: the engine is paused later, when all that it needs is staged."""

    def send_weights(self, iterator: Pairs) -> None:
        """Publish the trainer's current weights, and wait until they are live."""
        if self._streams is None:
            hint = "TRL's trainer calls it when training begins, but only once: to train again, make another trainer."
            raise UsageError("init_weight_transfer was not called", hint=hint)
        stream = iterator if isinstance(iterator, ShardStream) else _Stream(iterator, self._streams)
        clock = Phases()
        first, began = self._is_first, time.monotonic()
        if first:
            with clock.phase("upload"):
                sent = self._begin(stream)
            began = time.monotonic()  # patience does not count the upload of a whole model
        else:
            with clock.phase("detect"):
                receipt = stream.publish()
            with clock.phase("upload"):
                sent = self._committed(receipt, began + self.patience)
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
        if self._publisher is not None:
            self._streams = self._shards = None
            with self._opened, closing(self._engines):
                pass

    # -- publish -----------------------------------------------------------------------------------------------------

    @property
    def _publisher(self) -> StreamPublisher | Publisher | None:
        return self._shards or self._streams

    def publish_shards(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Receipt:
        """Publish what this rank has of a sharded model. Every rank does so at the same time."""
        if self._shards is None:
            self._shards = self._opened.enter_context(
                Publisher(self._store, model, optimizer=optimizer, **self._options)
            )
        return self._shards.publish(step)

    def _begin(self, stream: _Stream | ShardStream) -> _Sent:
        """Continue the channel where it is, or start it."""
        before = self._chain.head() if self._chain is not None else None
        receipt = stream.publish()
        self._is_first = False
        self._engines.follow(Chain.open(self._store, self._signing))
        publisher = self._publisher
        assert publisher is not None
        publisher.flush()  # raises an error for which the receipt would wait
        head = receipt.result()
        if before is not None and head.position == before.position:
            return _Sent(head.position)
        return _Sent(head.position, head.changed, publisher.table.nbytes if head.base is None else head.nbytes)

    def _committed(self, receipt: Receipt, deadline: float) -> _Sent:
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
        assert self._publisher is not None
        return _Sent(self._publisher.position, is_there=False)

    def _make_live(self, sent: _Sent, began: float, patience: float, first: bool) -> float | None:
        """Wait until a version is live; the pause that it took, or None if it took too long."""
        if (not self._engines.has_own and patience == 0) or (patience and not sent.is_there):
            return None
        return self._engines.make_live(sent.position, began, patience, usual=self.patience, first=first)
