"""The files that a checkpoint folder may hold beside its weights: text and tables that loaders read, never code.

An anchor or a public checkpoint comes from outside, and tools load the folder that it is written to. So the names are
an allow-list, and what makes a loader fetch or import code is removed from JSON files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weightcast.disk.durable import replacing
from weightcast.errors import FormatError

WEIGHTS = ".safetensors"

_SUFFIXES = (".json", ".jinja", ".md", ".model", ".tiktoken", ".txt")
_NAMES = {"LICENSE", "NOTICE"}
_MISLEADING = {"adapter_config.json", "model_index.json", "modules.json"}
"""With one of these, loaders take the folder for something other than the model: an adapter, a pipeline."""

_CODE = {"auto_map", "custom_pipelines"}
"""Keys that name Python classes to import, perhaps from another repository."""

_KERNELS = {"attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"}
"""Keys that name a kernel: one of transformers' own or, with a slash, one to fetch from a repository."""

_MAX_JSON = 1 << 28


def is_wanted(name: str) -> bool:
    """Whether a file of this name may be in a checkpoint folder that we write, weights included."""
    return name.endswith(WEIGHTS) or is_companion(name)


def is_companion(name: str) -> bool:
    """Whether a file of this name belongs beside weights: configuration, tokenizer, chat template, licence."""
    return (name.endswith(_SUFFIXES) or name in _NAMES) and name not in _MISLEADING


def remove_code_references(folder: Path) -> list[str]:
    """Remove what names code to import from the JSON files of ``folder``; returns the names of the changed files.

    A `.json` file that cannot be parsed is removed: its content cannot be checked.
    """
    changed = []
    for path in sorted(folder.glob("*.json")):
        if path.stat().st_size > _MAX_JSON:
            raise FormatError(f"a JSON file of {path.stat().st_size:,} bytes is over the limit", file=str(path))
        try:
            value = json.loads(path.read_bytes())
            cleaned = json.dumps(value, indent=2).encode() + b"\n" if _remove_code(value) else None
        except (ValueError, RecursionError):
            path.unlink()
            changed.append(path.name)
            continue
        if cleaned is not None:
            with replacing(path) as file:
                file.write(cleaned)
            changed.append(path.name)
    return changed


def _remove_code(value: Any) -> bool:
    """Delete what names code, at any depth; returns whether there was any. Not recursive: a file can be very deep."""
    found, ahead = False, [value]
    while ahead:
        inner = ahead.pop()
        if isinstance(inner, dict):
            for key in [key for key, held in inner.items() if _names_code(key, held)]:
                del inner[key]
                found = True
            ahead += inner.values()
        elif isinstance(inner, list):
            ahead += inner
    return found


def _names_code(key: str, value: Any) -> bool:
    if isinstance(value, int | float):  # a token of a vocabulary may have any name
        return False
    return key in _CODE or (key in _KERNELS and "/" in json.dumps(value))
