"""A model of PEFT in TRL's `AsyncGRPOTrainer`: its own code merges, streams and unmerges; no engine is needed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from adapters import adam, adapted, assert_same, pulled, save_merged, step
from families import built
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
from waiting import until

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.integrations.trl import WeightcastTransfer
from weightcast.store.memory import MemoryStore


def trainer_of(model: Any, transfer: WeightcastTransfer) -> Any:
    """As much of the trainer as a sync of weights needs."""
    trainer = object.__new__(AsyncGRPOTrainer)
    trainer.model, trainer.weight_transfer = model, transfer
    trainer.accelerator = Accelerator(cpu=True)
    trainer.rollout_worker, trainer.model_version = None, 0
    return trainer


@pytest.mark.parametrize("base", ["new", "known"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"family": "qwen3 tied", "target_modules": "all-linear", "use_rslora": True},
        {"dtype": torch.float32},
        {"modules_to_save": ["lm_head"]},
    ],
    ids=["float32 on bf16", "all linear layers", "float32", "a module to save"],
)
def test_trl_streams_merged_weights(options: dict[str, Any], base: str, tmp_path: Path) -> None:
    store, model = MemoryStore("trl"), adapted(**options)
    if base == "known":
        built(options.get("family", "qwen3"), options.get("dtype")).save_pretrained(tmp_path / "base")
        wc.init(store, tmp_path / "base")
    optimizer, transfer = adam(model), WeightcastTransfer(store, patience=0, dtype=None)
    trainer = trainer_of(model, transfer)
    transfer.init_weight_transfer()
    for number in range(4):
        if number:
            step(model, optimizer, number)
        saved = save_merged(model, tmp_path / str(number))
        trainer._sync_weight_merged(time.time())
        assert not any(getattr(module, "merged", False) for module in model.modules())
        version = number + (base == "known")
        until(lambda version=version: Chain.open(store).head().position.version == version)
        assert_same(pulled(store, tmp_path / "mirror"), saved)
    transfer.destroy()


def test_trl_leaves_rounding_in_a_bf16_base() -> None:
    """What docs/guides/lora.md says of `merge_adapter` and `unmerge_adapter`, which TRL calls around each sync."""
    model = adapted()
    base = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    before = base.detach().clone()
    transfer = WeightcastTransfer(MemoryStore("trl"), patience=0)
    transfer.init_weight_transfer()
    trainer_of(model, transfer)._sync_weight_merged(time.time())
    transfer.destroy()
    assert not torch.equal(base, before)
