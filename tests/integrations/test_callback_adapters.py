"""`WeightcastCallback` with a model of PEFT in the real `transformers.Trainer`: the adapter, or merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

from adapters import assert_same, lora, names_in, pulled, save_adapter, save_merged  # noqa: E402
from trainers import BF16, small_model, trainer_of  # noqa: E402

from weightcast.channel.chain import Chain  # noqa: E402
from weightcast.integrations.transformers import WeightcastCallback  # noqa: E402
from weightcast.store.memory import MemoryStore  # noqa: E402


def adapted() -> Any:
    return peft.get_peft_model(small_model(BF16), lora())


def test_adapter_of_a_trained_model_is_published(tmp_path: Path) -> None:
    model, store = adapted(), MemoryStore("callback")
    trainer_of(model, tmp_path / "out", WeightcastCallback(store), learning_rate=1e-2).train()
    mirror = pulled(store, tmp_path / "mirror")
    assert_same(mirror, save_adapter(model, tmp_path / "saved"))
    assert names_in(mirror) == {"adapter_model.safetensors", "adapter_config.json"}
    head = Chain.open(store).head()
    assert head is not None
    assert head.step == 3


def test_merged_weights_of_a_trained_model_are_published_on_request(tmp_path: Path) -> None:
    model, store = adapted(), MemoryStore("callback")
    callback = WeightcastCallback(store, merged=True)
    trainer_of(model, tmp_path / "out", callback, learning_rate=1e-2).train()
    assert_same(pulled(store, tmp_path / "mirror"), save_merged(model, tmp_path / "saved"))
