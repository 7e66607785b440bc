"""Patch ↔ safetensors bytes: the table, the streams, and every check on input (SPEC 5)."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from shutil import copyfileobj
from types import MappingProxyType
from typing import IO, Any

import numpy as np

from weightcast.errors import FormatError, UsageError, VersionError, about
from weightcast.format.boxes import Place, place_of, whole
from weightcast.format.closing import Closing
from weightcast.format.codec import CODECS, Coded
from weightcast.format.codec.coded import BlockDecoder, DecodesBlocks, Parts, Prepared
from weightcast.format.coding import Cutting, cut_tensor, place_within
from weightcast.format.cut import Cut
from weightcast.format.json import parse_json
from weightcast.format.patch import ModelSize, Patch, TensorPatch, refuse_other_tensor
from weightcast.format.patch_layout import (
    BLOCKS,
    DIGESTS,
    FORMAT,
    METADATA_KEY,
    TABLE,
    WIDTHS,
    PatchHeader,
    element_dtype,
)
from weightcast.format.patch_outline import PatchOutline
from weightcast.format.safetensors import Container, Entry, Source, open_container
from weightcast.format.table import Row, order_of, unpack_rows
from weightcast.format.tensors import Bits, Weights, read_all, refuse_other_bits
from weightcast.format.workers import ONE, Workers

AT_ONCE = 1 << 24
"""Elements for each thread that are coded in one call: threads wait for each other at its end."""
AT_ONCE_IN_PLACE = 1 << 28
"""Elements in one call of weights that decode for themselves: enough for a GPU, whose room for it is as many bytes."""


# -- write -----------------------------------------------------------------------------------------------------------


class PatchWriter(Closing):
    """Collects coded tensors in table order, in memory or in a folder, then writes the whole file."""

    def __init__(self, codec: str, spool_folder: Path | None = None):
        self._outline = PatchOutline(codec)
        self.codec = self._outline.codec
        with ExitStack() as opening:
            self._spools: dict[int, IO[bytes]] = {
                width: opening.enter_context(_spool(spool_folder)) for width in WIDTHS
            }
            self._close = opening.pop_all().close

    def close(self) -> None:
        self._close()

    def add(self, coded: Coded, place: Place | None = None) -> None:
        """Add the next changed tensor; with a ``place``, what was coded is that box of a tensor."""
        for width, data in self._outline.add(coded, place):
            self._spools[width].write(np.ascontiguousarray(data).data)

    def finish(self, out: IO[bytes], base: str | None, result: str, model: ModelSize) -> int:
        """Write the whole file to ``out``; returns its size."""
        common, layout = self._outline.finish(base, result, model)
        for data in common.values():
            self._spools[data.itemsize].write(np.ascontiguousarray(data).data)
        out.write(layout.head)
        for spool in self._spools.values():
            if isinstance(spool, io.BytesIO):
                out.write(spool.getbuffer())
                continue
            spool.seek(0)
            copyfileobj(spool, out, 1 << 20)
        return layout.nbytes


def _spool(folder: Path | None) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder) if folder else io.BytesIO()


def encode(
    patch: Patch,
    codec: str = "banded",
    old: Weights | None = None,
    workers: Workers = ONE,
    cut: Sequence[Cut] = (),
) -> bytes:
    """A patch as the bytes of one object (SPEC 5).

    ``codec`` is "banded" (smallest), "gap" (fastest) or "plain" (any safetensors reader can read it). "banded" needs
    the base, as ``old``. With a ``cut``, tensors are coded in boxes, each of which can be decoded by itself.

    >>> old, new = (wc.Arrays({"w": np.full(1000, value, np.float32)}) for value in (0, 1))
    >>> patch = wc.diff(old, new)
    >>> wc.decode(wc.encode(patch, old=old), old) == patch
    True
    >>> wc.decode(wc.encode(patch, "plain")) == patch
    True
    """
    cutting = Cutting(tuple(cut))

    def known(tensor: TensorPatch) -> Bits | Parts | None:
        bits, boxes = None if old is None else base_bits(tensor, old), cutting.boxes(tensor.spec)
        if not boxes:
            return bits
        return Parts(tuple((box, None if bits is None else Place(tensor.spec, box).read(bits)) for box in boxes))

    return _encode(patch, codec, known, workers)


def encode_prepared(
    patch: Patch, codec: str, prepared: Mapping[str, Prepared | Parts] | None, workers: Workers
) -> bytes:
    """`encode` for whoever no longer has the base: with what was prepared from it, by the names of tensors."""
    known = prepared or {}
    return _encode(patch, codec, lambda tensor: known.get(tensor.spec.name), workers)


def encode_boxes(
    patch: Patch,
    codec: str,
    places: Mapping[str, Place],
    known: Mapping[str, Bits | Prepared | Parts] | None,
    workers: Workers,
) -> bytes:
    """`encode` for a patch of boxes, each a tensor of its own under the label of its place.

    ``known`` has the old bits of each box, or what was prepared from them, by the same labels.
    """
    labels = known or {}
    return _encode(patch, codec, lambda tensor: labels.get(tensor.spec.name), workers, places)


def _encode(
    patch: Patch,
    codec: str,
    known: Callable[[TensorPatch], Bits | Prepared | Parts | None],
    workers: Workers,
    places: Mapping[str, Place] = MappingProxyType({}),
) -> bytes:
    out = io.BytesIO()
    jobs: list[_Job] = []
    for tensor in patch.tensors:
        jobs += _jobs_of(tensor, places.get(tensor.spec.name), known(tensor))
    if any(place is not None for place, _, _ in jobs):
        jobs.sort(key=_order_of)
    with PatchWriter(codec) as writer:
        for batch in workers.batches(jobs, lambda job: job[1].spec.elements, AT_ONCE):
            encoded = writer.codec.encode([(tensor, old) for _, tensor, old in batch], workers)
            for (place, _, _), coded in zip(batch, encoded, strict=True):
                writer.add(coded, place)
        writer.finish(out, patch.base, patch.result, patch.model)
    return out.getvalue()


_Job = tuple[Place | None, TensorPatch, Bits | Prepared | None]
"""A row of an object: its box, what changes there, and its old bits or what was prepared from them."""


def _jobs_of(tensor: TensorPatch, place: Place | None, known: Bits | Prepared | Parts | None) -> list[_Job]:
    """A tensor, or a box of one, as one row or as one for each of the boxes that it is cut into."""
    if not isinstance(known, Parts):
        return [(place, tensor, known)]
    outer = place or Place(tensor.spec, whole(tensor.spec.shape))
    prepared = dict(known.boxes)
    cut = cut_tensor(tensor, [place_of(tensor.spec, box) for box in prepared])
    if sum(part.changed for _, part in cut) != tensor.changed:
        raise UsageError("the boxes do not cover what changed, each element once", tensor=tensor.spec.name)
    return [(place_within(outer, local.box), part, prepared[local.box]) for local, part in cut]


def _order_of(job: _Job) -> tuple[bytes, tuple[int, ...]]:
    place, tensor, _ = job
    return (tensor.spec.name.encode(), ()) if place is None else order_of(place)


def base_bits(tensor: TensorPatch, old: Weights) -> Bits:
    """The tensor in ``old``; `UsageError` if there is none, or another one."""
    refuse_other_tensor(old.table, tensor.spec)
    bits = old.read(tensor.spec.name)
    refuse_other_bits(tensor.spec, bits)
    return bits


# -- read ------------------------------------------------------------------------------------------------------------


class PatchReader:
    """An open patch: header and table are checked, streams are read when a tensor is decoded."""

    def __init__(self, source: Source):
        self._container = open_container(source)
        self.nbytes = source.size
        with about(file=source.name):
            meta = _meta(self._container)
            self.header = _header(meta)
            self.rows = self._read_rows(meta)
            self._streams = dict(self._place_streams())

    @property
    def name(self) -> str:
        """The file's, for errors."""
        return self._container.source.name

    @property
    def overhead(self) -> int:
        """Bytes outside the coded streams: headers, table and digests."""
        streams = [name for name in self._container.entries if name not in (DIGESTS, TABLE)]
        return self.nbytes - sum(self._entry(name).end - self._entry(name).begin for name in streams)

    def stored(self, row: Row) -> int:
        """Bytes of a tensor's coded streams."""
        return sum(entry.end - entry.begin for entry in self._streams[row.key].values())

    def coded(self, row: Row) -> Coded:
        """Read one tensor's streams, or those of a box as a tensor of its own."""
        streams: dict[str, np.ndarray] = {}
        for stream, entry in self._streams[row.key].items():
            streams[stream] = data = self._container.read(entry)
            if stream == "values":
                streams[stream] = data.view(row.spec.kind.word)
            elif stream == "indices":
                streams[stream] = data.view("<i4" if entry.dtype == "I32" else "<i8")
        return Coded(row.part, streams)

    def tensors(self, old: Weights | None, workers: Workers = ONE) -> Iterator[TensorPatch]:
        """Decode all tensors in order, a few at a time: the next ones while the caller uses those before.

        They are not read if ``old`` can decode for itself. Only for an object without boxes (`joined`).
        """
        decoder = self._decoder_of(old)

        def decoded(batch: Sequence[Row]) -> list[TensorPatch]:
            olds: Sequence[Bits | None] = [None] * len(batch)
            if old is not None and self.header.base is not None:
                for row in batch:
                    refuse_other_tensor(old.table, row.spec)
                if decoder is not None:
                    return self.decode_by(decoder, batch)
                olds = read_all(old, [row.spec.name for row in batch], workers)
            return self.decode(batch, olds, workers)

        each = AT_ONCE if decoder is None else AT_ONCE_IN_PLACE // workers.threads
        batches = workers.batches(self.rows, lambda row: row.spec.elements, each)
        yield from chain.from_iterable(workers.ahead(decoded, batches))

    def _decoder_of(self, old: Weights | None) -> BlockDecoder | None:
        """The decoder of weights that decode for themselves, if they can decode these tensors."""
        if self.header.codec == "plain" or not isinstance(old, DecodesBlocks):
            return None
        return old.block_decoder([row.spec.name for row in self.rows])

    def decode(self, rows: Sequence[Row], olds: Sequence[Bits | None], workers: Workers = ONE) -> list[TensorPatch]:
        """Some tensors' patches, checked against the old tensors' sizes and the table's counts."""
        for row, old in zip(rows, olds, strict=True):
            if old is not None:
                refuse_other_bits(row.part.spec, old)
        codec = CODECS[self.header.codec]
        return self.decode_by(lambda coded: codec.decode(list(zip(coded, olds, strict=True)), workers), rows)

    def decode_by(self, decoder: BlockDecoder, rows: Sequence[Row]) -> list[TensorPatch]:
        """Some tensors' patches as a decoder has them, checked against the table's counts."""
        with about(file=self.name):
            patches = decoder([self.coded(row) for row in rows])
            for row, patch in zip(rows, patches, strict=True):
                self.refuse_other_count(row, patch)
        return patches

    def refuse_other_count(self, row: Row, patch: TensorPatch) -> None:
        """`FormatError` unless the patch changes as many elements as the table says."""
        if patch.changed != row.changed and not self.counts_all(row):
            text = f"the streams change {patch.changed} elements, the table says {row.changed}"
            raise FormatError(text, file=self.name, tensor=row.spec.name)

    def counts_all(self, row: Row) -> bool:
        """Whether a tensor is there whole and counts as changed whole, since its writer did not know the old bits."""
        return row.changed == row.elements and self._streams[row.key].keys() == {"values"}

    def _entry(self, name: str) -> Entry:
        try:
            return self._container.entries[name]
        except KeyError:
            raise FormatError(f"the entry {name} is missing") from None

    def _list(self, name: str, dtype: str = "U8") -> Entry:
        entry = self._entry(name)
        if entry.dtype != dtype or len(entry.shape) != 1:
            raise FormatError(f"the entry {name} is not a list of {dtype}")
        return entry

    def _read_rows(self, meta: dict[str, Any]) -> tuple[Row, ...]:
        digests = self._container.read(self._list(DIGESTS, "U64")).view("<u8").tolist()
        table = self._container.read(self._list(TABLE)).tobytes()
        blocks = None if self.header.codec == "plain" else self._list(BLOCKS).shape[0]
        return unpack_rows(table, meta["table"], digests, blocks)

    def _place_streams(self) -> Iterator[tuple[tuple[str, tuple[int, ...]], dict[str, Entry]]]:
        """Which bytes belong to which tensor; every entry must belong to one."""
        known = {DIGESTS, TABLE}
        if self.header.codec == "plain":
            for row in self.rows:
                label = row.place.label
                streams = {"values": self._entry(f"{label}.values")}
                indices = self._container.entries.get(f"{label}.indices")
                if indices is not None:
                    streams["indices"] = indices
                if not known.isdisjoint(named := {entry.name for entry in streams.values()}):
                    raise FormatError("two rows have the same entry", tensor=label)
                known |= named
                _check_plain(row.part, streams, whole=self.header.base is None)
                yield row.key, streams
        else:
            blocks = self._list(BLOCKS)
            known.add(BLOCKS)
            at = blocks.begin
            for row in self.rows:
                size = sum(length for _, length in row.blocks)
                yield row.key, {"blocks": Entry(BLOCKS, "U8", (size,), at, at + size)}
                at += size
            if at != blocks.end:
                raise FormatError(f"the table lists {at - blocks.begin} bytes of blocks, there are {blocks.shape[0]}")
        strangers = self._container.entries.keys() - known
        if strangers:
            raise FormatError("an entry does not belong to any tensor of the table", tensor=min(strangers))


def _meta(container: Container[Source]) -> dict[str, Any]:
    if METADATA_KEY not in container.metadata:
        raise FormatError("not a weightcast patch: it has none of our metadata", hint="Is it a checkpoint?")
    meta = parse_json(container.metadata[METADATA_KEY].encode(), "metadata")
    if not isinstance(meta, dict) or type(meta.get("format")) is not int:
        raise FormatError("the metadata has no format version")
    if meta["format"] != FORMAT:
        raise VersionError(
            f"unknown format version {meta['format']}", hint=f"This release reads {FORMAT}. Install a newer release."
        )
    if container.metadata.keys() != {METADATA_KEY}:
        raise FormatError("there is other metadata than weightcast's")
    if meta.keys() != {"base", "codec", "format", "model", "result", "table"}:
        raise FormatError("the metadata does not have exactly the fields of the format")
    return meta


def _header(meta: dict[str, Any]) -> PatchHeader:
    base, result, model = meta["base"], meta["result"], meta["model"]
    if not (base is None or _is_digest(base)) or not _is_digest(result):
        raise FormatError("base or result is not a digest")
    if not isinstance(model, list) or len(model) != 3 or any(type(n) is not int or not 0 <= n < 1 << 63 for n in model):
        raise FormatError("impossible model size")
    codec = meta["codec"]
    if not isinstance(codec, str) or type(meta["table"]) is not int:
        raise FormatError("impossible codec or table size")
    if codec not in CODECS:
        hint = f"This release reads {', '.join(CODECS)}. Install a newer release."
        raise VersionError(f"unknown codec {codec!r}", hint=hint)
    if base is None and codec != "plain":
        raise FormatError(f"a patch without a base cannot be coded with {codec}")
    return PatchHeader(codec, base, result, ModelSize(*model))


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _check_plain(row: Row, streams: dict[str, Entry], whole: bool) -> None:
    spec, values = row.spec, streams["values"]
    if whole and row.changed != spec.elements:
        raise FormatError("a patch without a base does not change all of a tensor", tensor=spec.name)
    if "indices" not in streams:
        good = (values.dtype, values.shape) == (spec.dtype, spec.shape)
    else:
        indices = streams["indices"]
        good = not whole and indices.dtype in ("I32", "I64") and values.dtype == element_dtype(spec)
        good = good and indices.shape == values.shape == (row.changed,)
    if not good:
        raise FormatError("indices and values do not fit the tensor", tensor=spec.name)
