"""The files that a checkpoint folder may hold beside its weights: text and tables that loaders read, never code.

An anchor or a public checkpoint comes from outside, and tools load the folder it is put into. So the names are an
allow-list, and what makes a loader fetch or import code is removed from JSON files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weightcast.errors import FormatError
from weightcast.files import replacing

WEIGHTS = ".safetensors"

_SUFFIXES = (".json", ".jinja", ".md", ".model", ".tiktoken", ".txt")
_NAMES = {"LICENSE", "NOTICE"}
_MISLEADING = {"adapter_config.json", "model_index.json", "modules.json"}
"""With one of these, loaders take the folder for something other than the model: an adapter, a pipeline."""

_CODE = {"auto_map", "custom_pipelines"}
"""Keys that name Python classes to import, perhaps from another repository."""

_MAX_JSON = 1 << 28


def is_wanted(name: str) -> bool:
    """Whether a file of this name may be in a checkpoint folder that we fill, weights included."""
    return name.endswith(WEIGHTS) or is_companion(name)


def is_companion(name: str) -> bool:
    """Whether a file of this name belongs beside weights: configuration, tokenizer, chat template, licence."""
    return (name.endswith(_SUFFIXES) or name in _NAMES) and name not in _MISLEADING


def remove_code_references(folder: Path) -> list[str]:
    """Remove what names code to import from the JSON files of ``folder``; returns the names of the changed files.

    A file that is not JSON stays as it is: the loaders that would follow such a reference cannot read it either.
    """
    changed = []
    for path in sorted(folder.glob("*.json")):
        if path.stat().st_size > _MAX_JSON:
            raise FormatError(f"a JSON file of {path.stat().st_size:,} bytes is over the limit", file=str(path))
        try:
            value = json.loads(path.read_bytes())
            cleaned = _without_code(value)
        except (ValueError, RecursionError):
            continue
        if cleaned != value:
            with replacing(path) as file:
                file.write(json.dumps(cleaned, indent=2).encode() + b"\n")
            changed.append(path.name)
    return changed


def _without_code(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_code(inner) for key, inner in value.items() if key not in _CODE}
    if isinstance(value, list):
        return [_without_code(inner) for inner in value]
    return value
