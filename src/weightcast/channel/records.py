"""The small JSON objects of a channel, and every check when one is read (SPEC 11)."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar

from weightcast.channel.keys import (
    CHANNEL_COPY,
    MAX_VERSION,
    RECORD,
    AnchorFile,
    Position,
    is_channel_id,
    is_label,
    is_plain_file,
    read_anchor_key,
    read_delta_key,
)
from weightcast.channel.signing import is_key_id, is_signature
from weightcast.disk.companions import wanted
from weightcast.errors import FormatError, UsageError, VersionError
from weightcast.format.cut import MAX_CUTS, MAX_PARTS, MAX_PATTERN, Cut
from weightcast.format.json import parse_json
from weightcast.format.spec import MAX_ELEMENTS, MAX_RANK, TensorSpec, TensorTable

FORMAT = 1
MAX_JSON = 1 << 26
"""Bytes of any JSON object of a channel."""
MAX_PHASES = 32
"""Phases of an update in a heartbeat."""

T = TypeVar("T")


@dataclass(frozen=True)
class ObjectRef:
    """An immutable object: its key, size and SHA-256."""

    key: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Channel:
    """What never changes about a channel; ``fence`` says how a version is committed (SPEC 11.4)."""

    nonce: str
    """Random: two channels of one model are two channels."""
    table: TensorTable
    fence: str = "create"
    signer: str | None = None
    signature: str | None = None

    @cached_property
    def id(self) -> str:
        """A digest of all but the signature. Each manifest and anchor carries it, and so covers this record."""
        return hashlib.sha256(to_json("channel", _channel_fields(self))).hexdigest()[:32]


@dataclass(frozen=True)
class Manifest:
    """The commit record of one version. Without a base it commits an anchor."""

    channel: str
    position: Position
    base: Position | None
    objects: tuple[ObjectRef, ...]
    """The patch, in one or several objects; or the record of the anchor."""
    codec: str | None
    changed: int
    step: int | None
    time: float
    """By the writer's clock; for people."""
    writer: str
    label: str | None = None
    """One line for people, from the publisher."""
    keyring: int = 0
    """The newest key list that the writer knew, where it signs."""
    previous: str | None = None
    """The SHA-256 of the manifest of the version before, where it signs."""
    signer: str | None = None
    signature: str | None = None

    @property
    def unsigned(self) -> Manifest:
        """What the writer wanted to commit, before it was signed."""
        return replace(self, keyring=0, previous=None, signer=None, signature=None)

    @property
    def nbytes(self) -> int:
        return sum(ref.size for ref in self.objects)

    @property
    def key(self) -> str:
        """The key of the delta or of the anchor's record; for a delta of several objects, that of their folder."""
        first = self.objects[0].key
        place = read_delta_key(first)
        return place.delta if place else first


@dataclass(frozen=True)
class Tag:
    """A name for a version. It keeps the version from being collected."""

    channel: str
    name: str
    position: Position
    time: float
    """When it was set, by the setter's clock; for people."""


@dataclass(frozen=True)
class Reference:
    """A public checkpoint that replicas get elsewhere."""

    repository: str
    revision: str


@dataclass(frozen=True)
class Anchor:
    """A whole checkpoint in the bucket, file by file, or a reference to one elsewhere."""

    channel: str
    position: Position
    files: tuple[ObjectRef, ...]
    reference: Reference | None = None
    pins: tuple[ObjectRef, ...] = ()
    """Of a reference that is signed: the names, sizes and SHA-256s of its files."""
    boxes: bool = False
    """Whether the weights are patches of boxes, as ranks of a sharded training wrote them, not yet a checkpoint."""
    signer: str | None = None
    signature: str | None = None

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Heartbeat:
    """The state of a replica, as it reports it."""

    replica: str
    position: Position
    time: float
    error: str | None = None
    pause: float | None = None
    """Seconds that its engine was paused for the last update; None if it is not an engine."""
    instance: str = "0" * 32
    """Random, one per process: distinguishes two processes that report under one name."""
    ran: int | None = None
    """The newest version for which the replica's command succeeded; None where it runs none."""
    cuts: tuple[Cut, ...] = ()
    """The parts that the workers of its engine hold of tensors."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """What its last update took, by phase."""
    signer: str | None = None
    signature: str | None = None


@dataclass(frozen=True)
class Lease:
    """Who writes; advisory."""

    writer: str
    host: str
    pid: int
    time: float


def to_json(kind: str, fields: Mapping[str, Any]) -> bytes:
    """Canonical: sorted keys, no white space, so that equal records are equal bytes. Dataclasses become lists."""
    record = {"format": FORMAT, "kind": kind, **fields}
    return json.dumps(record, separators=(",", ":"), sort_keys=True, ensure_ascii=True, default=_values).encode()


_FIELDS_OF: dict[type, Callable[[Any], Any]] = {
    kind: attrgetter(*(field.name for field in dataclass_fields(kind)))
    for kind in (Position, ObjectRef, Reference, Cut)
}


def _values(record: Any) -> Any:
    """The fields of a small dataclass."""
    return _FIELDS_OF[type(record)](record)


def _rows(value: Any) -> Any:
    """A tuple of small dataclasses as lists: to call back for each of hundreds takes the encoder twice as long."""
    return [_values(one) for one in value] if isinstance(value, tuple) else value


def from_json(
    data: bytes, kind: str, keys: Set[str], build: Callable[[dict[str, Any]], T], optional: Set[str] = frozenset()
) -> T:
    """Parse what a bucket holds; `FormatError` for anything the format does not say, `VersionError` if it is newer."""
    fields = parse_json(data, kind)
    if not isinstance(fields, dict) or fields.get("kind") != kind or type(fields.get("format")) is not int:
        raise FormatError(f"this is not a weightcast {kind}")
    if fields["format"] != FORMAT:
        raise VersionError(
            f"the {kind} is of format version {fields['format']}",
            hint=f"This release reads {FORMAT}; install a newer one.",
        )
    if fields.keys() - optional != keys | {"format", "kind"}:
        raise FormatError(f"the {kind} does not have the fields of the format")
    return build(fields)


Record = Manifest | Tag | Anchor | Heartbeat | Lease
"""Records whose JSON has the fields of the class."""

R = TypeVar("R", Manifest, Tag, Anchor, Heartbeat, Lease)

_OPTIONAL = {"label", "boxes", "cuts", "pins", "seconds", "keyring", "previous", "signer", "signature"}
"""Fields that are left out where there is nothing to say."""

_DECIMALS = {"pause": 6, "time": 3}


def dump_record(record: Record) -> bytes:
    fields = {name: _rows(value) for name, value in vars(record).items() if value or name not in _OPTIONAL}
    for name, decimals in _DECIMALS.items():
        if fields.get(name) is not None:
            fields[name] = round(fields[name], decimals)
    if fields.get("seconds"):
        fields["seconds"] = {phase: round(seconds, 6) for phase, seconds in fields["seconds"].items()}
    return to_json(type(record).__name__.lower(), fields)


def load_record(kind: type[R], data: bytes) -> R:
    """The record; `FormatError` if a field of it is impossible, or two do not belong together."""
    readers = _FIELDS[kind]

    def build(fields: dict[str, Any]) -> R:
        return kind(**{name: read(fields[name]) for name, read in readers.items() if name in fields})

    optional = readers.keys() & _OPTIONAL
    record = from_json(data, kind.__name__.lower(), readers.keys() - optional, build, optional)
    if isinstance(record, Manifest):
        _check_manifest(record)
    elif isinstance(record, Anchor):
        _check_anchor(record)
    return record


# -- values ------------------------------------------------------------------------------------------------------------

_END_OF_TIME = 253_402_300_800
"""The year 10000: calendars end there."""

Read = Callable[[Any], Any]


def _expect(good: bool, what: str) -> None:
    if not good:
        raise FormatError(f"{what} is impossible")


def _value(what: str, is_good: Callable[[Any], bool]) -> Read:
    """Reads a value that must be good."""

    def read(value: Any) -> Any:
        _expect(is_good(value), what)
        return value

    return read


def _optional(read: Read) -> Read:
    return lambda value: None if value is None else read(value)


def _text(what: str, limit: int = 1000) -> Read:
    return _value(what, lambda value: isinstance(value, str) and 0 < len(value) <= limit and value.isprintable())


def _natural(what: str, limit: int = 1 << 63) -> Read:
    return _value(what, lambda value: type(value) is int and 0 <= value < limit)


def _hex(what: str) -> Read:
    return _value(what, lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None)


def _id(what: str) -> Read:
    return _value(what, lambda value: isinstance(value, str) and is_channel_id(value))


def _list(what: str, *reads: Read) -> Callable[[Any], list[Any]]:
    """Reads a list of this many values."""

    def read(value: Any) -> list[Any]:
        _expect(isinstance(value, list) and len(value) == len(reads), what)
        return [read(one) for read, one in zip(reads, value, strict=True)]

    return read


_signature: dict[str, Read] = {
    "signer": _value("the id of a key", lambda value: isinstance(value, str) and is_key_id(value)),
    "signature": _value("a signature", lambda value: isinstance(value, str) and is_signature(value)),
}


def _time(value: Any) -> float:
    _expect(type(value) in (int, float) and 0 <= value < _END_OF_TIME, "a time")
    return float(value)


_version = _natural("a version", MAX_VERSION + 1)
_position = _list("a position", _version, _hex("a digest"))
_object = _list("an object", _text("an object's name"), _natural("a size"), _hex("a SHA-256"))
_reference = _list("a reference", _text("a reference"), _text("a reference"))


def position_json(position: Position | None) -> list[Any] | None:
    return [position.version, position.digest] if position else None


def position_from_json(value: Any) -> Position:
    return Position(*_position(value))


def _files(value: Any) -> tuple[ObjectRef, ...]:
    _expect(isinstance(value, list) and len(value) <= 1 << 16, "a list of files")
    return tuple(ObjectRef(*_object(file)) for file in value)


_parts = _value("a number of parts", lambda value: type(value) is int and 1 <= value <= MAX_PARTS)
_cut = _list("a cut", _text("the name of a tensor", MAX_PATTERN), _natural("a dimension", MAX_RANK), _parts)


def _cuts(value: Any) -> tuple[Cut, ...]:
    _expect(isinstance(value, list) and 0 < len(value) <= MAX_CUTS, "a list of cuts")
    return tuple(Cut(*_cut(one)) for one in value)


def _phases(value: Any) -> dict[str, float]:
    is_good = isinstance(value, dict) and 0 < len(value) <= MAX_PHASES
    _expect(is_good and all(re.fullmatch("[a-z]{1,20}", phase) for phase in value), "a list of phases")
    return {phase: _time(seconds) for phase, seconds in value.items()}


_FIELDS: dict[type[Record], dict[str, Read]] = {
    Manifest: {
        "channel": _id("a channel's id"),
        "position": position_from_json,
        "base": _optional(position_from_json),
        "objects": _files,
        "codec": _optional(_text("a codec", 20)),
        "changed": _natural("a count"),
        "step": _optional(_natural("a step")),
        "time": _time,
        "writer": _text("a writer's name", 100),
        "label": _value("a label", lambda value: isinstance(value, str) and is_label(value)),
        "keyring": _natural("the number of a key list", MAX_VERSION + 1),
        "previous": _hex("a SHA-256"),
        **_signature,
    },
    Tag: {
        "channel": _id("a channel's id"),
        "name": _text("a tag's name", 100),
        "position": position_from_json,
        "time": _time,
    },
    Anchor: {
        "channel": _id("a channel's id"),
        "position": position_from_json,
        "files": _files,
        "reference": _optional(lambda value: Reference(*_reference(value))),
        "pins": _files,
        "boxes": _value("a kind of anchor", lambda value: value is True),
        **_signature,
    },
    Heartbeat: {
        "replica": _text("a replica's name", 100),
        "position": position_from_json,
        "time": _time,
        "error": _optional(_text("an error", 2000)),
        "pause": _optional(_time),
        "instance": _id("an instance"),
        "ran": _optional(_version),
        "cuts": _cuts,
        "seconds": _phases,
        **_signature,
    },
    Lease: {
        "writer": _text("a writer's name", 100),
        "host": _text("a host's name"),
        "pid": _natural("a process id"),
        "time": _time,
    },
}


def _check_manifest(manifest: Manifest) -> None:
    position, base = manifest.position, manifest.base
    keys = [ref.key for ref in manifest.objects]
    _expect(0 < len(keys) == len(set(keys)), "a list of objects")
    _expect((manifest.codec is None) == (base is None), "a codec")
    if base is not None:
        _expect(base.version == position.version - 1, "the base of a version")
        places = [read_delta_key(key) for key in keys]
        _expect(all(place == places[0] for place in places), "a list of objects")
        place = places[0]
        is_there = place is not None and (place.version, place.digest) == (position.version, position.digest[:16])
        _expect(is_there, "the name of a delta")
        _expect(len(keys) == 1 or manifest.key.endswith("/"), "a list of objects")
    else:
        _expect(len(keys) == 1, "a list of objects")
        anchor = read_anchor_key(keys[0])
        _expect(anchor is not None and anchor.name == RECORD and _is_at(anchor, position), "the name of an anchor")


def _check_anchor(anchor: Anchor) -> None:
    names = wanted(ref.key.rpartition("/")[2] for ref in anchor.files)
    for ref in anchor.files:
        place = read_anchor_key(ref.key)
        if place is None or not is_plain_file(place.name) or not _is_at(place, anchor.position):
            raise FormatError("a file of an anchor is impossible")
        if place.name not in names or place.name in (RECORD, CHANNEL_COPY):
            hint = "Code and pickled files never travel with weights. Do not use this anchor."
            raise FormatError(f"a checkpoint folder may not hold a file called {place.name}", hint=hint)
    _expect(len({ref.key for ref in anchor.files}) == len(anchor.files), "a list of files")
    _expect((anchor.reference is None) == bool(anchor.files), "an anchor of neither files nor a reference")
    _expect(not (anchor.boxes and anchor.reference), "an anchor of boxes elsewhere")
    pinned = [ref.key for ref in anchor.pins]
    _expect(not pinned or anchor.reference is not None, "a list of files elsewhere")
    _expect(len(set(pinned)) == len(pinned) == len(wanted(filter(is_plain_file, pinned))), "a list of files elsewhere")


def _is_at(place: AnchorFile, position: Position) -> bool:
    return (place.version, place.digest) == (position.version, position.digest[:16])


# -- the head and the channel ------------------------------------------------------------------------------------------


def head_to_json(position: Position) -> bytes:
    return to_json("head", {"position": position})


def head_from_json(data: bytes) -> Position:
    return from_json(data, "head", {"position"}, lambda fields: position_from_json(fields["position"]))


def _channel_fields(channel: Channel) -> dict[str, Any]:
    """All that the id covers."""
    return {
        "aliases": dict(channel.table.aliases),
        "fence": channel.fence,
        "nonce": channel.nonce,
        "tensors": [[spec.name, spec.dtype, list(spec.shape)] for spec in channel.table],
    }


def channel_to_json(channel: Channel) -> bytes:
    signature = {name: getattr(channel, name) for name in _signature if getattr(channel, name)}
    return to_json("channel", {**_channel_fields(channel), "id": channel.id, **signature})


def channel_from_json(data: bytes) -> Channel:
    return from_json(data, "channel", {"aliases", "fence", "id", "nonce", "tensors"}, _channel, _signature.keys())


def _channel(fields: dict[str, Any]) -> Channel:
    tensors, aliases = fields["tensors"], fields["aliases"]
    _expect(isinstance(tensors, list) and len(tensors) <= 1 << 18, "a table")
    _expect(isinstance(aliases, dict) and all(isinstance(name, str) for name in aliases.values()), "a list of aliases")
    _expect(fields["fence"] in ("create", "list"), "a fence")
    try:
        table = TensorTable.of((_tensor(tensor) for tensor in tensors), aliases)
    except UsageError as error:
        raise FormatError(f"the table is impossible: {error}") from None
    signature = {name: read(fields[name]) for name, read in _signature.items() if name in fields}
    channel = Channel(_id("a nonce")(fields["nonce"]), table, fields["fence"], **signature)
    if channel.id != fields["id"]:
        raise FormatError("the channel's record is damaged: its id is not the digest of its content")
    return channel


def _tensor(value: Any) -> TensorSpec:
    _expect(isinstance(value, list) and len(value) == 3 and isinstance(value[2], list), "a tensor")
    name, dtype, shape = value
    _expect(isinstance(name, str) and len(name.encode()) <= 4096 and len(shape) <= MAX_RANK, "a tensor")
    sizes = map(_natural("a shape", MAX_ELEMENTS + 1), shape)
    _expect(math.prod(sizes) <= MAX_ELEMENTS, "a shape")
    spec = TensorSpec(name, dtype if isinstance(dtype, str) else "", tuple(shape))
    _ = spec.nbytes
    return spec
