"""A channel on a web server: read-only, listed by an index that the publisher keeps there."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from weightcast.errors import (
    AccessError,
    FormatError,
    MissingError,
    StoreError,
    UnreachableError,
    UnsupportedError,
    UsageError,
    VersionError,
    about,
)
from weightcast.format.json import parse_json
from weightcast.store.base import Data, Listed, check_key, check_prefix, check_range, is_key

INDEX = "index.json"
MAX_INDEX = 64 << 20

_CHUNK = 1 << 20


class HttpStore:
    """Objects below an `http` or `https` address. Proxies and certificates are as Python's `urllib` finds them.

    ``timeout`` is for one step on the socket, not for a whole answer.
    """

    def __init__(self, url: str, *, timeout: float = 30.0):
        self._base = _address_of(url)
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._opener = urllib.request.build_opener(_Redirects)

    @property
    def url(self) -> str:
        return self._url

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        request = urllib.request.Request(f"{self._base}/{urllib.parse.quote(check_key(key))}")
        request.add_header("Accept-Encoding", "identity")
        if start or length:
            request.add_header("Range", f"bytes={start}-{start + length - 1 if length else ''}")
        with self._translating(key):
            try:
                with self._opener.open(request, timeout=self._timeout) as answer:
                    return self._body(answer, key, start, length)
            except urllib.error.HTTPError as error:
                error.close()
                if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                    return b""
                raise

    def _body(self, answer: Any, key: str, start: int, length: int | None) -> bytes:
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            hint = "Turn compression off for this folder of the web server."
            raise StoreError("the web server compresses what it sends", url=self.url, key=key, hint=hint)
        if answer.status != http.client.PARTIAL_CONTENT:
            _skip(answer, start)  # the server does not support ranges, like Python's own
        elif not _is_range(answer.headers.get("Content-Range", ""), start, length):
            raise StoreError("the web server answered with another range than requested", url=self.url, key=key)
        content: bytes = answer.read(length)
        if answer.length and (length is None or len(content) < length):
            raise http.client.IncompleteRead(content)  # `read` with a length does not raise it
        return content

    def put(self, key: str, data: Data) -> None:
        raise self._read_only(key)

    def create(self, key: str, data: Data) -> bool:
        raise self._read_only(key)

    def delete(self, key: str) -> None:
        raise self._read_only(key)

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        return self._list(check_prefix(prefix, after), after)

    def _list(self, prefix: str, after: str) -> Iterator[Listed]:
        try:
            index = self.get(INDEX, 0, MAX_INDEX + 1)
        except MissingError:
            return
        with about(file=f"{self._url}/{INDEX}"):
            yield from (listed for listed in read_index(index) if listed.key.startswith(prefix) and listed.key > after)

    def _read_only(self, key: str) -> UnsupportedError:
        hint = "Publish to the folder or bucket that the web server serves."
        return UnsupportedError("nothing can be written over http", url=self.url, key=check_key(key), hint=hint)

    @contextmanager
    def _translating(self, key: str) -> Iterator[None]:
        try:
            yield
        except urllib.error.HTTPError as error:
            raise _refusal(error.code, self.url, key) from None
        except urllib.error.URLError as error:
            raise self._silence(error.reason, key) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._silence(error, key) from None
        except (ValueError, OverflowError, MemoryError):  # an invalid redirect or length
            hint = "Check the address, and what answers there."
            raise StoreError("the web server's answer is invalid", url=self.url, key=key, hint=hint) from None

    def _silence(self, reason: object, key: str) -> UnreachableError:
        problem, hint = "the connection broke", None
        if isinstance(reason, socket.gaierror):
            problem, hint = "the host's name cannot be resolved", "Check the address and the name server."
        elif isinstance(reason, ssl.SSLCertVerificationError):
            problem = f"the host's certificate is not trusted: {reason.verify_message}"
            hint = "Set SSL_CERT_FILE to the certificates of your authority."
        elif isinstance(reason, ssl.SSLError):
            problem, hint = "the host does not speak TLS as expected", "Check `http` or `https`, and the port."
        elif isinstance(reason, ConnectionRefusedError):
            problem, hint = "nothing answers at that address", "Check host and port, and whether the server runs."
        elif isinstance(reason, TimeoutError):
            problem, hint = f"no answer within {self._timeout:g} s", "Check the link and the proxy."
        return UnreachableError(problem, url=self.url, key=key, hint=hint)


def _address_of(url: str) -> str:
    """The address of a folder on a web server, in the characters of a request and without `/` at its end."""
    hint = "Give host and folder; no password, `?` or `#`."
    try:
        parsed = urllib.parse.urlsplit(url)
        host, port = parsed.hostname or "", parsed.port
        if "@" in parsed.netloc or parsed.query or parsed.fragment or not host:
            shown = urllib.parse.urlunsplit((parsed.scheme, parsed.netloc.rpartition("@")[2], parsed.path, "", ""))
            raise UsageError("not the address of a folder on a web server", file=shown, hint=hint)
        named = host.encode("idna").decode()
        if not url.isprintable() or " " in host:
            raise ValueError("characters that no address has")
        path = urllib.parse.quote(parsed.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError("not an address on the web", file=ascii(url[:200]), hint=hint) from None
    place = f"[{named}]" if ":" in named else named
    return f"{parsed.scheme}://{place}{'' if port is None else f':{port}'}{path}"


def read_index(data: bytes) -> list[Listed]:
    """The objects that an index names, in the order of their keys; `FormatError` if it is invalid."""
    if len(data) > MAX_INDEX:
        raise FormatError(f"the index has more than {MAX_INDEX} bytes")
    index = parse_json(data, "index")
    if not isinstance(index, dict) or index.keys() != {"format", "objects"} or not isinstance(index["objects"], list):
        raise FormatError("the index has other fields than format and objects")
    if type(index["format"]) is not int or index["format"] != 1:
        raise VersionError(f"an index of format {str(index['format'])[:20]}", hint="Update weightcast.")
    found = {listed.key: listed for listed in map(_row, index["objects"])}
    if len(found) != len(index["objects"]):
        raise FormatError("the index names an object twice")
    return [found[key] for key in sorted(found)]


def _row(row: Any) -> Listed:
    if not isinstance(row, list) or len(row) != 3:
        raise FormatError("a row of the index does not have three fields")
    key, size, modified = row
    if not isinstance(key, str) or not is_key(key):
        raise FormatError("a row of the index has no key")
    is_size = type(size) is int and 0 <= size < 1 << 63
    if not is_size or type(modified) not in (int, float) or not 0 <= modified < 1e12:
        raise FormatError("a row of the index has an impossible size or time")
    return Listed(key, size, float(modified))


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to `http` and `https` only, and never from `https` to `http`."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if not newurl.lower().startswith("https:" if req.type == "https" else ("https:", "http:")):
            raise urllib.error.HTTPError(req.full_url, code, "redirected to an unprotected address", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)

    def http_error_302(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage
    ) -> Any:
        try:
            return super().http_error_302(req, fp, code, msg, headers)
        except (ValueError, OSError):
            fp.close()  # urllib leaves it open if a redirect is invalid
            raise

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def _refusal(status: int, url: str, key: str) -> StoreError:
    if status in (404, 410):
        return MissingError("no such object", url=url, key=key)
    if status in (401, 403, 407):
        hint = "The web server must allow reading without credentials: none are sent."
        return AccessError(f"the web server refused access ({status})", url=url, key=key, hint=hint)
    if status in (408, 425, 429) or status >= 500:
        return UnreachableError(f"the web server cannot answer now ({status})", url=url, key=key)
    return StoreError(f"the web server answers with status {status}", url=url, key=key, hint="Check the address.")


def _skip(answer: IO[bytes], nbytes: int) -> None:
    while nbytes and (got := len(answer.read(min(nbytes, _CHUNK)))):
        nbytes -= got


def _is_range(found: str, start: int, length: int | None) -> bool:
    """Whether a Content-Range covers what was requested, up to the end of the object."""
    parts = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", found)
    if not parts or int(parts[1]) != start:
        return False
    end = int(parts[2]) + 1
    if parts[3] != "*" and end >= int(parts[3]):
        return True
    return length is not None and end >= start + length
