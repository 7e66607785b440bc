"""The publisher of streams: for frameworks that hand over all weights, tensor by tensor, each time they change."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, cast

import numpy as np

from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position, check_label, check_name, check_step
from weightcast.channel.trust import Trust, signing_of
from weightcast.errors import UsageError
from weightcast.events.emitter import Emitter, OnEvent
from weightcast.format.coding import Coding
from weightcast.format.scan import Detect, WireDtype, check_detect, check_wire_dtype
from weightcast.format.spec import TensorTable
from weightcast.format.tensors import Copies, Weights
from weightcast.format.workers import Workers
from weightcast.publish.codec_choice import CodecChoice, check_choice
from weightcast.publish.committer import Committer, CutFor, named_cuts
from weightcast.publish.open import channel_in, version_beside
from weightcast.publish.receipt import Receipt
from weightcast.store import open_store
from weightcast.store.base import Store

if TYPE_CHECKING:
    import torch

    from weightcast.torch.stream import Streamed
    from weightcast.torch.translation import Translation

_log = logging.getLogger("weightcast")


class StreamPublisher:
    """The one writer of a channel, for weights that come as a stream of (name, tensor).

    Each stream has every tensor that is trained, whole, in any order, under its name in the checkpoint. A tensor is
    read before the next one is asked for: it may be freed or overwritten then. It is compared where it is: on the CPU
    without a copy, on the GPU together with others. A stream that raises, or does not match the channel, changes
    nothing.

    >>> import torch
    >>> model = torch.nn.Linear(2, 2)
    >>> with wc.StreamPublisher("streams", dtype="BF16") as publisher:
    ...     first = publisher.send(model.state_dict().items()).result()         # begins the channel
    ...     model.bias.data += 1                                                # a training step
    ...     receipt = publisher.send(model.state_dict().items(), step=1)
    >>> first.position.version, receipt.result().position.version, receipt.result().changed
    (0, 1, 2)
    """

    def __init__(
        self,
        channel: str | Path | Store,
        *,
        model: torch.nn.Module | None = None,
        detect: Detect | None = None,
        dtype: WireDtype | torch.dtype | None = None,
        codec: CodecChoice = "banded",
        writer: str | None = None,
        threads: int | None = None,
        retry_after: float = 5.0,
        cut: CutFor = (),
        on_event: OnEvent = (),
        sign: str | Path | None = None,
        trust: Trust | str | None = None,
    ):
        """Look up the channel, so that a wrong address fails at once; the first `send` begins it or takes it up.

        ``model`` is for streams of what a transformers model holds where its checkpoint has it in another form, as
        with the fused experts of a mixture: they are published as `save_pretrained` would write them. Only its
        structure is read, at once; it may be on the meta device, or sharded.

        ``detect`` says where the bits of the last stream are kept, to compare the next one with: "device" beside the
        tensors, "host" in pinned memory. By default they are on the GPU as far as they fit into a quarter of its free
        memory, and in pinned memory beyond that. ``dtype`` is what float32 tensors are published as where the channel
        is new. The other parameters are those of `Publisher`.
        """
        if detect is not None and check_detect(detect) == "transient":
            hint = "Choose 'device' or 'host', or pass the model and its optimizer to a Publisher."
            raise UsageError("detect='transient' needs a model", hint=hint)
        if isinstance(dtype, str):
            check_wire_dtype(dtype)
        if writer:
            check_name(writer, "writer")
        signing = signing_of(trust, sign)
        self._store = open_store(channel)
        self._detect, self._dtype = detect, dtype
        self._translation = None if model is None else _translation_of(model)
        self._begin = partial(
            _Sender,
            self._store,
            codec=check_choice(codec),
            writer=writer,
            threads=threads,
            retry_after=retry_after,
            cut=cut,
            on_event=on_event,
            signing=signing,
        )
        Emitter(on_event, "trainer", writer)  # so that what cannot take events fails at once
        named_cuts(cut)
        channel_in(self._store, signing)
        self._sender: _Sender | None = None
        self._is_closed = False
        self._beginning = threading.Lock()

    def send(
        self, stream: Iterable[tuple[str, torch.Tensor]], step: int | None = None, label: str | None = None
    ) -> Receipt:
        """Publish the weights that a stream has. Returns after detection; the upload goes on in the background.

        The first one begins the channel with these weights as version 0, or takes it up where it is, and returns when
        that is done: where they are not the head's, its receipt is for the difference. Tensors of the channel that no
        stream has, such as frozen ones, keep their bits. `UsageError` if a stream does not match the channel.
        """
        arriving = iter(stream)
        try:
            check_step(step)
            check_label(label)
            with self._beginning:
                if self._is_closed:
                    raise UsageError("the publisher is closed", hint="Open a new one: it goes on from the head.")
                if self._sender is None:
                    self._sender = self._begin(partial(self._take, arriving))
                    return self._sender.send(None, step, label)
            return self._sender.send(arriving, step, label)
        except Exception:
            # Where tensors are gathered from several ranks, the others would wait for this one for ever.
            with suppress(Exception):
                deque(arriving, maxlen=0)
            raise

    def _take(
        self, stream: Iterable[tuple[str, torch.Tensor]], begun: Chain | None, coding: Coding, workers: Workers
    ) -> Streamed:
        """The detector that begins with a first stream."""
        from weightcast.torch.stream import Streamed

        table = begun.channel.table if begun is not None else None
        streamed = Streamed(
            stream, table, self._dtype, self._detect, coding=coding, workers=workers, translation=self._translation
        )
        if begun is not None and (missing := streamed.missing):
            with _held(begun, streamed.table, missing) as held:
                tied = _tied(held, missing)
                streamed.fill({name: held.read(name) for name in missing if name not in tied}, tied)
            for name, other in tied.items():
                _log.warning("%s is a copy of %s, and stays one: the stream has only that", name, other)
            if frozen := len(missing) - len(tied):
                _log.info("%s tensors of the channel are not in the stream and stay as they are", frozen)
        return streamed

    @property
    def table(self) -> TensorTable:
        """The channel's tensors: what is published. `UsageError` before the first `send`."""
        return self._begun().table

    @property
    def position(self) -> Position:
        """The last durable commit. `UsageError` before the first `send`."""
        return self._begun().position

    def _begun(self) -> Committer:
        if self._sender is None:
            raise UsageError("nothing was sent yet", hint="The first send(…) begins the channel or takes it up.")
        return self._sender

    def flush(self, timeout: float | None = None) -> Position:
        """Wait until everything sent is committed; raises what prevents it, and keeps it for another try."""
        return self._begun().flush(timeout)

    def close(self) -> None:
        """`flush`, then end. If that fails, what is not committed is given up, and its receipts fail.

        Raises what prevented a commit, unless `send`, `flush` or a receipt did already.
        """
        with self._beginning:
            self._is_closed = True
        if self._sender is not None:
            self._sender.close()

    def __enter__(self) -> StreamPublisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._beginning:
            self._is_closed = True
        if self._sender is not None:
            self._sender.__exit__(kind, error, at)


class _Sender(Committer):
    """A stream publisher that has begun."""

    def send(self, stream: Iterable[tuple[str, torch.Tensor]] | None, step: int | None, label: str | None) -> Receipt:
        streamed = cast("Streamed", self._detector)
        return self._add(partial(streamed.scan, stream), step, label, undoes=True)


def _translation_of(model: torch.nn.Module) -> Translation:
    from weightcast.torch.translation import Translation

    return Translation(model)


@contextmanager
def _held(begun: Chain, table: TensorTable, missing: Collection[str]) -> Iterator[Weights]:
    """The weights of a channel's head, for what is missing; `UsageError` if it has none yet."""
    head = begun.head()
    if head is None:
        problem = "the channel has more tensors than the trainer sends, and no version yet"
        hint = "Complete it: run `weightcast init` with the checkpoint again."
        raise UsageError(problem, tensor=next(iter(missing)), hint=hint)
    nothing = Copies(table, {spec.name: np.zeros(spec.elements, spec.kind.word) for spec in table})
    with version_beside(nothing, begun, head.position.version) as (held, _):
        yield held


def _tied(held: Weights, missing: Collection[str]) -> dict[str, str]:
    """The output layer, if it equals the embedding: a checkpoint may hold both, a model holds one and sends one.

    No others are guessed: a frozen block may well be a copy of one that is trained.
    """
    found = {}
    for spec in (held.table[name] for name in missing if name.endswith("lm_head.weight")):
        like = (one.name for one in held.table if one.shape == spec.shape and one.dtype == spec.dtype)
        for name in like:
            if name not in missing and np.array_equal(held.read(name), held.read(spec.name)):
                found[spec.name] = name
                break
    return found
