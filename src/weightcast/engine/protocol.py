"""The JSON of the messages between an agent and an engine: one strict, bounded codec for all sides.

    {"protocol": 1, "kind": "stage_patches", "job": "4f…", "paths": ["…"]}

The protocol number is checked before anything else, so that two releases that do not understand each other say just
that. After it an unknown kind, a missing, extra or wrongly typed field and a number out of range are each one
`FormatError` that names the field.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from weightcast.channel.keys import Position
from weightcast.channel.records import Channel, channel_from_json, channel_to_json, position_from_json, position_json
from weightcast.engine.box_digests import BoxDigest
from weightcast.engine.messages import ANSWERS, REQUESTS, Reason, Request, UpdateEngine
from weightcast.errors import FormatError, UsageError, VersionError
from weightcast.format.boxes import Box, Range
from weightcast.format.cut import Cut
from weightcast.format.json import parse_json

PROTOCOL = 1
"""An agent and a worker with different numbers refuse each other."""

MAX_LENGTH = 1 << 28
"""Characters of a message."""

_NUMBERS = 1 << 64
_MAX_TEXT, _MAX_REASON = 1 << 16, 2000
"""Characters of a name, a path or an id, and of a sentence for people."""


class ProtocolError(VersionError):
    """The other side uses another protocol, number ``found``."""

    def __init__(self, found: int):
        super().__init__(f"the message is of protocol {found}, this side uses {PROTOCOL}")
        self.found = found


def encode(message: object) -> str:
    return json.dumps({"protocol": PROTOCOL, **_plain(message)}, separators=(",", ":"))


def decode_request(text: str) -> Request[Any]:
    """`ProtocolError` for another protocol, `FormatError` for anything else that is not a request."""
    return _decode(text, REQUESTS, "request")  # type: ignore[no-any-return]


def decode_update(text: str) -> UpdateEngine:
    """The same for what is sent to the engine's own process."""
    return _decode(text, (UpdateEngine,), "update")  # type: ignore[no-any-return]


def decode_answer(text: str) -> Any:
    """`ProtocolError` for another protocol, `FormatError` for anything else that is not an answer."""
    return _decode(text, ANSWERS, "answer")


def _decode(text: str, known: Iterable[type], what: str) -> Any:
    if len(text) > MAX_LENGTH:
        raise FormatError(f"the {what} has {len(text):,} characters, the limit is {MAX_LENGTH:,}")
    found = parse_json(text.encode(errors="surrogatepass"), what)
    if not isinstance(found, dict):
        raise FormatError(f"the {what} is not an object")
    number = found.pop("protocol", None)
    if type(number) is not int:
        raise FormatError(f"the {what} has no protocol number")
    if number != PROTOCOL:
        raise ProtocolError(number)
    return _message(found, known, what)


def kind_of(message: type) -> str:
    """The name on the wire: StagePatches is "stage_patches"."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", message.__name__).lower()


def _plain(value: Any) -> Any:
    kind: Any = type(value)
    if is_dataclass(kind) and kind not in _SPECIAL:
        return {"kind": kind_of(type(value)), **{one.name: _plain(getattr(value, one.name)) for one in fields(value)}}
    if kind in _SPECIAL:
        return _SPECIAL[kind][0](value)
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value


def _message(value: Any, known: Iterable[type], where: str) -> Any:
    """An object whose ``kind`` is one of the known ones, with all of its fields and no others."""
    _expect(isinstance(value, dict), where, "an object", value)
    kind = value.get("kind")
    found = next((one for one in known if kind_of(one) == kind), None)
    if found is None:
        raise FormatError(f"{where}: unknown kind {kind!r:.60}")
    hints = _fields(found)
    if value.keys() != hints.keys() | {"kind"}:
        missing, extra = sorted(hints.keys() - value.keys()), sorted(value.keys() - hints.keys() - {"kind"})
        raise FormatError(f"{kind_of(found)}: fields missing: {missing}, fields too many: {extra!r:.200}")
    return found(**{name: _value(value[name], hint, f"{kind_of(found)}.{name}") for name, hint in hints.items()})


@cache
def _fields(message: type) -> dict[str, Any]:
    hints = get_type_hints(message, include_extras=True)
    return {one.name: hints[one.name] for one in fields(message)}


def _value(value: Any, hint: Any, where: str) -> Any:
    """A field's value from JSON, as its type hint says."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        others = [one for one in inner if one is not type(None)]
        return _value(value, others[0], where) if len(others) == 1 else _message(value, others, where)
    if origin in (tuple, frozenset):
        _expect(isinstance(value, list), where, "a list", value)
        return origin(_value(one, inner[0], where) for one in value)
    if origin is Mapping:
        _expect(isinstance(value, dict), where, "an object", value)
        return {_value(name, str, where): _value(one, inner[1], where) for name, one in value.items()}
    if origin is Literal:
        _expect(isinstance(value, str) and value in inner, where, f"one of {', '.join(inner)}", value)
        return value
    if hint == Reason:
        _expect(isinstance(value, str), where, "text", value)
        return value if len(value) <= _MAX_REASON else f"{value[:_MAX_REASON]}…"
    if hint in _SPECIAL:
        return _SPECIAL[hint][1](value)
    if is_dataclass(hint):
        return _message(value, (hint,), where)  # type: ignore[arg-type]
    good = type(value) is hint
    if hint is int:
        good = good and 0 <= value < _NUMBERS
    elif hint is str:
        good = good and len(value) <= _MAX_TEXT
    _expect(good, where, _NAMES[hint], value)
    return value


_NAMES = {
    int: "a natural number of 64 bits",
    bool: "true or false",
    str: f"text of at most {_MAX_TEXT:,} characters",
}


def _expect(good: bool, where: str, what: str, found: object) -> None:
    if not good:
        raise FormatError(f"{where}: expected {what}, got {found!r:.60}")


def _box_digest_plain(one: BoxDigest) -> list[Any]:
    box = [[along.start, along.count, along.step] for along in one.box.ranges]
    return [box, one.digest, one.problem, one.rounded]


def _box_digest(value: Any) -> BoxDigest:
    _expect(isinstance(value, list) and len(value) == 4, "box", "four values", value)
    box = _value(value[0], tuple[tuple[int, ...], ...], "box")
    _expect(all(len(along) == 3 for along in box), "box", "three numbers for each dimension", value[0])
    hints = (int | None, Reason | None, bool)
    rest = (_value(one, hint, "box digest") for one, hint in zip(value[1:], hints, strict=True))
    return BoxDigest(Box(tuple(Range(*along) for along in box)), *rest)


def _channel(value: Any) -> Channel:
    _expect(isinstance(value, str), "channel", "text", value)
    return channel_from_json(value.encode())


def _cut(value: Any) -> Cut:
    _expect(isinstance(value, list) and len(value) == 3, "cut", "three values", value)
    found = (_value(one, hint, "cut") for one, hint in zip(value, (str, int, int), strict=True))
    try:
        return Cut(*found)
    except UsageError as error:
        raise FormatError(f"cut: {error.problem}") from None


_SPECIAL: dict[Any, tuple[Any, Any]] = {
    BoxDigest: (_box_digest_plain, _box_digest),
    Cut: (lambda cut: [cut.tensors, cut.axis, cut.parts], _cut),
    Channel: (lambda channel: channel_to_json(channel).decode(), _channel),
    Position: (position_json, position_from_json),
}
"""Types with an encoding of their own: how they are written, and read."""
