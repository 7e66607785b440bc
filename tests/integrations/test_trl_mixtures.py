"""Mixtures through `WeightcastTransfer` and `WeightcastCallback`: one table and digest, those of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from families import EXPERTS  # noqa: E402
from trainers import BF16, SMALL, trainer_of  # noqa: E402
from trl_transfer import Attended, Trainer, step, sync  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.channel.chain import Chain  # noqa: E402
from weightcast.errors import UsageError  # noqa: E402
from weightcast.integrations.transformers import WeightcastCallback  # noqa: E402
from weightcast.integrations.trl import WeightcastTransfer  # noqa: E402
from weightcast.store.base import Store  # noqa: E402
from weightcast.store.memory import MemoryStore  # noqa: E402

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def qwen3_moe(tied: bool = False) -> Any:
    return tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**SMALL | EXPERTS | {"tie_word_embeddings": tied}, **TOKENS))


def mixtral() -> Any:
    sizes = SMALL | {"tie_word_embeddings": False, "num_local_experts": 4}
    return tf.MixtralForCausalLM(tf.MixtralConfig(**sizes, **TOKENS))


MODELS: dict[str, Callable[[], Any]] = {
    "qwen3_moe": qwen3_moe,
    "qwen3_moe tied": lambda: qwen3_moe(tied=True),
    "mixtral": mixtral,
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    tf.utils.logging.disable_progress_bar()
    yield
    tf.utils.logging.enable_progress_bar()


def digest_of(folder: Path) -> str:
    with wc.Checkpoint(folder) as checkpoint:
        return wc.fingerprint(checkpoint).digest


def saved_digest(model: Any, folder: Path) -> str:
    deepcopy(model).to(BF16).save_pretrained(folder)
    return digest_of(folder)


def followed(store: Store, folder: Path) -> str:
    with wc.Subscriber(store, folder, threads=1) as subscriber:
        subscriber.sync()
        subscriber.fold()
    return digest_of(folder)


class Beside(tf.TrainerCallback):
    """Syncs by a transfer whenever a callback published, and compares the two."""

    def __init__(self, callback: WeightcastCallback, transfer: WeightcastTransfer, folder: Path):
        self._callback, self._transfer, self._folder = callback, transfer, folder
        self._trainer: Trainer | None = None
        self.steps = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self._model = model
        self._trainer = Trainer(self._transfer, model.named_parameters)
        self._trainer.begin()
        self._compare()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self._callback.receipt is not None
        assert self._trainer is not None
        self._callback.receipt.result(60)
        self._trainer.sync()
        self._compare()
        self.steps += 1

    def _compare(self) -> None:
        publisher, last = self._callback.publisher, self._transfer.last
        assert publisher is not None
        assert last is not None
        assert last.version == publisher.position.version
        assert publisher.position.digest == saved_digest(self._model, self._folder)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_transfer_and_callback_publish_what_save_pretrained_writes(
    kind: str, begun: bool, opened: Callable[..., Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, by_transfer, by_callback = MODELS[kind](), Attended(), MemoryStore()
    if begun:
        saved_digest(model, tmp_path / "first")
        for store in (by_transfer, by_callback):
            wc.init(store, tmp_path / "first")
        structure = type(model).from_pretrained(tmp_path / "first", device_map="meta")
    transfer = opened(by_transfer, model=structure if begun else model)
    callback = WeightcastCallback(by_callback, dtype="BF16")
    beside = Beside(callback, transfer, tmp_path / "saved")
    trainer_of(model, tmp_path / "output", callback, beside, learning_rate=1e-3).train()
    assert beside.steps == 3
    transfer.destroy()
    assert Chain.open(by_transfer).channel.table == Chain.open(by_callback).channel.table
    assert (
        followed(by_transfer, tmp_path / "by transfer")
        == followed(by_callback, tmp_path / "by callback")
        == saved_digest(model, tmp_path / "saved")
    )


def test_model_may_be_wrapped_and_replaced_after_it_was_passed(opened: Callable[..., Any], tmp_path: Path) -> None:
    """TRL's trainer puts adapters into it and shards it before the first sync, and streams the names without them."""
    model, store = qwen3_moe(), Attended()
    tensors = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    transfer = opened(store, model=model)
    model.model.layers[0].self_attn.q_proj = torch.nn.ModuleDict({"base_layer": model.model.layers[0].self_attn.q_proj})
    model.model.layers[0].mlp.experts = torch.nn.Identity()
    transfer.init_weight_transfer()
    for number in range(3):
        step(tensors, number)
        assert sync(transfer, tensors).version == number
    fresh = qwen3_moe()
    fresh.load_state_dict(tensors)
    assert followed(store, tmp_path / "mirror") == saved_digest(fresh, tmp_path / "saved")


def test_bytes_that_trl_streamed_are_counted_once(opened: Callable[..., Any]) -> None:
    model = qwen3_moe()
    transfer = opened(Attended(), model=model)
    transfer.init_weight_transfer()
    done = sync(transfer, model.named_parameters())
    assert done.broadcast == sum(tensor.nbytes for tensor in model.parameters())


def test_name_in_place_of_a_model_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="device_map='meta'"):
        WeightcastTransfer(MemoryStore(), model="Qwen/Qwen3-30B-A3B")  # type: ignore[arg-type]
