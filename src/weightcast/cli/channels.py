"""Channels by their address, and versions as people name them: a number, a tag or `head`; for `log`, a range."""

from __future__ import annotations

from collections.abc import Sequence

from weightcast.channel.chain import Chain
from weightcast.channel.keys import HEAD_WORD, MAX_VERSION
from weightcast.channel.nearest import Nearest
from weightcast.channel.records import Manifest
from weightcast.channel.tags import read_tag
from weightcast.cli.settings import settings
from weightcast.disk.durable import Report, silent
from weightcast.errors import ChannelError, MissingError, TrustError, UsageError
from weightcast.store import open_store
from weightcast.store.base import Store
from weightcast.store.retry import hasty


def open_bucket(url: str, report: Report = silent) -> Store:
    """The bucket at an address, within --limit-rate; ``report`` is for uploads."""
    return _limited(open_store(url, report))


def _limited(store: Store) -> Store:
    if settings.limit_rate is None:
        return store
    from weightcast.store.rate import Limited

    return Limited(store, settings.limit_rate)


def open_near(url: str, report: Report = silent, near: Sequence[str] = ()) -> Store:
    """The bucket at an address, read from these copies first; ``report`` is for uploads."""
    home = open_bucket(url, report)
    return Nearest(home, [_limited(hasty(open_store(copy))) for copy in near]) if near else home


def open_chain(url: str, report: Report = silent) -> Chain:
    """The channel at an address; ``report`` is for uploads."""
    return Chain.open(open_bucket(url, report))


def head_of(chain: Chain) -> Manifest:
    """The newest commit; `ChannelError` if there is none yet."""
    head = chain.head()
    if head is None:
        hint = "Finish it with `weightcast init URL CHECKPOINT`."
        raise ChannelError("the channel has no version yet", file=chain.store.url, hint=hint)
    return head


def is_number(text: str) -> bool:
    """Whether ``text`` is the number of a version, which need not exist."""
    return text.isascii() and text.isdigit() and len(text) <= len(str(MAX_VERSION))


def commit_named(chain: Chain, text: str) -> Manifest:
    """The commit of a version by its number, a tag or `head`; `UsageError` if there is none."""
    if text.lower() == HEAD_WORD:
        return head_of(chain)
    if is_number(text):
        try:
            return chain.manifest(int(text))
        except MissingError:
            hint = f"`weightcast log {chain.store.url}` lists those there are."
            raise UsageError(f"there is no version {int(text)}", file=chain.store.url, hint=hint) from None
    tag = read_tag(chain, text)
    if chain.guard is not None and not chain.guard.trust.allow_rollback:
        hint = "Name the version by its number, or say --allow-rollback: a tag can be moved to any version."
        raise TrustError("tags are not signed", reason="not covered", file=chain.store.url, hint=hint)
    try:
        commit = chain.manifest(tag.position.version)
    except MissingError:
        commit = None
    if commit is None or commit.position != tag.position:
        hint = f"Delete it with `weightcast tag {chain.store.url} --delete {text}`."
        gone = "which is no longer there" if commit is None else "which now has other weights"
        raise UsageError(f"the tag {text!r} names version {tag.position.version}, {gone}", hint=hint)
    return commit


def version_named(chain: Chain, text: str) -> int:
    """The number of a version that is there, by its number, a tag or `head`."""
    return commit_named(chain, text).position.version


def range_named(chain: Chain, text: str, head: int) -> tuple[int, int]:
    """The first and the last version of `A..B`, `A..`, `..B` or `A`; both ends belong to it."""
    first, dots, last = text.partition("..")
    if not dots:
        only = _end(chain, text, head)
        return only, only
    return _end(chain, first, head) if first else 0, _end(chain, last, head) if last else head


def _end(chain: Chain, text: str, head: int) -> int:
    """An end of a range. A number is taken as it is: a range may begin before the oldest version that is left."""
    if text.lower() == HEAD_WORD:
        return head
    return int(text) if is_number(text) else version_named(chain, text)
