"""Staging: a patch is decoded, verified against its base, and kept as a `plain` patch that needs no base.

A staged patch holds absolute bits. It can be replayed on weights that are half changed, and read on top of weights that
are not changed at all (`Overlay`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from weightcast.disk.durable import Enter, Report, replacing, require_space, silent, untimed
from weightcast.format.codec import plain
from weightcast.format.codec.coded import BlockDecoder, DecodesBlocks
from weightcast.format.digest import Fingerprint, tensor_digests
from weightcast.format.joined import JoinedPatch
from weightcast.format.patch import TensorPatch, refuse_other_tensor, start_of_patch, verify_result, verify_tensor
from weightcast.format.patch_layout import common_stream, common_streams, lay_out, plain_streams
from weightcast.format.patchfile import PatchReader
from weightcast.format.table import Row
from weightcast.format.tensors import Bits, Target, Weights
from weightcast.format.workers import ONE, Workers


def fingerprint_of(weights: Weights, workers: Workers = ONE, report: Report = silent) -> Fingerprint:
    """Digest all tensors and report the progress."""
    digests, done, total = [], 0, weights.table.nbytes
    for spec, digest in zip(weights.table, tensor_digests(weights, workers), strict=True):
        digests.append(digest)
        done += spec.nbytes
        report("verify", done, total)
    return Fingerprint(weights.table, tuple(digests))


def decode_verified(
    reader: PatchReader | JoinedPatch,
    weights: Weights,
    start: Fingerprint,
    workers: Workers,
    report: Report,
    enter: Enter = untimed,
) -> Iterator[TensorPatch]:
    """Decode tensor by tensor; each is verified before it is yielded, and the result after the last one.

    What the caller does with them is the phase ``stage``.
    """
    digests = {}
    done, total = 0, sum(row.spec.nbytes for row in reader.rows)
    enter("decode")
    for tensor in reader.tensors(weights, workers):
        enter("verify")
        digests[tensor.spec.name] = verify_tensor(start, reader.header.base, tensor)
        enter("stage")
        yield tensor
        done += tensor.spec.nbytes
        report("decode", done, total)
        enter("decode")
    enter("verify")
    verify_result(start.with_digests(digests), reader.header.result)
    enter("stage")


def stage(
    reader: PatchReader | JoinedPatch,
    weights: Weights,
    fingerprint: Fingerprint,
    out: Path,
    workers: Workers = ONE,
    report: Report = silent,
    enter: Enter = untimed,
) -> Fingerprint:
    """Decode a patch against ``weights``, verify it, and write it to ``out`` as `plain`; returns the new fingerprint.

    ``out`` is durable when this returns, and does not exist if it raises.
    """
    start = start_of_patch(fingerprint, reader.header.base, {row.spec.name for row in reader.rows})
    for row in reader.rows:  # before their sizes are believed: a full disk is not the object's fault
        refuse_other_tensor(start.table, row.spec)
    with replacing(out) as file:
        staged = _StagedFile(file.fileno(), reader)
        require_space(out.parent, staged.nbytes)
        staged.begin()
        patches = decode_verified(reader, weights, start, workers, report, enter)
        for _ in workers.stream(lambda tensor: staged.write(tensor, weights), patches, lambda tensor: tensor.changed):
            pass
    return fingerprint_after(start, reader)


class _StagedFile:
    """A patch as `plain`. Its counts are known before its bits, so any thread can write any tensor to its place."""

    def __init__(self, fd: int, patch: PatchReader | JoinedPatch):
        self._fd = fd
        rows = [Row(row.spec, row.changed, row.digest) for row in patch.rows]
        self._common, table_bytes = common_streams(rows)
        self._streams = {row.spec.name: dict(plain_streams(row)) for row in rows}
        streams = [stream for streams in self._streams.values() for stream in streams.values()]
        streams += [common_stream(name, data) for name, data in self._common.items()]
        self._layout = lay_out(replace(patch.header, codec="plain"), table_bytes, streams)

    @property
    def nbytes(self) -> int:
        return self._layout.nbytes

    def begin(self) -> None:
        """Write what does not belong to a tensor."""
        _write_at(self._fd, self._layout.head, 0)
        for name, data in self._common.items():
            self._put(name, data)

    def write(self, tensor: TensorPatch, weights: Weights) -> None:
        """Write a tensor; ``weights`` are those before the patch."""
        streams = self._streams[tensor.spec.name]
        if "indices" in streams:
            self._put(streams["indices"].name, tensor.indices.astype(plain.index_of(tensor.spec)))
            self._put(streams["values"].name, tensor.new)
        else:
            self._put(streams["values"].name, plain.patched(tensor, weights.read(tensor.spec.name)))

    def _put(self, stream: str, data: np.ndarray) -> None:
        entry = self._layout.entries[stream]
        assert data.nbytes == entry.end - entry.begin
        _write_at(self._fd, np.ascontiguousarray(data).view(np.uint8).data, len(self._layout.head) + entry.begin)


def _write_at(fd: int, left: bytes | memoryview, at: int) -> None:
    while left:
        written = os.pwrite(fd, left, at)
        left, at = left[written:], at + written


def fingerprint_after(start: Fingerprint, reader: PatchReader | JoinedPatch) -> Fingerprint:
    """The fingerprint that a patch, verified before, leads to from ``start``, by the digests in its table."""
    for row in reader.rows:
        refuse_other_tensor(start.table, row.spec)
    return start.with_digests({row.spec.name: row.digest for row in reader.rows})


class Overlay:
    """Weights with some staged patches applied as they are read; the weights themselves do not change.

    ``fresh`` says that ``under`` returns new memory from each read, as a `Checkpoint` does: it need not be copied.
    """

    def __init__(self, under: Weights, layers: Sequence[PatchReader], *, fresh: bool = False):
        self.table = under.table
        self._under = under
        self._fresh = fresh
        self._layers = [(layer, {row.spec.name: row for row in layer.rows}) for layer in layers]

    def read(self, name: str) -> Bits:
        touching = [(layer, rows[name]) for layer, rows in self._layers if name in rows]
        bits = self._under.read(name)
        if touching and not self._fresh:
            bits = bits.copy()
        for layer, row in touching:
            bits = overlay_tensor(layer, row, bits)
        return bits

    def block_decoder(self, names: Sequence[str]) -> BlockDecoder | None:
        """That of the weights themselves, as long as nothing lies on them."""
        if self._layers or not isinstance(self._under, DecodesBlocks):
            return None
        return self._under.block_decoder(names)


def scatter_into(target: Target, staged: PatchReader) -> None:
    """Write a staged patch into a target."""
    for row in staged.rows:
        coded = staged.coded(row)
        if "indices" in coded.streams:
            patch = plain.decode_tensor(coded, None)
            target.overwrite(row.spec.name, patch.indices, patch.new)
        else:
            target.write(row.spec.name, coded.streams["values"])


def overlay_tensor(staged: PatchReader, row: Row, bits: Bits) -> Bits:
    """A tensor with its staged overwrites: written into ``bits``, or in new memory if it is stored whole."""
    coded = staged.coded(row)
    if "indices" not in coded.streams:
        whole: Bits = coded.streams["values"]
        return whole
    plain.scatter(coded, bits)
    return bits
