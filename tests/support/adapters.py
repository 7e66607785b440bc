"""Small models of PEFT: an adapter on a base, steps that train it, and a mirror compared with what PEFT saves."""

from __future__ import annotations

import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from families import built
from transformers.utils import logging

import weightcast as wc
from weightcast.store.base import Store

logging.disable_progress_bar()

BF16, F32 = torch.bfloat16, torch.float32


def adapted(family: str = "qwen3", dtype: Any = BF16, *, adapter_dtype: Any = None, **options: Any) -> Any:
    """A model with an adapter that is not zero; PEFT makes the adapter of a bf16 model float32."""
    base = built(family, dtype)
    model = peft.get_peft_model(base, lora(**options), autocast_adapter_dtype=adapter_dtype is None)
    for name, parameter in model.named_parameters():
        if adapter_dtype is not None and "lora_" in name:
            parameter.data = parameter.data.to(adapter_dtype)
    return model


def lora(**options: Any) -> Any:
    torch.manual_seed(0)
    return peft.LoraConfig(
        **{"r": 4, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
        | options
    )


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(seed))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def save_adapter(model: Any, folder: Path) -> Path:
    """What PEFT writes of the active adapter; the folder that holds it."""
    name = model.active_adapter
    model.save_pretrained(folder, selected_adapters=[name])
    return folder if name == "default" else folder / name


def save_merged(model: Any, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT says which embeddings are not tied any more
        deepcopy(model).merge_and_unload().save_pretrained(folder)
    return folder


def pulled(store: Store | str, mirror: Path) -> Path:
    """The mirror, at the head and with all of it in its files."""
    with wc.Subscriber(store, mirror, threads=1) as subscriber:
        subscriber.sync()
        subscriber.fold()
    return mirror


def assert_same(folder: Path, saved: Path) -> None:
    """The same names, dtypes, shapes and bits."""
    with wc.Checkpoint(folder) as mine, wc.Checkpoint(saved) as theirs:
        assert mine.table == theirs.table
        for spec in theirs.table:
            assert np.array_equal(mine.read(spec.name), theirs.read(spec.name)), spec.name


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}
