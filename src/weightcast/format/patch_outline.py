"""What a patch file consists of, without its streams: its rows, its layout, and so its size."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from weightcast.errors import UsageError
from weightcast.format.boxes import Place
from weightcast.format.codec import CODECS, Coded, check_codec
from weightcast.format.patch import ModelSize
from weightcast.format.patch_layout import (
    BLOCKS,
    Common,
    Layout,
    PatchHeader,
    Stream,
    common_stream,
    common_streams,
    lay_out,
    plain_stream,
)
from weightcast.format.table import Row


class PatchOutline:
    """Collects what coded tensors, in the order of the table, take in a file. It keeps none of their streams."""

    def __init__(self, codec: str):
        self.codec = CODECS[check_codec(codec)]
        self._rows: list[Row] = []
        self._streams: list[Stream] = []
        self._blocks = 0

    def add(self, coded: Coded, place: Place | None = None) -> list[tuple[int, npt.NDArray[Any]]]:
        """Add the next changed tensor, or a box of one; the streams to write, each with the width of its words."""
        row = coded.row
        if place is not None:
            box = None if place.is_whole else place.box
            row = Row(place.spec, row.changed, row.digest, row.blocks, box)
        self._rows.append(row)
        written = []
        for name, data in coded.streams.items():
            if name == "blocks":
                self._blocks += data.nbytes
                written.append((1, data))
            else:
                listed = "indices" in coded.streams
                self._streams.append(plain_stream(row.place.part, name, data.size, listed=listed))
                written.append((self._streams[-1].width, data))
        return written

    def finish(self, base: str | None, result: str, model: ModelSize) -> tuple[Common, Layout]:
        """The streams that belong to no tensor, to write after all others, and the layout of the file."""
        if base is None and self.codec.name != "plain":
            raise UsageError(f"a patch without a base cannot be coded with {self.codec.name}", hint='Use "plain".')
        streams = list(self._streams)
        if self.codec.name != "plain":
            streams.append(Stream(BLOCKS, "U8", (self._blocks,), 1, self._blocks))
        common, table_bytes = common_streams(self._rows)
        streams += [common_stream(name, data) for name, data in common.items()]
        return common, lay_out(PatchHeader(self.codec.name, base, result, model), table_bytes, streams)
