"""Buckets of the Hugging Face Hub, through huggingface_hub and hf_xet, which are imported when one is opened.

The Hub has no conditional write, so `create` overwrites, and channels fence writers by listing (SPEC 11.4).
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from weightcast.disk.durable import Report, silent
from weightcast.errors import UnreachableError, UsageError, WeightcastError
from weightcast.store.base import Data, Listed, Stored, check_key, check_prefix, check_range, is_key, size_of
from weightcast.store.errors_hub import is_not_there, translated

if TYPE_CHECKING:
    from huggingface_hub import BucketFile, BucketFileMetadata, HfApi

_FORM = "It is hf://buckets/OWNER/NAME or hf://buckets/OWNER/NAME/folder."
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")

_LARGE = 32 << 20
"""Bytes of a file from which on its upload reports progress."""


class HubStore:
    """A bucket of the Hub, or a folder of one: `hf://buckets/OWNER/NAME/folder`.

    The endpoint is that of HF_ENDPOINT when it is opened; the token is looked up at each call, as huggingface_hub does.
    ``report`` is called with the progress of large uploads. No progress bar is drawn.
    """

    def __init__(self, url: str, report: Report = silent):
        owner, name, folder = _parts(url)
        self._bucket = f"{owner}/{name}"
        self._folder = f"{folder}/" if folder else ""
        self._url = f"hf://buckets/{self._bucket}/{folder}".rstrip("/")
        self._hub = library()
        self._api, self._reporting = map(_connect, (silent, report))
        self._groups: dict[int, Any] = {}

    @property
    def url(self) -> str:
        return self._url

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        with asking("read", self._url, check_key(key)):
            found = self._api.get_bucket_file_metadata(self._bucket, self._folder + key)
            end = found.size if length is None else min(start + length, found.size)
            if start >= end:
                return b""
            return self._download(key, found, start, end)

    def _download(self, key: str, found: BucketFileMetadata, start: int, end: int) -> bytes:
        from hf_xet import XetFileInfo

        pid, xet = os.getpid(), found.xet_file_data
        group = self._groups.get(pid) or self._groups.setdefault(pid, self._new_group(xet.refresh_route))
        try:
            data = b"".join(group.download_stream(XetFileInfo(xet.file_hash, found.size), start, end))
            if len(data) != end - start:  # hf_xet may end a stream early instead of failing
                hint = "Try again. If it happens again, publish the object again."
                raise UnreachableError("the download ended before the object did", url=self.url, key=key, hint=hint)
        except BaseException:
            if self._groups.get(pid) is group:
                self._groups.pop(pid, None)  # after an error, every call of the group fails with it
            raise
        return data

    def _new_group(self, refresh_route: str) -> Any:
        """A connection to this bucket's contents, which renews its short-lived tokens."""
        headers = self._hub.utils.build_hf_headers(library_name="weightcast")
        named = {name: value for name, value in headers.items() if name.lower() != "authorization"}
        return xet_session(os.getpid()).new_download_stream_group(
            token_refresh_url=refresh_route, token_refresh_headers=headers, custom_headers=named
        )

    def put(self, key: str, data: Data) -> None:
        api = self._reporting if size_of(data) >= _LARGE else self._api
        with asking("write", self._url, check_key(key)):
            api.batch_bucket_files(self._bucket, add=[(_source(data), self._folder + key)])

    def put_all(self, objects: Mapping[str, Data], stored: Stored) -> None:
        """Small objects go in one request; large ones alone, so that a failure affects only one of them."""
        small = {key: data for key, data in objects.items() if size_of(data) < _LARGE}
        if small:
            add = [(_source(data), self._folder + check_key(key)) for key, data in small.items()]
            with asking("write", self._url):
                self._api.batch_bucket_files(self._bucket, add=add)
        for key in objects:
            if key not in small:
                self.put(key, objects[key])
            stored(key)

    def create(self, key: str, data: Data) -> bool:
        """Overwrites an existing object: the Hub has no conditional write."""
        self.put(key, data)
        return True

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        return self._list(check_prefix(prefix), after)

    def _list(self, prefix: str, after: str) -> Iterator[Listed]:
        """The Hub lists in any order, so the whole listing is read before the first object is yielded."""
        files = self._files(self._folder + prefix)
        found = {file.path.removeprefix(self._folder): file for file in files if file.path.startswith(self._folder)}
        for key in sorted(key for key in found if key.startswith(prefix) and key > after and is_key(key)):
            yield Listed(key, found[key].size, _uploaded(found[key]))

    def _files(self, prefix: str) -> Sequence[BucketFile]:
        found = []
        with asking("list", self._url):
            try:
                for entry in self._api.list_bucket_tree(self._bucket, prefix or None, recursive=True):
                    if isinstance(entry, self._hub.BucketFile):
                        found.append(entry)
            except self._hub.errors.EntryNotFoundError:
                if found:
                    raise  # at the beginning it means that nothing is there
        return found

    def delete(self, key: str) -> None:
        self._delete([check_key(key)], key)

    def delete_all(self, keys: Collection[str]) -> None:
        self._delete([check_key(key) for key in keys], None)

    def _delete(self, keys: Sequence[str], about: str | None) -> None:
        with asking("delete", self._url, about):
            try:
                self._api.batch_bucket_files(self._bucket, delete=[self._folder + key for key in keys])
            except self._hub.errors.BucketBatchError as error:
                if not is_not_there(error):
                    raise


def _source(data: Data) -> str | Path | bytes:
    """What huggingface_hub accepts: a file, which it streams, or bytes."""
    return data if isinstance(data, Path) else bytes(data)


def _parts(url: str) -> tuple[str, str, str]:
    """Owner, name and folder; `UsageError` for any other address."""
    kind, _, rest = url.removeprefix("hf://").rstrip("/").partition("/")
    owner, _, rest = rest.partition("/")
    name, _, folder = rest.partition("/")
    if kind == "buckets" and _NAME.fullmatch(owner) and _NAME.fullmatch(name) and (not folder or is_key(folder)):
        return owner, name, folder
    raise UsageError(f"not the address of a bucket: {url!r}", hint=_FORM)


def _uploaded(file: BucketFile) -> float:
    """When the Hub received it, by its clock; now, if it does not say: an object that may be new is never collected.

    A file's ``mtime`` comes from the uploader's disk and proves nothing.
    """
    return file.uploaded_at.timestamp() if file.uploaded_at else time.time()


def endpoint() -> str | None:
    """HF_ENDPOINT as it is now, not as it was when huggingface_hub was imported; None if it is not set."""
    return os.environ.get("HF_ENDPOINT") or None


# -- huggingface_hub and hf_xet ----------------------------------------------------------------------------------------


@cache
def library() -> Any:
    """huggingface_hub; `UsageError` where it is missing, or too old for buckets."""
    try:
        import hf_xet  # noqa: F401
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        huggingface_hub = None  # type: ignore[assignment]
    if not hasattr(huggingface_hub, "BucketFile"):
        hint = "Run: pip install 'weightcast[hf]'"
        raise UsageError("this needs huggingface_hub 2.4 or newer, which is not installed", hint=hint)
    logging.getLogger("huggingface_hub.utils._http").addFilter(_is_for_others)
    return huggingface_hub


@contextmanager
def asking(verb: str, url: str, key: str | None = None) -> Iterator[None]:
    """Translate errors of huggingface_hub and hf_xet into ours, and keep them from logging their retries."""
    import httpx2

    _here.asking = True
    try:
        yield
    except WeightcastError:
        raise
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, httpx2.HTTPError) as error:
        raise translated(error, verb, url, key) from None
    finally:
        _here.asking = False


@cache
def xet_session(pid: int) -> Any:
    """Xet's runtime for downloads in this process: a fork does not inherit its threads."""
    from hf_xet import XetConfig, XetSession

    # `Patient` retries, with the same pauses for all stores; hf_xet would pause for up to six minutes.
    options = {"client.retry_max_attempts": 1, "client.connect_timeout": timedelta(seconds=10)}
    return XetSession(XetConfig().with_config(options))


def _connect(report: Report) -> HfApi:
    """A client that calls ``report`` with the progress of uploads, and draws no bars.

    huggingface_hub's switch for progress bars is global to the process, which may be a trainer. This uses a private
    argument instead; with a release that lacks it, bars are drawn and nothing else changes.
    """
    plain: Any = library().HfApi

    class Telling(plain):  # type: ignore[misc]
        def _batch_bucket_files(self, *arguments: Any, **options: Any) -> None:
            super()._batch_bucket_files(*arguments, **options | {"_progress": _Progress(report)})

    inner = getattr(plain, "_batch_bucket_files", _connect)
    kind = Telling if "_progress" in signature(inner).parameters else plain
    return cast("HfApi", kind(endpoint=endpoint(), library_name="weightcast"))


class _Progress:
    """What huggingface_hub calls instead of its bars."""

    def __init__(self, report: Report):
        self._report = report
        self._most = 0

    def reset_for_next_commit(self) -> None:
        pass

    def update_progress(self, group: Any, items: Any) -> None:
        waiting = group.total_transfer_bytes - group.total_transfer_bytes_completed  # read, and not yet sent
        self._most = max(self._most, group.total_bytes_completed - waiting)
        self._report("sending", self._most, group.total_bytes)


_here = threading.local()


def _is_for_others(record: logging.LogRecord) -> bool:
    """Whether to log a record: not those of retries in calls of ours, which end in one error for all attempts."""
    return not getattr(_here, "asking", False) or record.funcName not in ("_http_backoff_base", "_should_retry")
