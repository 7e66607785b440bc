"""The small JSON objects of a channel: what each says, and every check when one is read (SPEC 11)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
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
from weightcast.disk.companions import is_wanted
from weightcast.errors import FormatError, UsageError, VersionError, WeightcastError
from weightcast.format.json import parse_json
from weightcast.format.spec import MAX_ELEMENTS, MAX_RANK, TensorSpec, TensorTable

FORMAT = 1
MAX_JSON = 1 << 26
"""Bytes of any JSON object of a channel."""

T = TypeVar("T")


@dataclass(frozen=True)
class ObjectRef:
    """An immutable object: its name, and what its bytes must be."""

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

    @cached_property
    def id(self) -> str:
        """A digest of all the rest. Every manifest and every anchor carries it, so each of them covers this record."""
        return hashlib.sha256(to_json("channel", _channel_fields(self))).hexdigest()[:32]


@dataclass(frozen=True)
class Manifest:
    """The commit record of one version. Without a base it commits an anchor."""

    channel: str
    position: Position
    base: Position | None
    object: ObjectRef
    """The patch, or the record of the anchor."""
    codec: str | None
    changed: int
    step: int | None
    time: float
    """By the writer's clock; for people."""
    writer: str
    label: str | None = None
    """One line for people, by whoever published it."""


@dataclass(frozen=True)
class Tag:
    """A name for a version. It keeps the version from being collected."""

    channel: str
    name: str
    position: Position
    time: float
    """When it was set, by the clock of whoever set it; for people."""


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


@dataclass(frozen=True)
class Lease:
    """Who writes; advisory."""

    writer: str
    host: str
    pid: int
    time: float


def to_json(kind: str, fields: Mapping[str, Any]) -> bytes:
    """Canonical: sorted keys, no white space, so that equal records are equal bytes."""
    return json.dumps(
        {"format": FORMAT, "kind": kind, **fields}, separators=(",", ":"), sort_keys=True, ensure_ascii=True
    ).encode()


def from_json(
    data: bytes, kind: str, keys: set[str], build: Callable[[dict[str, Any]], T], optional: set[str] | None = None
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
    if fields.keys() - (optional or set()) != keys | {"format", "kind"}:
        raise FormatError(f"the {kind} does not have the fields of the format")
    return build(fields)


def _expect(good: bool, what: str) -> None:
    if not good:
        raise FormatError(f"{what} is impossible")


def _text(value: Any, what: str, limit: int = 1000) -> str:
    _expect(isinstance(value, str) and 0 < len(value) <= limit and value.isprintable(), what)
    return str(value)


def _natural(value: Any, what: str, limit: int = 1 << 63) -> int:
    _expect(type(value) is int and 0 <= value < limit, what)
    return int(value)


def _hex(value: Any, what: str) -> str:
    _expect(isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None, what)
    return str(value)


def _id(value: Any, what: str) -> str:
    _expect(isinstance(value, str) and is_channel_id(value), what)
    return str(value)


_END_OF_TIME = 253_402_300_800
"""The year 10000: calendars end there."""


def _time(value: Any) -> float:
    _expect(type(value) in (int, float) and 0 <= value < _END_OF_TIME, "a time")
    return float(value)


def position_json(position: Position | None) -> list[Any] | None:
    return [position.version, position.digest] if position else None


def position_from_json(value: Any) -> Position:
    _expect(isinstance(value, list) and len(value) == 2, "a position")
    return Position(_natural(value[0], "a version", MAX_VERSION + 1), _hex(value[1], "a digest"))


def _object(value: Any) -> ObjectRef:
    _expect(isinstance(value, list) and len(value) == 3, "an object")
    return ObjectRef(_text(value[0], "an object's name"), _natural(value[1], "a size"), _hex(value[2], "a SHA-256"))


def _object_json(ref: ObjectRef) -> list[Any]:
    return [ref.key, ref.size, ref.sha256]


def manifest_to_json(manifest: Manifest) -> bytes:
    fields = {
        "base": position_json(manifest.base),
        "changed": manifest.changed,
        "channel": manifest.channel,
        "codec": manifest.codec,
        "object": _object_json(manifest.object),
        "position": position_json(manifest.position),
        "step": manifest.step,
        "time": round(manifest.time, 3),
        "writer": manifest.writer,
    }
    return to_json("manifest", fields if manifest.label is None else fields | {"label": manifest.label})


def manifest_from_json(data: bytes) -> Manifest:
    keys = {"base", "changed", "channel", "codec", "object", "position", "step", "time", "writer"}
    return from_json(data, "manifest", keys, _manifest, optional={"label"})


def _manifest(fields: dict[str, Any]) -> Manifest:
    position, base, ref = position_from_json(fields["position"]), fields["base"], _object(fields["object"])
    if base is not None:
        base = position_from_json(base)
        _expect(base.version == position.version - 1, "the base of a version")
        _expect(read_delta_key(ref.key) == (position.version, position.digest[:16]), "the name of a delta")
        _text(fields["codec"], "a codec", 20)
    else:
        place = read_anchor_key(ref.key)
        _expect(place is not None and place.name == RECORD and _is_at(place, position), "the name of an anchor")
        _expect(fields["codec"] is None, "a codec")
    return Manifest(
        channel=_id(fields["channel"], "a channel's id"),
        position=position,
        base=base,
        object=ref,
        codec=fields["codec"],
        changed=_natural(fields["changed"], "a count"),
        step=None if fields["step"] is None else _natural(fields["step"], "a step"),
        time=_time(fields["time"]),
        writer=_text(fields["writer"], "a writer's name", 100),
        label=_label(fields["label"]) if "label" in fields else None,
    )


def _label(value: Any) -> str:
    _expect(isinstance(value, str) and is_label(value), "a label")
    return str(value)


def tag_to_json(tag: Tag) -> bytes:
    fields = {"channel": tag.channel, "name": tag.name, "position": position_json(tag.position)}
    return to_json("tag", fields | {"time": round(tag.time, 3)})


def tag_from_json(data: bytes) -> Tag:
    return from_json(data, "tag", {"channel", "name", "position", "time"}, _tag)


def _tag(fields: dict[str, Any]) -> Tag:
    return Tag(
        _id(fields["channel"], "a channel's id"),
        _text(fields["name"], "a tag's name", 100),
        position_from_json(fields["position"]),
        _time(fields["time"]),
    )


def _is_at(place: AnchorFile, position: Position) -> bool:
    return (place.version, place.digest) == (position.version, position.digest[:16])


def _channel_fields(channel: Channel) -> dict[str, Any]:
    """All but the id."""
    return {
        "aliases": dict(channel.table.aliases),
        "fence": channel.fence,
        "nonce": channel.nonce,
        "tensors": [[spec.name, spec.dtype, list(spec.shape)] for spec in channel.table],
    }


def channel_to_json(channel: Channel) -> bytes:
    return to_json("channel", {**_channel_fields(channel), "id": channel.id})


def channel_from_json(data: bytes) -> Channel:
    return from_json(data, "channel", {"aliases", "fence", "id", "nonce", "tensors"}, _channel)


def _channel(fields: dict[str, Any]) -> Channel:
    tensors, aliases = fields["tensors"], fields["aliases"]
    _expect(isinstance(tensors, list) and len(tensors) <= 1 << 18, "a table")
    _expect(isinstance(aliases, dict) and all(isinstance(name, str) for name in aliases.values()), "a list of aliases")
    _expect(fields["fence"] in ("create", "list"), "a fence")
    try:
        table = TensorTable.of((_tensor(tensor) for tensor in tensors), aliases)
    except UsageError as error:
        raise FormatError(f"the table is impossible: {error}") from None
    channel = Channel(_id(fields["nonce"], "a nonce"), table, fields["fence"])
    if channel.id != _id(fields["id"], "a channel's id"):
        raise FormatError("the channel's record is damaged: its id is not the digest of its content")
    return channel


def _tensor(value: Any) -> TensorSpec:
    _expect(isinstance(value, list) and len(value) == 3 and isinstance(value[2], list), "a tensor")
    name, dtype, shape = value
    _expect(isinstance(name, str) and len(name.encode()) <= 4096 and len(shape) <= MAX_RANK, "a tensor")
    elements = 1
    for size in shape:
        elements *= _natural(size, "a shape", MAX_ELEMENTS + 1)
    _expect(elements <= MAX_ELEMENTS, "a shape")
    spec = TensorSpec(name, dtype if isinstance(dtype, str) else "", tuple(shape))
    _ = spec.nbytes
    return spec


def anchor_to_json(anchor: Anchor) -> bytes:
    reference = [anchor.reference.repository, anchor.reference.revision] if anchor.reference else None
    fields = {
        "channel": anchor.channel,
        "files": [_object_json(file) for file in anchor.files],
        "position": position_json(anchor.position),
        "reference": reference,
    }
    return to_json("anchor", fields)


def anchor_from_json(data: bytes) -> Anchor:
    return from_json(data, "anchor", {"channel", "files", "position", "reference"}, _anchor)


def _anchor(fields: dict[str, Any]) -> Anchor:
    position, files, reference = position_from_json(fields["position"]), fields["files"], fields["reference"]
    _expect(isinstance(files, list) and len(files) <= 1 << 16, "a list of files")
    refs = tuple(_object(file) for file in files)
    for ref in refs:
        place = read_anchor_key(ref.key)
        _expect(place is not None and is_plain_file(place.name) and _is_at(place, position), "a file of an anchor")
        if place is not None and (not is_wanted(place.name) or place.name in (RECORD, CHANNEL_COPY)):
            hint = "Code and pickled files never travel with weights. Do not use this anchor."
            raise FormatError(f"a checkpoint folder may not hold a file called {place.name}", hint=hint)
    _expect(len({ref.key for ref in refs}) == len(refs), "a list of files")
    if reference is not None:
        _expect(isinstance(reference, list) and len(reference) == 2, "a reference")
        reference = Reference(*(_text(part, "a reference") for part in reference))
    _expect((reference is None) == bool(files), "an anchor of neither files nor a reference")
    return Anchor(_id(fields["channel"], "a channel's id"), position, refs, reference)


def head_to_json(position: Position) -> bytes:
    return to_json("head", {"position": position_json(position)})


def head_from_json(data: bytes) -> Position:
    return from_json(data, "head", {"position"}, lambda fields: position_from_json(fields["position"]))


def heartbeat_to_json(beat: Heartbeat) -> bytes:
    fields = {
        "error": beat.error,
        "instance": beat.instance,
        "pause": None if beat.pause is None else round(beat.pause, 6),
        "position": position_json(beat.position),
        "ran": beat.ran,
        "replica": beat.replica,
        "time": round(beat.time, 3),
    }
    return to_json("heartbeat", fields)


def heartbeat_from_json(data: bytes) -> Heartbeat:
    keys = {"error", "instance", "pause", "position", "ran", "replica", "time"}
    return from_json(data, "heartbeat", keys, _heartbeat)


def _heartbeat(fields: dict[str, Any]) -> Heartbeat:
    error, pause, ran = fields["error"], fields["pause"], fields["ran"]
    return Heartbeat(
        _text(fields["replica"], "a replica's name", 100),
        position_from_json(fields["position"]),
        _time(fields["time"]),
        None if error is None else _text(error, "an error", 2000),
        None if pause is None else _time(pause),
        _id(fields["instance"], "an instance"),
        None if ran is None else _natural(ran, "a version", MAX_VERSION + 1),
    )


def lease_to_json(lease: Lease) -> bytes:
    return to_json(
        "lease", {"host": lease.host, "pid": lease.pid, "time": round(lease.time, 3), "writer": lease.writer}
    )


def lease_from_json(data: bytes) -> Lease:
    return from_json(data, "lease", {"host", "pid", "time", "writer"}, _lease)


def _lease(fields: dict[str, Any]) -> Lease:
    return Lease(
        _text(fields["writer"], "a writer's name", 100),
        _text(fields["host"], "a host's name"),
        _natural(fields["pid"], "a process id"),
        _time(fields["time"]),
    )


def readable(data: bytes, parse: Callable[[bytes], T]) -> T | None:
    """A hint, parsed; None if it is invalid, since hints are never needed."""
    try:
        return parse(data)
    except WeightcastError:
        return None
