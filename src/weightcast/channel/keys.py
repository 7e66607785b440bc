"""Positions, and the names of all objects of a channel (SPEC 11.2): a listing alone shows all edges."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass

from weightcast.errors import UsageError

MAX_VERSION = 10**12 - 1

CHANNEL, HEAD, WRITER, INDEX = "channel.json", "head.json", "writer.json", "index.json"
MANIFESTS, DELTAS, SQUASHES, ANCHORS = "manifests/", "deltas/", "squashes/", "anchors/"
PINS, TAGS, REPLICAS, DOOMED = "pins/", "tags/", "replicas/", "doomed/"
KEYRING = f"{MANIFESTS}keyring-"
"""Sorts after all versions, so that the listing in which a writer looks for later ones shows the key list, too."""
RECORD, CHANNEL_COPY = "anchor.json", "channel.json"
"""In an anchor's folder: what it consists of, and a copy of the channel's own record to repair that from."""


@dataclass(frozen=True)
class Position:
    """A version and the digest of its weights: two holders of one position hold the same bits."""

    version: int
    digest: str

    def __str__(self) -> str:
        return f"{self.version} ({self.digest[:12]})"


def manifest_key(version: int, writer: str | None = None) -> str:
    """The commit of a version; with a unique ``writer`` in it where the store cannot create if absent."""
    return f"{MANIFESTS}{version:012d}{f'-{writer}' if writer else ''}.json"


def delta_key(position: Position, sha256: str, folder: str | None = None) -> str:
    """An object of a delta: the only one, or one of several in a ``folder``, named by 16 hexadecimal digits."""
    inside = f"{folder}/{sha256[:16]}" if folder else sha256[:16]
    return f"{DELTAS}{position.version:012d}-{position.digest[:16]}-{inside}.safetensors"


def squash_key(base: int, position: Position, sha256: str, signature: tuple[str, str] | None = None) -> str:
    """A squash has no record: its key holds all that a reader must know, the signer's id and signature included."""
    signed = "".join(f"-{part}" for part in signature or ())
    return f"{SQUASHES}{base:012d}-{position.version:012d}-{position.digest[:16]}-{sha256}{signed}.safetensors"


def anchor_folder(position: Position, mark: str) -> str:
    """``mark`` identifies the files in it: another set of files is another folder."""
    return f"{ANCHORS}{position.version:012d}-{position.digest[:16]}-{mark[:16]}/"


def parent(key: str) -> str:
    """The folder that an object is in, with `/` at its end."""
    return key[: key.rindex("/") + 1]


def keyring_key(number: int) -> str:
    return f"{KEYRING}{number:012d}.json"


def pin_key(version: int) -> str:
    return f"{PINS}{version:012d}.json"


def tag_key(name: str) -> str:
    return f"{TAGS}{name}.json"


def replica_key(replica: str) -> str:
    return f"{REPLICAS}{replica}.json"


_DELTA = re.compile(
    rf"({DELTAS}(\d{{12}})-([0-9a-f]{{16}})-[0-9a-f]{{16}})(?:\.safetensors|/[0-9a-f]{{16}}\.safetensors)", re.ASCII
)
_SQUASH = re.compile(
    rf"{SQUASHES}(\d{{12}})-(\d{{12}})-([0-9a-f]{{16}})-([0-9a-f]{{64}})"
    r"(?:-([0-9a-f]{16})-([0-9A-Za-z_-]{86}))?\.safetensors",
    re.ASCII,
)
_ANCHOR = re.compile(rf"({ANCHORS}(\d{{12}})-([0-9a-f]{{16}})-[0-9a-f]{{16}}/)([^/]+)", re.ASCII)
_KEYRING = re.compile(rf"{KEYRING}(\d{{12}})\.json", re.ASCII)
_MANIFEST = re.compile(rf"{MANIFESTS}(\d{{12}})(?:-([0-9A-Za-z._-]{{1,120}}))?\.json", re.ASCII)
_PIN = re.compile(rf"{PINS}(\d{{12}})\.json", re.ASCII)
_TAG = re.compile(rf"{TAGS}([0-9A-Za-z._-]+)\.json", re.ASCII)


@dataclass(frozen=True)
class DeltaObject:
    """An object of a delta, by its key; ``digest`` has the first digits."""

    version: int
    digest: str
    delta: str
    """The object's own key, or the folder of a delta of several objects."""


def read_delta_key(key: str) -> DeltaObject | None:
    found = _DELTA.fullmatch(key)
    if not found:
        return None
    return DeltaObject(int(found[2]), found[3], key if key == f"{found[1]}.safetensors" else f"{found[1]}/")


@dataclass(frozen=True)
class SquashObject:
    """A squash, by its key; ``digest`` has the first digits of its result's."""

    base: int
    result: int
    digest: str
    sha256: str
    signature: tuple[str, str] | None
    """The signer's id and the signature, if it is signed."""


def read_squash_key(key: str) -> SquashObject | None:
    found = _SQUASH.fullmatch(key)
    if not found or int(found[1]) >= int(found[2]):
        return None
    return SquashObject(int(found[1]), int(found[2]), found[3], found[4], (found[5], found[6]) if found[5] else None)


@dataclass(frozen=True)
class AnchorFile:
    """A file of an anchor, by its key; ``digest`` has the first digits."""

    folder: str
    version: int
    digest: str
    name: str


def read_anchor_key(key: str) -> AnchorFile | None:
    found = _ANCHOR.fullmatch(key)
    return AnchorFile(found[1], int(found[2]), found[3], found[4]) if found else None


def read_manifest_key(key: str) -> tuple[int, str | None] | None:
    """(version, writer if it is in the name)"""
    found = _MANIFEST.fullmatch(key)
    return (int(found[1]), found[2]) if found else None


def read_keyring_key(key: str) -> int | None:
    """The number of an entry of the key list."""
    found = _KEYRING.fullmatch(key)
    return int(found[1]) if found else None


def read_pin_key(key: str) -> int | None:
    found = _PIN.fullmatch(key)
    return int(found[1]) if found else None


def read_tag_key(key: str) -> str | None:
    """The tag's name."""
    found = _TAG.fullmatch(key)
    return found[1] if found and is_tag(found[1]) else None


_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,99}")


def check_name(name: str, what: str) -> str:
    """`UsageError` unless ``name`` can be a part of a key."""
    if not _NAME.fullmatch(name):
        hint = "Use letters, digits, dots, dashes and underscores, at most 100, and begin with a letter or a digit."
        raise UsageError(f"{_short(name)} cannot be the name of a {what}", hint=hint)
    return name


HEAD_WORD, NOTHING_WORD = "head", "nothing"
"""Words for the newest version and for no version, accepted wherever a version is; tags may not use them."""


def is_tag(name: str) -> bool:
    """Whether ``name`` can be a tag. It begins with a letter, so that it is never a version's number."""
    if not _NAME.fullmatch(name) or not name[0].isalpha() or ".." in name:
        return False
    return name.lower() not in (HEAD_WORD, NOTHING_WORD)


def check_tag(name: str) -> str:
    """`UsageError` unless ``name`` can be a tag."""
    if not is_tag(name):
        hint = (
            "Begin with a letter, then use letters, digits, single dots, dashes and underscores, at most 100. "
            f"`{HEAD_WORD}` and `{NOTHING_WORD}` are taken."
        )
        raise UsageError(f"{_short(name)} cannot be a tag", hint=hint)
    return name


def _short(text: str) -> str:
    return repr(text if len(text) <= 120 else f"{text[:120]}…")


MAX_LABEL = 200
"""Characters of a version's label."""


def is_label(text: str) -> bool:
    """Whether ``text`` can be a label: one printable line that neither begins nor ends with a space."""
    return 0 < len(text) <= MAX_LABEL and text.isprintable() and text == text.strip()


def check_label(text: str | None) -> str | None:
    """`UsageError` unless ``text`` can be the label of a version, or is None."""
    if text is None:
        return None
    if not isinstance(text, str) or not is_label(text):
        hint = f"Use one line of 1 to {MAX_LABEL} printable characters, without spaces at its ends."
        raise UsageError(f"{_short(str(text))} cannot be a label", hint=hint)
    return text


def check_step(step: int | None) -> int | None:
    """`UsageError` unless ``step`` can be that of a version: a natural number of any integer type, or None."""
    if step is None:
        return None
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number < 1 << 63:
        raise UsageError(f"{step!r} is not a training step", hint="Pass a whole number from 0 on, or None.")
    return number


MAX_FILE_NAME = 200
"""Bytes: file systems allow 255, and a file is written under a longer name first."""


def is_plain_file(name: str) -> bool:
    """Whether a name is that of a visible file directly in the folder it is put into."""
    # A lone surrogate is not printable. This is checked first because it cannot be encoded.
    if not name.isprintable() or not 0 < len(name.encode()) <= MAX_FILE_NAME:
        return False
    return name[0] != "." and not set(name) & set("/\\")


def is_channel_id(text: str) -> bool:
    """Whether ``text`` is 32 hexadecimal digits: an id becomes part of paths, so nothing else may be one."""
    return re.fullmatch("[0-9a-f]{32}", text) is not None
