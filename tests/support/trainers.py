"""A small model in the real `transformers.Trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as tf

BF16, F32 = torch.bfloat16, torch.float32
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": True,
}


def small_model(dtype: Any = F32, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**{**SMALL, **changes})).to(dtype)


def dataset() -> list[dict[str, Any]]:
    tokens = torch.randint(0, 64, (16, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer_of(model: Any, folder: Path, *callbacks: Any, **changes: Any) -> Any:
    options = {"max_steps": 3, "learning_rate": 1e-4, "per_device_train_batch_size": 2, "logging_steps": 1}
    options |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    # Pinning warns where there is no accelerator.
    args = tf.TrainingArguments(output_dir=str(folder), dataloader_pin_memory=False, **{**options, **changes})
    return tf.Trainer(model, args, train_dataset=dataset(), eval_dataset=dataset(), callbacks=list(callbacks))


class At(tf.TrainerCallback):
    """Does something after a step."""

    def __init__(self, step: int, act: Any):
        self.step, self.act = step, act

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.act()


def interrupt() -> None:
    raise KeyboardInterrupt
