"""Reading the layout of TRL's drafts of delta weight sync: `anchors/step_*.safetensors`, `deltas/step_*.safetensors`.

None of these drafts was merged into TRL. What is here was read in huggingface/trl, in `trl/experimental/async_grpo`:
`delta_engine.py` and `weight_diff.py` at a46bf262 (the first draft), d6504b7e (the end of its branch) and aa9adc33 (the
last draft), `delta_codec.py` and `weight_transfer.py` at aa9adc33.

- An anchor has every tensor whole, in bf16. A delta has, for each tensor that changed, the flat indices and the new
  values: `NAME.indices` and `NAME.values` in the first draft, `NAME.idx` and `NAME.val` in the last.
- Indices are int32 (`raw`), or gaps: `i[k] - i[k-1] - 1`, uint16, or uint32 for a tensor where one does not fit. Which
  it is, the last draft says in the metadata (`encoding`), for the whole file. `nvcomp_cascaded` is not read here.
- Each step has one file, an anchor or a delta, and nothing says what a delta was made from but its number: the step
  before. At a46bf262 there is a SHA-256 over all tensors as of the step (`checksum_sha256`), which is checked.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from weightcast.disk.checkpoint import Checkpoint
from weightcast.errors import FormatError, UsageError, VersionError, about
from weightcast.format.diff import refuse_other_table
from weightcast.format.patch import Indices
from weightcast.format.safetensors import Container, Entry, FileSource, open_container
from weightcast.format.spec import TensorSpec, TensorTable
from weightcast.interop.replayed import Replayed, refuse_other_places
from weightcast.interop.step import Aliases, Step, refuse_link, small_files

ANCHORS, DELTAS = "anchors", "deltas"
_NAME = re.compile(r"step_([0-9]{6,12})\.safetensors")
_SUFFIXES = ((".idx", ".val"), (".indices", ".values"))
EMPTY = "__empty_delta__"
"""What the first draft puts into a delta in which nothing changed, since a file must have a tensor."""

GAPS: dict[str, np.dtype[Any]] = {"U16": np.dtype("<u2"), "U32": np.dtype("<u4")}


def steps_in(folder: Path) -> dict[int, Path]:
    """The files by their step, rising; `UsageError` for a step that is there twice."""
    found: dict[int, Path] = {}
    for kind in (ANCHORS, DELTAS):
        refuse_link(folder / kind)
        for path in sorted((folder / kind).glob("step_*.safetensors")):
            match = _NAME.fullmatch(path.name)
            if match is None:
                continue
            number = int(match[1])
            if number in found:
                hint = "A step has one file. Move one of them away."
                raise UsageError(f"step {number} is there twice", file=str(path), hint=hint)
            found[number] = path
    return dict(sorted(found.items()))


def _is_anchor(path: Path) -> bool:
    return path.parent.name == ANCHORS


class TrlSource:
    """A folder in the layout of TRL's drafts; ``base`` has the configuration and the tokenizer, which it lacks."""

    def __init__(self, folder: Path, base: Path | None):
        self._folder = folder
        self._files = steps_in(folder)
        self._small = small_files(base) if base is not None else {}
        self.numbers = tuple(self._files)
        table: TensorTable | None = None
        before: int | None = None
        for number, path in self._files.items():
            if _is_anchor(path):
                with Checkpoint(path) as anchor:
                    table = table or anchor.table
                    hint = "All anchors of a folder are of one model."
                    refuse_other_table(table, anchor.table, file=str(path), hint=hint)
                    _refuse_other_step(_metadata(path), number, path)
            elif table is None or before != number - 1:
                hint = "Bring the missing file, or move away all deltas up to the next anchor."
                missing = f"there is no step {number - 1}" if table else "there is no anchor before it"
                raise FormatError(f"a delta without its base: {missing}", file=str(path), hint=hint)
            else:
                with FileSource(path) as source, about(file=str(path)):
                    _Delta(open_container(source), table, number)
            before = number

    def play(self, room: Path, aliases: Aliases) -> Iterator[Step]:
        state: Replayed | None = None
        for number, path in self._files.items():
            if _is_anchor(path):
                with Checkpoint(path) as anchor:
                    if state is None:
                        state = Replayed(room, anchor, aliases)
                    else:
                        state.replace(anchor)
                    anchor.refuse_changed()
                _verify(state, _metadata(path), path)
            else:
                assert state is not None
                with FileSource(path) as source, about(file=str(path)):
                    delta = _Delta(open_container(source), state.table, number)
                    for spec in delta.specs:
                        state.overwrite(spec.name, *delta.read(spec))
                    _verify(state, delta.container.metadata, path)
            yield Step(number, f"{path.parent.name}/{path.name}", state, state.files(self._small))


def _metadata(path: Path) -> dict[str, str]:
    with FileSource(path) as source:
        return open_container(source).metadata


def _refuse_other_step(metadata: dict[str, str], number: int, path: Path) -> None:
    stated = metadata.get("model_version")
    if stated is not None and stated != str(number):
        problem = f"the file says that it is step {stated[:20]!r}"
        raise FormatError(problem, file=str(path), hint="It was renamed, or damaged: copy or download it again.")


def _verify(state: Replayed, metadata: dict[str, str], path: Path) -> None:
    """`FormatError` unless the weights have the checksum that the file states, if it states one."""
    stated = metadata.get("checksum_sha256")
    if not stated:
        return
    summed = hashlib.sha256()
    for name in sorted(spec.name for spec in state.table):
        summed.update(state.read(name).view(np.uint8).data)
    if summed.hexdigest() != stated:
        problem = "the weights do not have the checksum that the file states"
        hint = "A file is damaged, or the trainer did not write all that changed (its drafts lose +0 ↔ -0)."
        raise FormatError(problem, file=str(path), hint=hint)


class _Delta:
    """A delta's tensors, each with where its indices and values are; names, dtypes and counts are checked."""

    def __init__(self, container: Container[FileSource], table: TensorTable, number: int):
        self.container = container
        _refuse_other_step(container.metadata, number, Path(container.source.name))
        names = container.entries.keys() - {EMPTY}
        indices, values = next((pair for pair in _SUFFIXES if any(n.endswith(pair[1]) for n in names)), _SUFFIXES[0])
        found = {name.removesuffix(values) for name in names if name.endswith(values)}
        paired = {name + suffix for name in found for suffix in (indices, values)}
        for name in sorted(names ^ paired):
            raise FormatError("indices without values, values without indices, or neither", tensor=name)
        # The first draft names no encoding: it has one.
        self._encoding = container.metadata.get("encoding", "gap_delta") if indices == ".idx" else "raw"
        if self._encoding not in ("raw", "gap_delta"):
            hint = "weightcast reads raw and gap_delta. Write the folder with one of them."
            raise VersionError(f"indices in the encoding {self._encoding[:40]!r}", hint=hint)
        self.specs: list[TensorSpec] = []
        self._parts: dict[str, tuple[Entry, Entry]] = {}
        for name in sorted(found):
            if name not in table:
                raise FormatError("the anchor has no such tensor", tensor=name)
            self.specs.append(table[name])
            self._parts[name] = container.entries[name + indices], container.entries[name + values]
            with about(tensor=name):
                self._check(table[name], *self._parts[name])

    def _check(self, spec: TensorSpec, places: Entry, values: Entry) -> None:
        if values.dtype != spec.dtype or spec.kind.per_value < 8:
            raise FormatError(f"values of {values.dtype} for a tensor of {spec.dtype}")
        known = ("I32",) if self._encoding == "raw" else tuple(GAPS)
        if places.dtype not in known:
            raise FormatError(f"indices of {places.dtype}, expected {' or '.join(known)}")
        if len(places.shape) != 1 or places.shape != values.shape:
            raise FormatError(f"indices of shape {list(places.shape)} for values of shape {list(values.shape)}")

    def read(self, spec: TensorSpec) -> tuple[Indices, Any]:
        """Indices and new bits of a tensor, all within it."""
        places, values = self._parts[spec.name]
        raw = self.container.read(places)
        if self._encoding == "raw":
            indices = raw.view("<i4").astype(np.int64)
        else:
            indices = np.cumsum(raw.view(GAPS[places.dtype]).astype(np.int64) + 1) - 1
        new = self.container.read(values).view(spec.kind.word)
        with about(tensor=spec.name):
            refuse_other_places(spec, indices, new.size)
        return indices, new
