"""Staging: a patch is decoded, verified against its base, and kept as a `plain` patch that needs no base.

A staged patch holds absolute bits. It can be replayed on weights that are half changed, and read on top of weights that
are not changed at all (`Overlay`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from weightcast.disk.durable import Report, replacing, require_space, silent
from weightcast.format.codec import plain
from weightcast.format.codec.coded import BlockDecoder, DecodesBlocks
from weightcast.format.digest import Fingerprint, tensor_digests
from weightcast.format.patch import TensorPatch, refuse_other_tensor, start_of_patch, verify_result, verify_tensor
from weightcast.format.patchfile import PatchReader, PatchWriter, decode_tensors
from weightcast.format.table import Row
from weightcast.format.tensors import Bits, Target, Weights
from weightcast.format.workers import ONE, Workers

IN_MEMORY = 1 << 28
"""Bytes of a staged patch up to which it is collected in memory."""


def fingerprint_of(weights: Weights, workers: Workers = ONE, report: Report = silent) -> Fingerprint:
    """Digest all tensors and report the progress."""
    digests, done, total = [], 0, weights.table.nbytes
    for spec, digest in zip(weights.table, tensor_digests(weights, workers), strict=True):
        digests.append(digest)
        done += spec.nbytes
        report("verify", done, total)
    return Fingerprint(weights.table, tuple(digests))


def decode_verified(
    reader: PatchReader, weights: Weights, start: Fingerprint, workers: Workers, report: Report
) -> Iterator[TensorPatch]:
    """Decode tensor by tensor; each is verified before it is yielded, and the result after the last one."""
    digests = {}
    done, total = 0, sum(row.spec.nbytes for row in reader.rows)
    for tensor in decode_tensors(reader, weights, reader.rows, workers):
        digests[tensor.spec.name] = verify_tensor(start, reader.header.base, tensor)
        yield tensor
        done += tensor.spec.nbytes
        report("decode", done, total)
    verify_result(start.with_digests(digests), reader.header.result)


def stage(
    reader: PatchReader,
    weights: Weights,
    fingerprint: Fingerprint,
    out: Path,
    workers: Workers = ONE,
    report: Report = silent,
) -> Fingerprint:
    """Decode a patch against ``weights``, verify it, and write it to ``out`` as `plain`; returns the new fingerprint.

    ``out`` is durable when this returns, and does not exist if it raises.
    """
    header = reader.header
    start = start_of_patch(fingerprint, header.base, {row.spec.name for row in reader.rows})
    size = sum(_plain_bytes(row) for row in reader.rows)
    spool = out.parent if size > IN_MEMORY else None  # coded streams are collected before they are written
    require_space(out.parent, size if spool is None else 2 * size)
    with PatchWriter("plain", spool) as writer, replacing(out) as file:
        for tensor in decode_verified(reader, weights, start, workers, report):
            if not tensor.changed:  # sent whole by a writer that did not know the old bits
                continue
            whole = weights.read(tensor.spec.name) if _is_dense(tensor) else None
            writer.add(plain.encode_tensor(tensor, whole))
        writer.finish(file, header.base, header.result, header.model)
    return fingerprint_after(start, reader)


def _is_dense(tensor: TensorPatch) -> bool:
    """Indices would take more bytes than the elements that did not change."""
    return 3 * tensor.changed > tensor.spec.elements


def _plain_bytes(row: Row) -> int:
    width = row.spec.kind.width // 8
    return min(row.changed * (8 + width), row.spec.nbytes) + 512


def fingerprint_after(start: Fingerprint, reader: PatchReader) -> Fingerprint:
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
