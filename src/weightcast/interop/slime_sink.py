"""Writing slime's folders (`slime_format` has the layout)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from weightcast.disk.checkpoint import INDEX, SINGLE
from weightcast.disk.durable import discard, disk_errors, sync, sync_folder
from weightcast.follow.mirror import Mirror
from weightcast.format.safetensors import Entry, header_bytes
from weightcast.format.tensors import Bits
from weightcast.interop.replayed import Replayed
from weightcast.interop.slime_format import Checksum, Encoding, library, new_hash, packed
from weightcast.interop.step import small_files


class SlimeSink:
    """Writes a whole checkpoint, then deltas. The engines of slime start with the former: it is their version 0."""

    def __init__(self, folder: Path, room: Path, encoding: Encoding = "xor", checksum: Checksum = "xxh3-128"):
        library()
        new_hash(checksum)
        self._folder, self._room = folder, room
        self._encoding, self._checksum = encoding, checksum
        self._before: Replayed | None = None

    def write(self, number: int, version: Mirror) -> str:
        out = self._folder / f"weight_v{number:06d}"
        partial_ = self._folder / f".{out.name}.partial"
        weights = version.weights
        assert weights is not None
        with disk_errors(self._folder):
            discard(partial_)
            partial_.mkdir()
            if self._before is None:
                self._before = Replayed(self._room, weights)
                for name, path in {**small_files(version.folder), SINGLE: self._before.path}.items():
                    shutil.copyfile(path, partial_ / name)
            else:
                self._write_delta(partial_, number, self._before, weights.read)
            for path in partial_.iterdir():
                sync(path)
            sync_folder(partial_)
            partial_.rename(out)
            sync_folder(self._folder)
        return out.name

    def _write_delta(self, folder: Path, number: int, before: Replayed, read: Callable[[str], Bits]) -> None:
        file, entries, checksums, at = "model-00000-of-00001.safetensors", [], {}, 0
        spool = folder / "spool"
        with spool.open("xb") as data:
            for spec in before.table:
                old, new = before.read(spec.name).view(np.uint8), read(spec.name).view(np.uint8)
                delta = packed(old, new, self._encoding)
                if delta is None:
                    continue
                hashed = new_hash(self._checksum)
                hashed.update(new.data)
                checksums[spec.name] = hashed.hexdigest()
                entries.append(Entry(spec.name, "U8", (len(delta),), at, at + len(delta)))
                at += len(delta)
                data.write(delta)
                before.write(spec.name, new.view(spec.kind.word))
        if entries:
            with (folder / file).open("xb") as out, spool.open("rb") as data:
                out.write(header_bytes(entries, checksums))
                shutil.copyfileobj(data, out)
        spool.unlink()
        metadata = {
            "version": f"{number:06d}",
            "base_version": f"{number - 1:06d}",
            "delta_encoding": self._encoding,
            "compression_format": "zstd",
            "checksum_format": self._checksum,
        }
        index = {"metadata": metadata, "weight_map": {entry.name: file for entry in entries}}
        (folder / INDEX).write_text(json.dumps(index))
