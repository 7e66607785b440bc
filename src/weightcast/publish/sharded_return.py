"""A sharded training that goes on from an older version: what leads from there to the head, box by box.

A rank holds the old version's bits of its boxes, so it can decode the objects that it uploaded then, and find what the
head has there. No rank reads what others hold. Whether all ranks together found the head is for its digest to say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from weightcast.channel.chain import Chain
from weightcast.channel.records import Manifest, ObjectRef
from weightcast.disk.durable import scratch
from weightcast.errors import FormatError, MismatchError, MissingError
from weightcast.format.boxes import Box, Place
from weightcast.format.diff import diff_tensors
from weightcast.format.kernels import cpu
from weightcast.format.patch import TensorPatch
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import ReopenedSource
from weightcast.format.table import Row
from weightcast.format.tensors import Bits
from weightcast.format.workers import Workers
from weightcast.publish.sharded_anchor import LocalBoxes
from weightcast.store.download import fetch

MOST_VERSIONS = 512
"""Between the two: each is a request and an object."""

MOST_SEARCHED = 64
"""Objects of a version that a rank fetches if it cannot tell which of them are its own."""

Part = tuple[PatchReader, Row]


class OtherBoxesError(Exception):
    """The objects on the way were coded in boxes that this rank does not hold whole, or are not there any more."""


def changes_since(
    chain: Chain, version: int, head: Manifest, local: LocalBoxes, rank: int, size: int, workers: Workers
) -> tuple[TensorPatch, ...]:
    """What the head has in this rank's boxes, which are at an older version: their patches, without digests.

    `OtherBoxesError` if that cannot be found. One tensor is in memory at a time.
    """
    with scratch() as folder, _bad_objects():
        steps = [
            _parts(chain, _objects_of(chain, number, rank, size), local.places, folder)
            for number in range(version + 1, head.position.version + 1)
        ]
        found = (_changes_of(name, place, local, steps, workers) for name, place in local.places.items())
        return tuple(one for one in found if one.changed)


@contextmanager
def _bad_objects() -> Iterator[None]:
    try:
        yield
    except (FormatError, MismatchError, MissingError) as error:
        raise OtherBoxesError(str(error)) from error


def _objects_of(chain: Chain, version: int, rank: int, size: int) -> Sequence[ObjectRef]:
    """The objects of a version that this rank may have uploaded: they are in order of the ranks."""
    manifest = chain.manifest(version)
    if manifest.base is None or manifest.base.version != version - 1:
        raise OtherBoxesError(f"version {version} is an anchor")
    objects = manifest.objects
    if len(objects) % size == 0:
        each = len(objects) // size
        return objects[rank * each : (rank + 1) * each]
    if len(objects) > MOST_SEARCHED:
        raise OtherBoxesError(f"version {version} has {len(objects)} objects of other ranks")
    return objects


def _parts(
    chain: Chain, objects: Sequence[ObjectRef], places: Mapping[str, Place], folder: Path
) -> Mapping[str, list[Part]]:
    """The rows of objects that are in this rank's boxes, by the names of these."""
    mine: dict[str, list[tuple[str, Box]]] = defaultdict(list)
    for name, place in places.items():
        mine[place.spec.name].append((name, place.box))
    found: dict[str, list[Part]] = defaultdict(list)
    for ref in objects:
        path = folder / ref.sha256
        if not path.exists():
            fetch(chain.store, ref.key, ref.size, ref.sha256, path, durable=False)
        reader = PatchReader(ReopenedSource(path))
        for row in reader.rows:
            for name, box in mine.get(row.spec.name, ()):
                if row.place.box.meets(box):
                    _refuse_overlap(row, places[name])
                    found[name].append((reader, row))
    return found


def _refuse_overlap(row: Row, place: Place) -> None:
    inner, outer = row.place.box.ranges, place.box.ranges
    inside = all(
        a.start >= b.start and a.start + a.count <= b.start + b.count for a, b in zip(inner, outer, strict=True)
    )
    if row.spec != place.spec or not inside:
        raise OtherBoxesError(f"a part of {row.place.label} is on another rank")


def _changes_of(
    name: str, place: Place, local: LocalBoxes, steps: Sequence[Mapping[str, list[Part]]], workers: Workers
) -> TensorPatch:
    """Bring a copy of a box to the head, and compare it with the box."""
    before = local.read(name)
    bits = before.copy()
    for parts in (step.get(name, ()) for step in steps):
        for reader, row in parts:
            _advance(bits, place, reader, row, workers)
    (patch,) = diff_tensors([local.table[name]], [before], [bits], [0], workers)
    return patch


def _advance(bits: Bits, place: Place, reader: PatchReader, row: Row, workers: Workers) -> None:
    """Decode what one row changes in a box, and write it there."""
    offset = [inner - outer for inner, outer in zip(row.place.box.offset, place.box.offset, strict=True)]
    within = Place(place.part, Box.of(offset, row.place.box.shape))
    (patch,) = reader.decode([row], [within.read(bits)], workers)
    cpu.scatter(bits, within.flat(patch.indices), patch.new)
