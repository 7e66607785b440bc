"""The publisher of weights that training changes in place: a torch model, or arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from weightcast.channel.chain import Chain
from weightcast.channel.trust import Trust, signing_of
from weightcast.errors import UsageError
from weightcast.events.emitter import OnEvent
from weightcast.events.phases import Span
from weightcast.format.coding import Coding
from weightcast.format.scan import Detect, Detector, Scan, Shadowed, WireDtype, check_detect, check_wire_dtype
from weightcast.format.tensors import Weights, is_module, refuse_no_weights
from weightcast.format.workers import Workers
from weightcast.publish.codec_choice import CodecChoice
from weightcast.publish.committer import Committer, CutFor, Watch
from weightcast.publish.peers import Peers
from weightcast.publish.receipt import Receipt
from weightcast.publish.rounds import Rounds
from weightcast.publish.sharded import ShardedCommitter
from weightcast.publish.shards import Shards, arrays_of
from weightcast.publish.stepping import Stepping
from weightcast.store import open_store
from weightcast.store.base import Store

if TYPE_CHECKING:
    import torch


class Publisher(Committer):
    """The one writer of a channel; or one rank of it, where weights are sharded.

    `publish` returns once it knows what changed; encoding and upload go on in the background. While one patch is being
    sent the next one waits, and everything published meanwhile is merged into it.

    >>> weights = wc.Arrays({"w": np.zeros(4, np.float32)})
    >>> with wc.Publisher("channel", weights) as publisher:
    ...     weights.read("w")[1] = 0x3F800000
    ...     receipt = publisher.publish(step=1)
    >>> receipt.result().position.version, receipt.result().changed
    (1, 1)
    """

    _stepping: Stepping | None = None
    """Where events are asked for."""

    _ranks: Sequence[int] | None = None
    """Of a group of torch, the ranks that publish together."""

    def __new__(cls, channel: object, weights: object, **_: object) -> Publisher:
        """Sharded weights have a publisher on every rank, which is another class with the same methods."""
        return super().__new__(ShardedPublisher if cls is Publisher and _is_sharded(weights) else cls)

    def __init__(
        self,
        channel: str | Path | Store,
        weights: Weights | torch.nn.Module | Shards,
        *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        detect: Detect | None = None,
        dtype: WireDtype | torch.dtype | None = None,
        check_every: int | None = None,
        codec: CodecChoice = "banded",
        writer: str | None = None,
        threads: int | None = None,
        retry_after: float = 5.0,
        cut: CutFor = (),
        group: torch.distributed.ProcessGroup | Peers | None = None,
        on_event: OnEvent = (),
        sign: str | Path | None = None,
        trust: Trust | str | None = None,
    ):
        """Take up the channel where it is, or begin it. Only a channel's version 0 is committed here: where the weights
        are not the head's, the first `publish` carries the difference. If the head's own weights cannot be fetched any
        more, these are committed as an anchor at once.

        ``weights`` are what `publish` reads from then on: a torch model, or arrays that training changes in place.

        For a model: ``optimizer`` is what changes it, one or several; ``detect`` selects how changes are found
        (`weightcast.torch.detectors`); ``dtype`` is what float32 tensors are published as where the channel is new,
        such as "BF16". Changes that bypass the optimizer are found by digesting the model in place: at each publish on
        a GPU, at every ``check_every``-th (50th) on a CPU, where it costs more and patches are checked in the
        background anyway.

        An upload that fails, after all retries of the store, is tried again after ``retry_after`` seconds.

        ``codec`` "auto" is `banded` or `gap`, with whichever versions arrive sooner by what the publisher measures; the
        commit says which (`Manifest.codec`). "banded" sends the fewest bytes.

        ``cut`` is for tensor-parallel engines, whose workers hold parts of tensors: `banded` codes each part as a box
        of its own, so that a worker can decode what it holds. Name the parts (`Cut`), or "replicas": then they are
        those that engines name in their heartbeats, which are read every half minute.

        ``on_event`` gets an `Event` for each phase of a version once it is committed: a `Sink`, or several. They are
        called on the publisher's own thread, and all of them were by the time that `close` returns.

        Where the weights are sharded (`Shards`, or a model with DTensors or inside DistributedDataParallel), every rank
        of the process ``group``, by default all, opens a publisher and publishes after the same steps. Each uploads
        what it has; nothing is gathered. In place of a group of torch, ``group`` may be `Peers` of another framework.

        ``sign`` names the private key that signs versions, a file or `env:NAME`, and ``trust`` the root's public key:
        what this publisher continues from must be signed, too. Of a group only the rank that commits signs.
        """
        if group is not None and not isinstance(self, ShardedPublisher):
            raise UsageError("only sharded weights have a group", hint="Open a publisher on one rank, without a group.")
        if detect is not None:
            check_detect(detect)
        if isinstance(dtype, str):
            check_wire_dtype(dtype)
        if on_event and optimizer is not None and is_module(weights):
            self._stepping = Stepping(optimizer)
        watch = partial(_watch, weights, optimizer, detect, dtype, check_every, self._ranks)
        super().__init__(
            open_store(channel),
            watch,
            codec=codec,
            writer=writer,
            threads=threads,
            retry_after=retry_after,
            cut=cut,
            on_event=on_event,
            signing=signing_of(trust, sign),
        )

    def publish(self, step: int | None = None, weights: Weights | None = None, label: str | None = None) -> Receipt:
        """Publish the weights as they are now, or other ``weights`` of the same table. Returns after detection.

        ``label`` is one line for people, which `weightcast log` shows. Updates that are merged into one version carry
        the last step and the last label given. Where nothing changed there is no version, and so no label.
        """
        # Other weights are recorded at the end of a scan, a model's as it goes.
        return self._add(lambda: self._scan(weights), step, label, undoes=weights is not None)

    def _watched(self, watch: Watch, begun: Chain | None) -> Detector:
        if self._stepping is None:
            return super()._watched(watch, begun)
        with self._stepping.around_hooks():
            return super()._watched(watch, begun)

    def _unwatch(self) -> None:
        if self._stepping is not None:
            self._stepping.close()

    def _before_scan(self) -> tuple[Span, ...]:
        return self._stepping.take() if self._stepping is not None else ()

    def _scan(self, weights: Weights | None) -> Scan:
        if weights is None:
            return self._detector.scan()
        if not isinstance(self._detector, Shadowed):
            hint = "Call publish(step=…) without weights."
            raise UsageError("the publisher of a model publishes that model only", hint=hint)
        refuse_no_weights(weights)
        return self._detector.scan(weights)


class ShardedPublisher(ShardedCommitter, Publisher):
    """One rank of the one writer of a channel."""

    def __init__(
        self,
        channel: str | Path | Store,
        weights: Weights | torch.nn.Module | Shards,
        *,
        group: torch.distributed.ProcessGroup | Peers | None = None,
        **options: Any,
    ):
        peers = _peers_of(group)
        self._rounds, self._ranks = Rounds(peers), getattr(peers, "ranks", None)
        try:
            super().__init__(channel, weights, group=group, **options)
        except BaseException as error:
            self._rounds.tell(error)  # they are in a round of opening, or come to it
            self._rounds.close()
            raise


def _is_sharded(weights: object) -> bool:
    if isinstance(weights, Shards) or not is_module(weights):
        return isinstance(weights, Shards)
    from weightcast.torch.sharded import is_sharded

    return is_sharded(weights)


def _peers_of(group: torch.distributed.ProcessGroup | Peers | None) -> Peers:
    if group is not None and hasattr(group, "gather"):
        return cast(Peers, group)
    from weightcast.torch.peers import GroupPeers

    return GroupPeers(cast("torch.distributed.ProcessGroup | None", group))


def _watch(
    weights: Weights | torch.nn.Module | Shards,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    detect: Detect | None,
    dtype: WireDtype | torch.dtype | None,
    check_every: int | None,
    ranks: Sequence[int] | None,
    begun: Chain | None,
    coding: Coding,
    workers: Workers,
) -> Detector:
    table = begun.channel.table if begun is not None else None
    if is_module(weights):  # before all else: a module has no table
        from weightcast.torch.detectors import detector_of, watch
        from weightcast.torch.sharded import ShardedModel, is_sharded

        if is_sharded(weights):
            part = ShardedModel(weights, dtype, table, workers, ranks)
            return detector_of(part, optimizer, detect, check_every, coding)
        return watch(weights, optimizer, detect, dtype, check_every, table, coding, workers)
    if isinstance(weights, Shards) and not weights.is_numpy:
        from weightcast.torch.detectors import detector_of
        from weightcast.torch.shards import ShardTensors

        return detector_of(ShardTensors(weights.tensors, dtype, table, workers), optimizer, detect, check_every, coding)
    if isinstance(weights, Shards):
        weights = arrays_of(weights)
    refuse_no_weights(weights)
    if optimizer is not None or detect is not None or dtype is not None:
        raise UsageError("optimizer, detect and dtype are for a torch model", hint="Pass the model itself.")
    return Shadowed(cast(Weights, weights), coding, workers)
