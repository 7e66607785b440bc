"""TRL with a sharded model: `ShardedSync`, mixed into its trainer, publishes shard by shard.

    every rank   TRL's barrier → detect, encode, upload its shards ─┐
    rank 0                                                          └─ commit → live in the engines → TRL's barrier

TRL sends the weights between two barriers of all ranks, so each of them can publish there, at the same step.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from weightcast.errors import UsageError
from weightcast.integrations.trl import Pairs, ShardStream, WeightcastTransfer
from weightcast.torch.adapters import is_adapted
from weightcast.torch.sharded import is_sharded
from weightcast.torch.wrappers import unwrapped


class ShardedSync:
    """Mixed into TRL's trainer, publishes a sharded model shard by shard: TRL gathers nothing.

    >>> class Trainer(ShardedSync, AsyncGRPOTrainer): ...                                # doctest: +SKIP
    >>> trainer = Trainer(model, weight_transfer=WeightcastTransfer(url), …)             # doctest: +SKIP

    Every rank makes the transfer and passes it, with the same arguments. At each sync each rank publishes what it has
    (`Publisher`), rank 0 waits until that version is live, and the others wait for rank 0 in TRL's own barrier. The
    names are the checkpoint's: the transfer needs no ``model``. Its `last` is for rank 0. A model that is not sharded,
    or is one of PEFT, is streamed as without this class.

    TRL hands its `weight_transfer` to rank 0 alone, and the other ranks gather whatever that does. So one method of
    the trainer is replaced which is not public, `_streaming_iter`; TRL 1.16 has it.
    """

    def __init__(self, *args: Any, weight_transfer: WeightcastTransfer, **options: Any):
        """The trainer's own arguments."""
        if not isinstance(weight_transfer, WeightcastTransfer):
            hint = "Pass the same weight_transfer=WeightcastTransfer(…) on every rank."
            raise UsageError(f"expected a WeightcastTransfer, got {type(weight_transfer).__name__}", hint=hint)
        if not hasattr(super(), "_streaming_iter"):
            hint = "Use the trainer without ShardedSync: TRL gathers the weights and streams them."
            raise UsageError("the trainer has no _streaming_iter to replace", hint=hint)
        self._weightcast, self._has_trained = weight_transfer, False
        cast(Any, super()).__init__(*args, weight_transfer=weight_transfer, **options)

    def train(self, *args: Any, **options: Any) -> Any:
        """As the trainer's own, once: TRL begins a transfer only in the first training."""
        if self._has_trained:
            raise UsageError("the trainer has trained already", hint="To train again, make another trainer.")
        self._has_trained = True
        try:
            return cast(Any, super()).train(*args, **options)
        finally:
            self._weightcast.destroy()  # TRL does it on rank 0 alone

    def _streaming_iter(self) -> Pairs:
        """What TRL passes to `send_weights` on rank 0, and goes through on the others."""
        trainer = cast(Any, self)
        model = trainer.model
        if not is_sharded(model) or is_adapted(unwrapped(model)):
            return cast(Pairs, cast(Any, super())._streaming_iter())
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        publish = partial(self._weightcast.publish_shards, model, trainer.optimizer, trainer.state.global_step)
        return ShardStream(publish, sum(parameter.numel() * parameter.element_size() for parameter in trained))
