"""`ShardedSync` on one rank: what it refuses, and what it leaves to the trainer. Its ranks are tested with real TRL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from trl_transfer import Attended, holds, model, step, sync, versions  # noqa: E402

from weightcast.errors import UsageError  # noqa: E402
from weightcast.integrations.trl import WeightcastTransfer  # noqa: E402
from weightcast.integrations.trl_sharded import ShardedSync  # noqa: E402
from weightcast.store.memory import MemoryStore  # noqa: E402


class Streaming:
    """A trainer with the methods of TRL's that `ShardedSync` meets, and a model that is not sharded."""

    def __init__(self, tensors: dict[str, Any], *, weight_transfer: Any, fails: bool = False):
        self.tensors, self.weight_transfer, self._fails = tensors, weight_transfer, fails
        self.model = torch.nn.Linear(1, 1)

    def _streaming_iter(self) -> Iterator[tuple[str, Any]]:
        yield from self.tensors.items()

    def train(self) -> str:
        self.weight_transfer.init_weight_transfer()
        sync(self.weight_transfer, self._streaming_iter())
        step(self.tensors, 1)
        sync(self.weight_transfer, self._streaming_iter())
        if self._fails:
            raise RuntimeError("in the loop")
        return "trained"


class Sharded(ShardedSync, Streaming):
    pass


def transfer_to(store: Any) -> WeightcastTransfer:
    return WeightcastTransfer(store, threads=1, joining=0.0, patience=30.0)


def test_model_that_is_not_sharded_is_streamed_as_the_trainer_does() -> None:
    store, tensors = Attended(), model()
    transfer = transfer_to(store)
    assert Sharded(tensors, weight_transfer=transfer).train() == "trained"
    assert transfer.last is not None
    assert (transfer.last.live, versions(store)) == (True, [0, 1])
    holds(store, tensors)


def test_transfer_is_closed_after_a_training_that_raised() -> None:
    store, tensors = Attended(), model()
    transfer = transfer_to(store)
    with pytest.raises(RuntimeError, match="in the loop"):
        Sharded(tensors, weight_transfer=transfer, fails=True).train()
    with pytest.raises(UsageError, match="init_weight_transfer was not called"):
        sync(transfer, tensors)


def test_second_training_of_a_trainer_is_refused_on_every_rank() -> None:
    trainer = Sharded(model(), weight_transfer=transfer_to(Attended()))
    trainer.train()
    with pytest.raises(UsageError, match="has trained already"):
        trainer.train()


def test_transfer_that_only_some_ranks_pass_is_refused() -> None:
    with pytest.raises(UsageError, match="expected a WeightcastTransfer, got NoneType"):
        Sharded(model(), weight_transfer=None)


def test_trainer_without_the_replaced_method_is_refused() -> None:
    class Other(ShardedSync):
        pass

    with pytest.raises(UsageError, match="no _streaming_iter"):
        Other(weight_transfer=transfer_to(MemoryStore()))
