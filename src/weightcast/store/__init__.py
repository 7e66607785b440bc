"""Buckets: one small protocol and its implementations.

`base` has the protocol; `memory`, `file`, `object`, `hub` and `http` are the kinds of buckets. `retry` and `rate` wrap
any of them: time limits and retries, and a limit on bytes per second. `probe` finds out what a bucket guarantees,
`download` fetches large objects in ranges, `threads` runs calls that may hang. `contract` tests a store against every
promise; docs/guides/stores.md says how to write one.
"""

from __future__ import annotations

import difflib
import re
import urllib.parse
from pathlib import Path

from weightcast.disk.durable import Report, silent
from weightcast.errors import UsageError
from weightcast.store.base import Store
from weightcast.store.retry import Patient

_CLOUDS = ("s3", "s3a", "gs", "az")
_KNOWN = ["file", "memory", *_CLOUDS, "hf", "http", "https"]
_EXAMPLES = (
    "A folder, or file:///folder, s3://bucket/folder, gs://…, az://…, hf://buckets/OWNER/NAME, "
    "https://host/folder, memory://name."
)


def open_store(url: str | Path | Store, report: Report = silent) -> Store:
    """The bucket at ``url``, or the folder of that path; no request is made yet. A store is returned as it is.

    Credentials and endpoints come from the clouds' own environment variables. Failed calls are retried, and every call
    has a time limit (`retry.Patient`). ``report`` is called with the progress of large uploads, where it is known.

    >>> store = wc.open_store("memory://example")
    >>> store.put("folder/key", b"content")
    >>> store.get("folder/key", start=3)
    b'tent'
    >>> wc.open_store("s4://bucket")
    Traceback (most recent call last):
    weightcast.errors.UsageError: not the address of a bucket: 's4://bucket'. Did you mean s3://bucket? ...
    """
    if not isinstance(url, (str, Path)):
        return url
    # Each kind of store is imported when one is opened: a folder needs no TLS.
    if isinstance(url, Path):
        return _folder(url)
    scheme, separator, rest = url.partition("://")
    if not separator:
        _refuse_slip(url)
        return _folder(_expanded(url))
    scheme = scheme.lower()
    if scheme == "file":
        return _folder(_path_of(url))
    if scheme == "memory" and re.fullmatch(r"[\w.-]+", rest):
        from weightcast.store.memory import memory_named

        return Patient(memory_named(rest), timeout=None)
    if scheme in _CLOUDS:
        from weightcast.store.object import ObjectStore

        return Patient(ObjectStore(f"{scheme}://{rest}"))
    if scheme == "hf":
        from weightcast.store.hub import HubStore

        # Both libraries below retry by themselves, for 23 s and longer: two attempts are enough.
        return Patient(HubStore(f"{scheme}://{rest}", report), attempts=2)
    if scheme in ("http", "https"):
        from weightcast.store.http import HttpStore

        return Patient(HttpStore(f"{scheme}://{rest}"))
    raise _not_an_address(url, "" if scheme in _KNOWN else _nearest(scheme), rest)


def _folder(path: Path) -> Store:
    from weightcast.store.file import FileStore

    return Patient(FileStore(path))


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(f"no such home folder: {path!r}", hint="Write the path out.") from error


def _refuse_slip(url: str) -> None:
    """`UsageError` for text that is neither a known address nor meant as a path."""
    if not url or "\0" in url:
        raise UsageError("no bucket is named", hint=_EXAMPLES)
    scheme, colon, rest = url.partition(":")
    if colon and "/" not in scheme and not Path(url).exists() and (near := _nearest(scheme)):
        raise _not_an_address(url, near, rest.lstrip("/"))


def _not_an_address(url: str, near: str, rest: str) -> UsageError:
    guess = f"Did you mean {near}://{rest}? " if near else ""
    return UsageError(f"not the address of a bucket: {url!r}", hint=guess + _EXAMPLES)


def _nearest(scheme: str) -> str:
    return next(iter(difflib.get_close_matches(scheme.lower(), _KNOWN, 1, 0.5)), "")


def _path_of(url: str) -> Path:
    path = urllib.parse.unquote(url.partition("://")[2].removeprefix("localhost"))
    if not path.startswith("/") or "\0" in path:
        raise UsageError(f"not the address of a folder: {url!r}", hint="It is file:// and then a path from the root.")
    return Path(path)
