"""A checkpoint before and after a step, as a file and as a folder, with the patch between them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from commands import Done, weightcast
from safetensors.numpy import load_file, save_file

from weightcast.disk.checkpoint import INDEX

Weights = dict[str, np.ndarray]


def states() -> tuple[Weights, Weights]:
    """A small model before and after a step."""
    rng = np.random.default_rng(3)
    old: Weights = {
        "lm_head.weight": rng.normal(0, 0.02, (64, 32)).astype(ml_dtypes.bfloat16),
        "model.embed_tokens.weight": rng.normal(0, 0.02, (64, 32)).astype(ml_dtypes.bfloat16),
        "model.layers.0.mlp.up_proj.weight": rng.normal(0, 0.02, (96, 32)).astype(ml_dtypes.bfloat16),
        "model.norm.weight": np.ones(32, np.float32),
    }
    new = {name: array.copy() for name, array in old.items()}
    for name in ("lm_head.weight", "model.layers.0.mlp.up_proj.weight"):
        flat = new[name].reshape(-1)
        at = rng.choice(flat.size, 40, replace=False)
        flat[at] = (flat[at].astype(np.float32) * 1.02).astype(ml_dtypes.bfloat16)
    new["model.norm.weight"][3] = 1.5
    return old, new


def write_single(path: Path, weights: Weights) -> None:
    save_file(weights, path, {"format": "pt"})


def write_sharded(folder: Path, weights: Weights) -> None:
    """As Hugging Face lays it out, with the files that are not weights."""
    folder.mkdir()
    names = sorted(weights)
    weight_map = {}
    for i, mine in enumerate((names[:2], names[2:]), 1):
        file = f"model-{i:05d}-of-00002.safetensors"
        write_single(folder / file, {name: weights[name] for name in mine})
        weight_map |= dict.fromkeys(mine, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.txt").write_text("a\nb\n")


def read(path: Path) -> Weights:
    """By the safetensors library, which knows nothing of weightcast."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {name: array for file in files for name, array in load_file(file).items()}


def same(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def contents(path: Path) -> dict[str, bytes]:
    """All bytes of a file, or of a folder and everything in it."""
    files = [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else [path]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@dataclass(frozen=True)
class Pair:
    """A checkpoint before and after, a patch from one to the other, and what making it printed."""

    old: Path
    new: Path
    patch: Path
    made: Done


def make_pair(folder: Path, sharded: bool) -> Pair:
    suffix, write = ("", write_sharded) if sharded else (".safetensors", write_single)
    old, new, patch = folder / f"old{suffix}", folder / f"new{suffix}", folder / "step.patch"
    for path, weights in zip((old, new), states(), strict=True):
        write(path, weights)
    return Pair(old, new, patch, weightcast("diff", old, new, "-o", patch, "--json"))
