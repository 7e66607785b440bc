"""Tags: names for versions, one small object each. A tagged version is never collected."""

from __future__ import annotations

import time
from collections.abc import Iterator

from weightcast.channel.chain import Chain
from weightcast.channel.chain_reader import read_record
from weightcast.channel.doomed import refuse_doomed
from weightcast.channel.keys import TAGS, Position, check_tag, is_tag, read_tag_key, tag_key
from weightcast.channel.records import Tag, dump_record, load_record
from weightcast.errors import ConflictError, FormatError, MissingError, UsageError, about

_MAX_BYTES = 1 << 12
"""A tag is a few hundred bytes, and listing them reads all."""


def read_tag(chain: Chain, name: str) -> Tag:
    """A tag by its name; `UsageError` if there is none, `FormatError` if its object is not one of this channel."""
    if not is_tag(name):
        raise UsageError(f"there is no version or tag {name[:100]!r}", file=chain.store.url, hint=_list_them(chain))
    key = tag_key(name)
    try:
        data = read_record(chain.store, key, _MAX_BYTES)
    except MissingError as error:
        if error.key is None:
            raise  # not the tag is missing but the bucket
        raise UsageError(f"there is no tag {name!r}", file=chain.store.url, hint=_list_them(chain)) from None
    with about(file=f"{chain.store.url}/{key}", hint=f"Set it again: `weightcast tag URL VERSION {name} --force`."):
        tag = load_record(Tag, data)
        if tag.channel != chain.channel.id:
            raise FormatError("this tag belongs to another channel")
        if tag.name != name:
            raise FormatError(f"the tag says that its name is {tag.name!r}")
        return tag


def _list_them(chain: Chain) -> str:
    return f"`weightcast log {chain.store.url}` lists versions, `weightcast tag {chain.store.url}` tags."


def tag_names(chain: Chain) -> Iterator[str]:
    """The names of all tags, by a listing."""
    for listed in chain.store.list(TAGS):
        name = read_tag_key(listed.key)
        if name is not None:
            yield name


def tags(chain: Chain) -> tuple[list[Tag], list[tuple[str, FormatError]]]:
    """All tags that can be read, and what is wrong with the others, by key."""
    good: list[Tag] = []
    bad: list[tuple[str, FormatError]] = []
    for name in list(tag_names(chain)):
        try:
            good.append(read_tag(chain, name))
        except FormatError as error:
            bad.append((tag_key(name), error))
        except UsageError:
            continue  # deleted since it was listed
    return good, bad


def valid_tags(chain: Chain) -> tuple[list[Tag], list[tuple[str, FormatError]]]:
    """All tags that name a version (SPEC 11.8.5), and what is wrong with the others, by key."""
    found, bad = tags(chain)
    good: list[Tag] = []
    for tag in found:
        if _is_committed(chain, tag.position):
            good.append(tag)
        else:
            problem = f"it names version {tag.position.version}, which is not there or has other weights"
            bad.append((tag_key(tag.name), FormatError(problem)))
    return good, bad


def _is_committed(chain: Chain, position: Position) -> bool:
    try:
        return chain.manifest(position.version).position == position
    except (MissingError, FormatError):
        return False


def tags_by_position(chain: Chain) -> dict[Position, tuple[str, ...]]:
    """The names that each position has; tags that cannot be read are left out (`verify` reports them)."""
    found: dict[Position, tuple[str, ...]] = {}
    for tag in tags(chain)[0]:
        found[tag.position] = (*found.get(tag.position, ()), tag.name)
    return found


def set_tag(chain: Chain, name: str, position: Position, *, force: bool = False) -> Position | None:
    """Name a version; returns what the tag named before, None if it is new.

    `ConflictError` if the tag names another version, unless ``force`` moves it, or if a collector is deleting the
    version; `UsageError` if the version is gone. The tag stays as it was then.
    """
    before = _write_tag(chain, check_tag(name), position, force)
    if before == position:
        return before
    try:
        refuse_doomed(chain, position.version)
        if not _is_committed(chain, position):
            raise UsageError(f"version {position.version} is gone", file=chain.store.url, hint=_list_them(chain))
    except (ConflictError, UsageError):
        if before is None:
            chain.store.delete(tag_key(name))
        else:
            _put_tag(chain, name, before)
        raise
    return before


def _write_tag(chain: Chain, name: str, position: Position, force: bool) -> Position | None:
    """Write the tag unless it names ``position`` already; returns what it named before."""
    before: Position | None = None
    try:
        before = read_tag(chain, name).position
    except UsageError:
        if _put_tag(chain, name, position, new=True):
            return None
        before = read_tag(chain, name).position  # another process created it just now
    except FormatError:
        if not force:
            raise
    if before == position:
        return before
    if before is not None and not force:
        hint = "--force moves it."
        raise ConflictError(f"the tag {name!r} names version {before.version}", file=chain.store.url, hint=hint)
    _put_tag(chain, name, position)
    return before


def _put_tag(chain: Chain, name: str, position: Position, *, new: bool = False) -> bool:
    """Write a tag; with ``new`` only if there is none, where the store can tell: False if there is."""
    data = dump_record(Tag(chain.channel.id, name, position, time.time()))
    if new and chain.channel.fence == "create":
        return chain.store.create(tag_key(name), data)
    chain.store.put(tag_key(name), data)
    return True


def delete_tag(chain: Chain, name: str) -> None:
    """Remove a tag; `UsageError` if there is none."""
    if not is_tag(name) or name not in set(tag_names(chain)):
        raise UsageError(f"there is no tag {name[:100]!r}", file=chain.store.url, hint=_list_them(chain))
    chain.store.delete(tag_key(name))
