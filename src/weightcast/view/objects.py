"""What a version changed, tensor by tensor: as little of its objects is read as says so, within bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from weightcast.channel.records import Manifest, ObjectRef
from weightcast.errors import FormatError, MissingError
from weightcast.format.patch_layout import DIGESTS, TABLE
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import BytesSource, Source, open_container
from weightcast.store.base import Store
from weightcast.store.download import summary

WHOLE = 8 << 20
"""Bytes of a version that are fetched whole, so that their SHA-256 is checked, too."""

MOST_OBJECTS = 64
"""Objects of a version; of one with more nothing is read."""

_TABLES = 4 << 20
"""Bytes of the header, the table and the digests of a larger object, each; of one with more nothing is read."""

_FRONT = 16384
"""Bytes fetched first from an object: enough for the header and digests of most."""


class StoreSource:
    """An object of a store, read in ranges: only what is asked for is fetched."""

    def __init__(self, store: Store, ref: ObjectRef):
        self._store, self._key = store, ref.key
        self.name, self.size = f"{store.url}/{ref.key}", ref.size
        self._front = store.get(ref.key, 0, min(_FRONT, ref.size))

    def read_into(self, out: memoryview, at: int) -> None:
        end = at + len(out)
        data = self._front[at:end] if end <= len(self._front) else self._store.get(self._key, at, len(out))
        if len(data) != len(out):
            raise FormatError("the object ends too early", file=self.name, hint="It must be published again.")
        out[:] = data


@dataclass(frozen=True)
class Read:
    """What was read of a version."""

    changed: Mapping[str, int] | None = None
    """Elements by tensor; None if they are not known."""
    unread: str | None = None
    """Why not all was read that could have been."""
    checked: int = 0
    """Objects whose SHA-256 is the manifest's."""
    nbytes: int = 0
    problems: tuple[tuple[str, str], ...] = field(default=())
    """Objects that are not what the manifest says, and why."""


class _TooMuchError(Exception):
    """What would have to be read exceeds the limit."""


def read_patch(store: Store, manifest: Manifest, *, whole_up_to: int = WHOLE, most: int = MOST_OBJECTS) -> Read:
    """Read what a version changed. A damaged or missing object is a problem; a store that does not answer raises."""
    if len(manifest.objects) > most:
        return Read(unread=f"it has more objects than the {most} that are read")
    whole = manifest.nbytes <= whole_up_to
    changed: Counter[str] = Counter()
    problems, checked, nbytes = [], 0, 0
    for ref in manifest.objects:
        try:
            source = _fetched(store, ref) if whole else _Bounded(StoreSource(store, ref))
            for name, count in _counts(source):
                changed[name] += count
        except _TooMuchError:
            return Read(unread="its tables are too large to be read for a picture")
        except (FormatError, MissingError) as error:
            problems.append((ref.key, error.problem))
        else:
            checked += whole
            nbytes += ref.size if whole else source.taken if isinstance(source, _Bounded) else 0
    if problems:
        return Read(None, "an object of it is damaged or missing", checked, nbytes, tuple(problems))
    return Read(changed, None if whole else "it is larger than what is fetched whole", checked, nbytes)


def _counts(source: Source) -> Iterator[tuple[str, int]]:
    entries = open_container(source).entries
    if any(entries[name].end - entries[name].begin > _TABLES for name in (DIGESTS, TABLE) if name in entries):
        raise _TooMuchError
    for row in PatchReader(source).rows:
        yield row.spec.name, row.changed


def _fetched(store: Store, ref: ObjectRef) -> BytesSource:
    data = store.get(ref.key, 0, ref.size + 1)
    if len(data) != ref.size:
        raise FormatError(f"it does not have the {ref.size} bytes that the manifest says", file=ref.key)
    if summary(data)[0] != ref.sha256:
        raise FormatError("its SHA-256 is not the one in the manifest", file=ref.key)
    return BytesSource(data, ref.key)


class _Bounded:
    """A source of which no long range is read."""

    def __init__(self, source: StoreSource):
        self._source = source
        self.name, self.size, self.taken = source.name, source.size, 0

    def read_into(self, out: memoryview, at: int) -> None:
        if len(out) > _TABLES:
            raise _TooMuchError
        self.taken += len(out)
        self._source.read_into(out, at)
