"""A channel over http: against real servers, with and without ranges, kind and unkind."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import Web, answering, certificate, serving_folder

from weightcast.errors import (
    AccessError,
    FormatError,
    MissingError,
    StoreError,
    UnreachableError,
    UnsupportedError,
    UsageError,
    VersionError,
)
from weightcast.store import open_store
from weightcast.store.base import Listed
from weightcast.store.file import FileStore
from weightcast.store.http import MAX_INDEX, HttpStore, read_index


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    (tmp_path / "site").mkdir()
    with serving_folder(tmp_path / "site") as web:
        yield web


@pytest.mark.parametrize("ranges", [True, False])
def test_objects_and_their_ranges(web: Web, ranges: bool) -> None:
    web.ranges = ranges
    content = os.urandom(3_000_000)
    FileStore(web.folder).put("a/b", content)
    FileStore(web.folder).put("empty", b"")
    store = HttpStore(web.url + "/")
    assert store.url == web.url
    for start, length in [(0, None), (0, 10), (1_000_000, 1_500_000), (2_999_999, 5), (10, None), (3_000_000, 5)]:
        end = None if length is None else start + length
        assert store.get("a/b", start, length) == content[start:end]
    assert store.get("a/b", 5_000_000) == b""
    assert store.get("a/b", 7, 0) == b""
    assert store.get("empty") == b""
    assert store.get("empty", 0, 10) == b""
    with pytest.raises(MissingError) as caught:
        store.get("a/c", 0, 0)
    assert (caught.value.url, caught.value.key) == (web.url, "a/c")


def test_only_the_range_travels(web: Web) -> None:
    FileStore(web.folder).put("a", bytes(1000))
    HttpStore(web.url).get("a", 100, 50)
    HttpStore(web.url).get("a", 100)
    HttpStore(web.url).get("a")
    assert web.log == [("/a", "bytes=100-149"), ("/a", "bytes=100-"), ("/a", None)]


@pytest.mark.parametrize("key", ["a b", "a%20b", "a#b", "a?b", "a+b", "ä/語", "a&b;c"])
def test_odd_keys(web: Web, key: str) -> None:
    FileStore(web.folder).put(key, key.encode())
    assert HttpStore(web.url).get(key) == key.encode()


def test_writing_is_not_supported(web: Web) -> None:
    store = open_store(web.url)
    for write in (lambda: store.put("a", b""), lambda: store.create("a", b""), lambda: store.delete("a")):
        with pytest.raises(UnsupportedError, match="Publish to the folder or bucket"):
            write()


def test_listing_comes_from_the_index(web: Web) -> None:
    store = HttpStore(web.url)
    assert list(store.list("")) == []
    objects = [Listed("m/2", 7, 1e9), Listed("m/10", 0, 1e9 + 0.5), Listed("n/1", 3, 2e9), Listed("m/1", 3, 2e9)]
    rows = [[listed.key, listed.size, listed.modified] for listed in objects]
    FileStore(web.folder).put("index.json", json.dumps({"format": 1, "objects": rows}).encode())
    assert list(store.list("")) == sorted(objects, key=lambda listed: listed.key)
    assert [listed.key for listed in store.list("m/", "m/1")] == ["m/10", "m/2"]
    assert [listed.key for listed in store.list("m/1")] == ["m/1", "m/10"]


@pytest.mark.parametrize(
    "index",
    [
        b"", b"[]", b"{}", b"\xff", b'{"format":1}', b'{"format":1,"objects":{}}', b'{"format":1,"objects":[],"x":1}',
        b'{"format":1,"format":1,"objects":[]}', b"[" * 100_000,
        *(
            json.dumps({"format": 1, "objects": [row]}).encode()
            for row in (
                [], {}, "abc", ["a", 1], ["a", 1, 2, 3], [1, 1, 1], ["../a", 1, 1], ["", 1, 1], ["a", -1, 1],
                ["a", 1.5, 1], ["a", True, 1], ["a", 1, -1], ["a", 1, "1"], ["a", 1, None], ["a", 1, 1e300],
                ["a", 1, float("nan")], ["a", "1", 1], ["/a", 1, 1], ["\ud800", 1, 1],
            )
        ),
    ],
)  # fmt: skip
def test_false_index_is_refused(web: Web, index: bytes) -> None:
    FileStore(web.folder).put("index.json", index)
    with pytest.raises(FormatError) as caught:
        list(HttpStore(web.url).list(""))
    assert caught.value.file == f"{web.url}/index.json"


def test_index_of_a_later_format_or_without_end_is_refused(web: Web) -> None:
    with pytest.raises(VersionError):
        read_index(b'{"format":2,"objects":[]}')
    with (web.folder / "index.json").open("wb") as index:
        index.truncate(MAX_INDEX + 2)
    with pytest.raises(FormatError, match=f"more than {MAX_INDEX} bytes"):
        list(HttpStore(web.url).list(""))
    assert web.log == [("/index.json", f"bytes=0-{MAX_INDEX}")]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, StoreError),
        (401, AccessError),
        (403, AccessError),
        (404, MissingError),
        (410, MissingError),
        (429, UnreachableError),
        (500, UnreachableError),
        (503, UnreachableError),
    ],
)
def test_refusals(web: Web, status: int, kind: type[StoreError]) -> None:
    web.statuses["/a"] = status
    with pytest.raises(kind) as caught:
        HttpStore(web.url).get("a")
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def test_redirects_are_followed_with_the_range(web: Web) -> None:
    FileStore(web.folder).put("b", b"content")
    web.redirects = {"/a": "/b", "/loop": "/loop", "/out": "file:///etc/passwd"}
    assert HttpStore(web.url).get("a", 3, 2) == b"te"
    for key in ("loop", "out"):
        with pytest.raises(StoreError):
            HttpStore(web.url).get(key)


def test_tls_and_its_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, web: Web) -> None:
    authority, *pair = certificate(tmp_path)
    FileStore(web.folder).put("a", b"content")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    with serving_folder(web.folder, (pair[0], pair[1])) as safe:
        with pytest.raises(UnreachableError, match=r"certificate is not trusted.*Set SSL_CERT_FILE"):
            HttpStore(safe.url).get("a")
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        assert HttpStore(safe.url).get("a") == b"content"
        safe.redirects["/a"] = f"{web.url}/a"
        with pytest.raises(StoreError, match="status 302"):
            HttpStore(safe.url).get("a")
        with pytest.raises(UnreachableError, match="connection broke"):
            HttpStore(safe.url.replace("https", "http")).get("a")
    with pytest.raises(UnreachableError, match="does not speak TLS"):
        HttpStore(web.url.replace("http", "https")).get("a")


def test_server_that_compresses_is_refused(web: Web) -> None:
    FileStore(web.folder).put("a", b"content")
    web.compressed = True
    with pytest.raises(StoreError, match="compresses what it sends"):
        HttpStore(web.url).get("a")


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", UnreachableError),
        (b"nonsense\r\n\r\n", UnreachableError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", UnreachableError),
        (b"HTTP/1.1 206 OK\r\nContent-Length: 3\r\nContent-Range: bytes 0-2/9\r\n\r\nabc", StoreError),
        (b"HTTP/1.1 206 OK\r\nContent-Length: 3\r\n\r\nabc", StoreError),
        (b"HTTP/1.1 206 OK\r\nContent-Length: 3\r\nContent-Range: bytes 1-3/9\r\n\r\nabc", StoreError),
        (b"HTTP/1.1 206 OK\r\nContent-Length: 8\r\nContent-Range: bytes 1-8/9\r\n\r\nabc", UnreachableError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc", UnreachableError),
    ],
)
def test_broken_answers(answer: bytes, kind: type[StoreError]) -> None:
    with answering(answer) as url, pytest.raises(kind) as caught:
        HttpStore(url).get("a", 1, 10)
    assert type(caught.value) is kind


def test_more_bytes_than_asked_for_are_not_taken() -> None:
    endless = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-9/99\r\n\r\n" + bytes(100_000)
    with answering(endless) as url:
        assert len(HttpStore(url).get("a", 0, 10)) == 10


def test_unreachable_server_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(UnreachableError, match="nothing answers"):
        HttpStore("http://127.0.0.1:1/x").get("a")
    with pytest.raises(UnreachableError, match="name cannot be resolved"):
        HttpStore("http://host.invalid/x").get("a")
    with (
        answering(lambda connection: None) as url,
        pytest.raises(UnreachableError, match=r"no answer within 0\.2 s"),
    ):
        HttpStore(url, timeout=0.2).get("a")


def test_addresses_with_secrets_are_refused() -> None:
    for url in ("http://user:pass@host/x", "http://host/x?sig=pass", "http://host/#pass", "http:///x"):
        with pytest.raises(UsageError) as caught:
            HttpStore(url)
        assert "pass" not in str(caught.value).replace("password", "")
