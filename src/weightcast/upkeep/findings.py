"""What can be wrong with the objects of a channel: checks of records against listings, without reading any weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from weightcast.channel.chain import Chain
from weightcast.channel.edge import Edge
from weightcast.channel.keys import manifest_key
from weightcast.channel.records import Manifest, ObjectRef
from weightcast.errors import FormatError, StoreError, TrustError, UnreachableError


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with an object."""

    key: str
    problem: str

    @classmethod
    def of(cls, key: str, error: Exception) -> Finding:
        """The error of reading an object."""
        return cls(key, str(error) or type(error).__name__)

    def __str__(self) -> str:
        return f"{self.key}: {self.problem}"


def check_manifest(manifest: Manifest, sizes: Mapping[str, int]) -> Iterator[Finding]:
    """Whether the objects that a manifest commits are there; ``sizes`` are those of a listing."""
    return _check_objects(manifest.objects, sizes, manifest_key(manifest.position.version))


def check_anchor(
    chain: Chain, edge: Edge, sizes: Mapping[str, int], manifest: Manifest | None = None
) -> Iterator[Finding]:
    """Whether an anchor has a record, which ``manifest`` commits if it names it, and all files of it are there."""
    try:
        anchor = chain.anchor(edge.record, manifest)
    except UnreachableError:
        raise
    except (FormatError, StoreError, TrustError) as error:
        yield Finding(edge.record, error.problem)
        return
    yield from _check_objects(anchor.files, sizes, edge.record)


def _check_objects(refs: Iterable[ObjectRef], sizes: Mapping[str, int], record: str) -> Iterator[Finding]:
    for ref in refs:
        if ref.key not in sizes:
            yield Finding(ref.key, f"it is missing, and {record} names it")
        elif sizes[ref.key] != ref.size:
            yield Finding(ref.key, f"it has {sizes[ref.key]} bytes, {record} says {ref.size}")
