"""What the real `Trainer` of transformers saves, as a channel."""

from __future__ import annotations

from pathlib import Path

import pytest
from importing import bring, write_out

pytest.importorskip("transformers")

from trainers import BF16, small_model, trainer_of


@pytest.mark.parametrize("dtype", [None, BF16])
def test_every_checkpoint_of_a_trainer_is_recreated_byte_by_byte(dtype: object, tmp_path: Path) -> None:
    model = small_model() if dtype is None else small_model(dtype)
    trainer_of(model, tmp_path / "run", save_strategy="steps", save_steps=1).train()
    done = bring(tmp_path / "channel", tmp_path / "run")
    assert [(one.step, one.other_files) for one in done] == [(1, ()), (2, ()), (3, ())]
    write_out(tmp_path / "channel", tmp_path / "out", "history")
    for step in (1, 2, 3):
        there, here = (tmp_path / root / f"checkpoint-{step}" for root in ("run", "out"))
        assert {path.name for path in here.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
        assert all(path.read_bytes() == (there / path.name).read_bytes() for path in here.iterdir())
