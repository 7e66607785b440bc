"""Object stores of the clouds and S3-compatible servers, through obstore, which is imported when one is opened."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightcast.errors import UnreachableError, UsageError
from weightcast.store.base import Data, Listed, check_key, check_prefix, check_range, is_key, size_of
from weightcast.store.errors_obstore import status_of, translated

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store

_LOGINS = {
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or `pip install boto3` and set AWS_PROFILE.",
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`.",
    "az": "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or run `az login`.",
}

_PART = 8 << 20
_MOST_PARTS = 10_000
_PAGE = 1000

_RANGE_NOT_SATISFIABLE = 416


class ObjectStore:
    """A bucket, or a folder of one: `s3://bucket/folder`, `gs://…`, `az://…`.

    Endpoint, region and credentials come from the environment variables that the clouds' own tools read.
    """

    def __init__(self, url: str):
        scheme, _, rest = url.partition("://")
        bucket, _, folder = rest.rstrip("/").partition("/")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}", bucket) or (folder and not is_key(folder)):
            hint = f"It is {scheme}://bucket or {scheme}://bucket/folder."
            raise UsageError(f"not the address of a bucket: {url!r}", hint=hint)
        self._obstore = _library()
        self._kind = "s3" if scheme == "s3a" else scheme
        self._url = f"{scheme}://{bucket}/{folder}".rstrip("/")
        with self._translating("open it"):
            self._store = _connect(self._kind, bucket, folder, retries=0)
            # Parts of an upload are retried one by one: the largest uploads would never end if they began again.
            self._uploads = _connect(self._kind, bucket, folder, retries=3)

    @property
    def url(self) -> str:
        return self._url

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        with self._translating("read", check_key(key)):
            try:
                if length == 0:
                    self._obstore.head(self._store, key)
                    return b""
                if length is not None:
                    return bytes(self._obstore.get_range(self._store, key, start=start, length=length))
                options: Any = {"range": {"offset": start}} if start else {}
                return bytes(self._obstore.get(self._store, key, options=options).bytes())
            except self._obstore.exceptions.BaseError as error:
                if status_of(error) == _RANGE_NOT_SATISFIABLE:
                    return b""
                raise

    def put(self, key: str, data: Data) -> None:
        size, source = _source(data)
        part = max(_PART, -(-size // _MOST_PARTS))
        with self._translating("write", check_key(key)):
            self._obstore.put(self._uploads, key, source, use_multipart=size > part, chunk_size=part)

    def create(self, key: str, data: Data) -> bool:
        """The data are held in memory, since no store has a conditional multipart upload."""
        _, source = _source(data)
        with self._translating("write", check_key(key)):
            try:
                self._obstore.put(self._store, key, source, mode="create", use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError as error:
                if status_of(error) == 409:  # two writers at once, of which perhaps neither succeeded
                    problem = "another writer wrote the object at the same time"
                    raise UnreachableError(problem, url=self.url, key=key) from None
                return False
            return True

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        return self._list(check_prefix(prefix, after), after)

    def _list(self, prefix: str, after: str) -> Iterator[Listed]:
        """obstore lists whole folders: the store skips what comes before the prefix, and we stop after it."""
        folder = prefix.rpartition("/")[0]
        with self._translating("list"):
            pages = self._obstore.list(
                self._store, folder or None, offset=max(after, _just_before(prefix)) or None, chunk_size=_PAGE
            )
            for page in pages:
                for found in page:
                    key = found["path"]
                    if key.startswith(prefix) and key > after and is_key(key):
                        yield Listed(key, found["size"], found["last_modified"].timestamp())
                    elif key > prefix and not key.startswith(prefix):
                        return

    def delete(self, key: str) -> None:
        with self._translating("delete", check_key(key)):
            try:
                self._obstore.delete(self._store, key)
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                    raise

    @contextmanager
    def _translating(self, verb: str, key: str | None = None) -> Iterator[None]:
        try:
            yield
        except (self._obstore.exceptions.BaseError, FileNotFoundError) as error:
            raise translated(error, verb, self._url, key, _LOGINS[self._kind]) from None


def _source(data: Data) -> tuple[int, Path | memoryview]:
    """The size, and the data as obstore accepts them; `UsageError` for a file that cannot be read."""
    return size_of(data), data if isinstance(data, Path) else memoryview(data).cast("B")


def _library() -> Any:
    try:
        import obstore.exceptions
    except ImportError:
        hint = "Run: pip install 'weightcast[stores]'"
        raise UsageError("object stores need obstore, which is not installed", hint=hint) from None
    return obstore


def _connect(kind: str, bucket: str, folder: str, retries: int) -> S3Store | GCSStore | AzureStore:
    from obstore.store import AzureStore, GCSStore, S3Store

    # `timeout` is for a whole answer and `read_timeout` for each step of it, such as sending a part.
    client: Any = {
        "timeout": timedelta(hours=1),
        "read_timeout": timedelta(seconds=120),
        "connect_timeout": timedelta(seconds=10),
    }
    options: dict[str, Any] = {
        "prefix": folder or None,
        "client_options": client,
        "retry_config": {"max_retries": retries, "retry_timeout": timedelta(minutes=3)},
    }
    if kind == "gs":
        return GCSStore(bucket, **options)
    if kind == "az":
        return AzureStore(bucket, **options)
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = next(filter(None, map(os.environ.get, names)), "")
    if endpoint.startswith("http://"):
        client["allow_http"] = True
    return S3Store(bucket, credential_provider=_profile(), **options)


def _profile() -> Any:
    """boto3's credentials, for profiles and single sign-on; None if they are not needed or boto3 is not installed."""
    if os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_SKIP_SIGNATURE") or not find_spec("boto3"):
        return None
    from botocore.exceptions import BotoCoreError
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider()
    except ValueError:
        return None
    except BotoCoreError as error:
        raise UsageError(f"boto3 finds no credentials: {error}", hint="Check AWS_PROFILE.") from error


def _just_before(prefix: str) -> str:
    """A text that sorts shortly before everything that begins with ``prefix``."""
    last = prefix[-1:]
    return prefix[:-1] + (chr(ord(last) - 1) if last > "1" and last.isalnum() and last.isascii() else "")
