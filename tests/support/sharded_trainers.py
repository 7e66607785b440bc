"""The `Trainer` of transformers under accelerate with FSDP2, in processes: run by `sharded_models.run_together`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsdp_on_cpu  # noqa: F401
import transformers as tf
from sharded_models import gathered, whole_state
from sharded_runs import followed, shared_folder
from torch import distributed
from torch.distributed.tensor import DTensor
from trainers import BF16, F32, small_model, trainer_of

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.records import Manifest
from weightcast.integrations.transformers import WeightcastCallback
from weightcast.store.file import FileStore
from weightcast.torch.model import LiveModel


class Compared(tf.TrainerCallback):
    """Waits for each version and compares its digest with that of the gathered model."""

    def __init__(self, callback: WeightcastCallback, plain: Any):
        self.callback, self.plain = callback, plain
        self.steps: list[int | None] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert self.callback.publisher is not None
        self.must_be(self.callback.publisher.position.digest, model)

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        receipt = self.callback.receipt
        if receipt is not None and receipt.step == state.global_step:
            manifest = receipt.result(60)
            self.must_be(manifest.position.digest, model)
            self.steps.append(manifest.step)

    def must_be(self, digest: str, model: Any) -> None:
        state = {name.replace("_checkpoint_wrapped_module.", ""): x for name, x in whole_state(model).items()}
        self.plain.load_state_dict(state)
        assert digest == wc.fingerprint(LiveModel(self.plain, "BF16")).digest


def train(channel: Path, output: Path, model: Any, *, every: int = 1, resumes: bool = False, **options: Any) -> Any:
    """Train, with every version compared, the last one included; the callback that compares."""
    rank, world = str(distributed.get_rank()), str(distributed.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    tf.utils.logging.disable_progress_bar()
    callback = WeightcastCallback(channel, dtype="BF16", every=every)
    plain = type(model)(model.config).to(BF16 if next(model.parameters()).dtype == BF16 else F32)
    compared = Compared(callback, plain)
    fsdp: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2, **options.pop("fsdp", {})}}
    trainer = trainer_of(model, output, callback, compared, **fsdp, **options)
    trainer.train(resume_from_checkpoint=resumes)
    compared.must_be(callback.publisher.position.digest, trainer.model)
    distributed.barrier()
    if rank == "0":
        followed(channel)
    return compared


def head_of(channel: Path) -> Manifest:
    """The newest version, once every rank has seen it."""
    head = Chain.open(FileStore(channel)).head()
    assert head is not None
    return gathered(head)[0]


def float32_masters() -> None:
    folder = shared_folder()
    compared = train(folder / "channel", folder / "out", small_model())
    assert compared.steps == [1, 2, 3]
    assert len(head_of(folder / "channel").objects) == 2  # both ranks had a part


def bf16_weights_of_two_layers() -> None:
    folder = shared_folder()
    model = small_model(BF16, tie_word_embeddings=False, num_hidden_layers=2)
    compared = train(folder / "channel", folder / "out", model, fsdp={"reshard_after_forward": False})
    assert compared.steps == [1, 2, 3]


def mixed_precision_and_activation_checkpointing() -> None:
    folder = shared_folder()
    fsdp = {"activation_checkpointing": True, "cpu_ram_efficient_loading": True}
    options = {"bf16": True, "gradient_accumulation_steps": 2, "max_steps": 5}
    compared = train(folder / "channel", folder / "out", small_model(), every=2, fsdp=fsdp, **options)
    assert compared.steps == [2, 4]
    assert head_of(folder / "channel").step == 5


def best_model_loaded_at_the_end() -> None:
    folder = shared_folder()
    best = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    compared = train(folder / "channel", folder / "out", small_model(), **best)
    assert compared.steps == [1, 2, 3]
    assert head_of(folder / "channel").step == 1  # the worst one: it learns


def restart_from_a_checkpoint() -> None:
    folder = shared_folder()
    saving = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    train(folder / "channel", folder / "out", small_model(), max_steps=4, **saving)
    distributed.barrier()
    again = train(folder / "channel", folder / "out", small_model(seed=7), resumes=True, max_steps=6, **saving)
    assert again.steps == [5, 6]
    chain = Chain.open(FileStore(folder / "channel"))
    assert [chain.manifest(version).step for version in chain.versions()] == [None, 1, 2, 3, 4, 5, 6]
    assert [version for version in chain.versions() if chain.manifest(version).base is None] == [0]


TWO = [
    float32_masters,
    bf16_weights_of_two_layers,
    mixed_precision_and_activation_checkpointing,
    best_model_loaded_at_the_end,
    restart_from_a_checkpoint,
]
