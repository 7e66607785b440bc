"""Import foreign folders in this process, and see what it did to the channel (over `foreign.py`)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from foreign import State, digest

from weightcast.channel.chain import Chain
from weightcast.channel.records import Manifest
from weightcast.errors import WeightcastError
from weightcast.interop.exporting import Exported, chosen, export_versions
from weightcast.interop.importing import Imported, import_steps
from weightcast.interop.layouts import LayoutName, opened
from weightcast.store import open_store


def bring(url: Path, folder: Path, base: Path | None = None, codec: str = "banded") -> list[Imported]:
    """Import a folder, with a mirror beside the channel."""
    with tempfile.TemporaryDirectory() as room:
        source = opened(folder, None, base)
        mirror = url.with_name(url.name + "-mirror")
        return list(import_steps(open_store(url), source, Path(room), mirror, codec=codec))


def write_out(url: Path, folder: Path, layout: LayoutName, step: int | None = None, **options: Any) -> list[Exported]:
    """Export a channel."""
    chain = Chain.open(open_store(url))
    with tempfile.TemporaryDirectory() as room:
        versions = chosen(chain, layout, step)
        return list(export_versions(chain, versions, folder, Path(room), layout, **options))


def manifests(url: Path) -> dict[int, Manifest]:
    """The versions of a channel by their step, if there is one."""
    if not (url / "channel.json").exists():
        return {}
    chain = Chain.open(open_store(url))
    found = (chain.manifest(version) for version in chain.versions())
    return {manifest.step: manifest for manifest in found if manifest.step is not None}


def holds(url: Path, states: dict[int, State]) -> bool:
    """Whether the channel has a version for each of these steps and no other, with the digest of its state."""
    there = {step: manifest.position.digest for step, manifest in manifests(url).items()}
    return there == {step: digest(state) for step, state in states.items()}


def refuses(url: Path, kind: type[WeightcastError], match: str, folder: Path, base: Path | None = None) -> None:
    """Assert one error that matches, and a channel as it was before; `steps_left` for one that went some way."""
    before = _objects(url)
    with pytest.raises(kind, match=match):
        bring(url, folder, base)
    assert _objects(url) == before


def _objects(url: Path) -> dict[str, bytes]:
    return {str(path.relative_to(url)): path.read_bytes() for path in sorted(url.rglob("*")) if path.is_file()}


# -- surgery on safetensors files --------------------------------------------------------------------------------------

Header = dict[str, Any]


def operate(path: Path, change: Callable[[Header, bytearray], None]) -> None:
    """Change the header and the data of a safetensors file, as an attacker would: by hand."""
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8:end]), bytearray(raw[end:])
    change(header, data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def span(header: Header, name: str) -> slice:
    """Where the data of an entry is."""
    return slice(*header[name]["data_offsets"])
