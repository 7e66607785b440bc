"""Trainers publish in the boxes that tensor-parallel engines hold, named or read from heartbeats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from trainers import small_model, trainer_of  # noqa: E402
from trl_transfer import begun, holds, model, step, sync  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.channel.chain import Chain  # noqa: E402
from weightcast.format.patchfile import PatchReader  # noqa: E402
from weightcast.format.safetensors import BytesSource  # noqa: E402
from weightcast.integrations.transformers import WeightcastCallback  # noqa: E402
from weightcast.integrations.trl import WeightcastTransfer  # noqa: E402
from weightcast.store.memory import MemoryStore  # noqa: E402

CUT = [wc.Cut("*.weight", axis=1, parts=2)]


def boxes_of_head(store: MemoryStore) -> int:
    head: Any = Chain.open(store).head()
    rows = [row for ref in head.objects for row in PatchReader(BytesSource(store.get(ref.key))).rows]
    return sum(row.box is not None for row in rows)


def test_callback_publishes_in_boxes(tmp_path: Path) -> None:
    store = MemoryStore()
    trainer_of(small_model(), tmp_path, WeightcastCallback(store, dtype="BF16", cut=CUT), max_steps=1).train()
    assert boxes_of_head(store) > 4


def test_transfer_publishes_in_boxes() -> None:
    store, tensors = MemoryStore(), model()
    transfer = begun(WeightcastTransfer(store, patience=0, cut=CUT), tensors)
    step(tensors, 1)
    sync(transfer, tensors)
    transfer.destroy()
    assert boxes_of_head(store) > 0
    holds(store, tensors)
