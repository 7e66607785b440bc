"""The files that a checkpoint folder may hold beside its weights: text and tables that loaders read, never code.

An anchor or a public checkpoint comes from outside, and tools load the folder that it is written to. So the names are
an allow-list, and what makes a loader fetch or import code is removed from JSON files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from weightcast.disk.durable import replacing
from weightcast.errors import FormatError, WeightcastError

WEIGHTS = ".safetensors"

_SUFFIXES = (".json", ".jinja", ".md", ".model", ".tiktoken", ".txt")
_NAMES = {"LICENSE", "NOTICE"}
_MISLEADING = {"model_index.json", "modules.json"}
"""With one of these, loaders take the folder for something other than the model: a pipeline."""

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The files of an adapter, as PEFT and vLLM load it. Beside a model's weights, the second makes loaders put adapters on
it, or load another model in its place."""

_ADAPTED = "base_model.model."
"""What the names of an adapter's tensors begin with; no model's do."""

_METHOD = "LORA"
"""The only `peft_type` that is kept: other methods name tokenizers and further adapters to fetch."""

_CODE = {"auto_map", "custom_pipelines"}
"""Keys that name Python classes to import, perhaps from another repository."""

_CODE_OF_ADAPTERS = {"auto_mapping", "megatron_config", "megatron_core", "cache_file", "covariance_file"}
"""Keys of an adapter's configuration that name modules to import, or pickled files to load."""

_HARMLESS = {"megatron.core"}
"""A module that PEFT names in every configuration, and imports only with a `megatron_config`."""

_KERNELS = {"attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"}
"""Keys that name a kernel: one of transformers' own or, with a slash, one to fetch from a repository."""

_MAX_JSON = 1 << 28


def is_weights(name: str) -> bool:
    """Whether a file of this name holds weights."""
    return name.endswith(WEIGHTS)


def is_companion(name: str) -> bool:
    """Whether a file of this name may lie beside weights of some kind: configuration, tokenizer, template, licence."""
    return (name.endswith(_SUFFIXES) or name in _NAMES) and name not in _MISLEADING


def wanted(names: Iterable[str]) -> set[str]:
    """Which of these files may be in one checkpoint folder that we write.

    The configuration of an adapter is wanted only where the adapter's own file holds all weights.
    """
    kept = {name for name in names if is_weights(name) or is_companion(name)}
    is_adapter = {name for name in kept if is_weights(name)} == {ADAPTER}
    return kept if is_adapter else kept - {ADAPTER_CONFIG}


def remove_code_references(folder: Path) -> list[str]:
    """Remove what names code to import from the JSON files of ``folder``; returns the names of the changed files.

    A `.json` file that cannot be parsed is removed: its content cannot be checked. So is the configuration of an
    adapter, unless the weights in the folder are those of an adapter.
    """
    changed = []
    for path in sorted(folder.glob("*.json")):
        if path.name == ADAPTER_CONFIG and not _holds_adapter(folder):
            path.unlink()
            changed.append(path.name)
            continue
        if path.stat().st_size > _MAX_JSON:
            raise FormatError(f"a JSON file of {path.stat().st_size:,} bytes is over the limit", file=str(path))
        try:
            value = json.loads(path.read_bytes())
            if path.name == ADAPTER_CONFIG:
                found = _remove_code(value, _CODE_OF_ADAPTERS)
                _refuse_other_methods(value)
            else:
                found = _remove_code(value)
            cleaned = json.dumps(value, indent=2).encode() + b"\n" if found else None
        except (ValueError, RecursionError):
            path.unlink()
            changed.append(path.name)
            continue
        if cleaned is not None:
            with replacing(path) as file:
                file.write(cleaned)
            changed.append(path.name)
    return changed


def _holds_adapter(folder: Path) -> bool:
    """Whether the only weights in a folder are an adapter's; the names of its tensors are part of what is verified."""
    from weightcast.format.safetensors import (  # numpy, which a listing of versions does not need
        FileSource,
        open_container,
    )

    if {path.name for path in folder.glob(f"*{WEIGHTS}")} != {ADAPTER}:
        return False
    try:
        with FileSource(folder / ADAPTER) as source:
            return all(name.startswith(_ADAPTED) for name in open_container(source).entries)
    except WeightcastError:
        return False


def _refuse_other_methods(config: Any) -> None:
    """`ValueError` for the configuration of an adapter of another method than LoRA."""
    if not isinstance(config, dict) or config.get("peft_type") != _METHOD:
        raise ValueError("this is not the configuration of a LoRA adapter")


def _remove_code(value: Any, more: Iterable[str] = ()) -> bool:
    """Delete what names code, at any depth; returns whether there was any. Not recursive: a file can be very deep."""
    found, ahead = False, [value]
    while ahead:
        inner = ahead.pop()
        if isinstance(inner, dict):
            for key in [key for key, held in inner.items() if _names_code(key, held, more)]:
                del inner[key]
                found = True
            ahead += inner.values()
        elif isinstance(inner, list):
            ahead += inner
    return found


def _names_code(key: str, value: Any, more: Iterable[str]) -> bool:
    if value is None or isinstance(value, int | float):  # a token of a vocabulary may have any name
        return False
    if key in more:
        return not (isinstance(value, str) and value in _HARMLESS)
    return key in _CODE or (key in _KERNELS and "/" in json.dumps(value))
