"""Hostile names, addresses and answers: whatever a store is given, only errors of ours leave it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import answering

from weightcast.errors import FormatError, MissingError, StoreError, UsageError, WeightcastError
from weightcast.store import open_store
from weightcast.store.base import Store, check_key, check_prefix, is_key
from weightcast.store.file import FileStore
from weightcast.store.http import HttpStore, read_index
from weightcast.store.memory import MemoryStore
from weightcast.store.object import ObjectStore
from weightcast.store.retry import Patient

HALF = "\ud800"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture(params=["memory", "file", "http", "s3", "patient"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    stores = {
        "memory": MemoryStore,
        "file": lambda: FileStore(tmp_path),
        "http": lambda: HttpStore("http://127.0.0.1:1/x"),
        "s3": lambda: ObjectStore("s3://bucket/x"),
        "patient": lambda: Patient(FileStore(tmp_path)),
    }
    return stores[request.param]()


def refused(call: object, *arguments: object) -> WeightcastError:
    with pytest.raises(WeightcastError) as caught:
        call(*arguments)  # type: ignore[operator]
    str(caught.value).encode()  # an error that cannot be printed is none
    return caught.value


HOSTILE = [HALF, f"a/{HALF}", "a\udcff", "a\0b", "ä" * 128, "語" * 86, "a/" * 450 + "a", "x" * 901, "a\u2028b", "a\x85"]


@pytest.mark.parametrize("key", HOSTILE, ids=ascii)
def test_keys_that_no_store_can_hold(store: Store, key: str) -> None:
    assert not is_key(key)
    for call in (store.get, store.delete, lambda key: store.put(key, b""), lambda key: store.create(key, b"")):
        error = refused(call, key)
        assert isinstance(error, (UsageError, StoreError))
    refused(lambda: list(store.list(key)))
    refused(check_key, key)


@pytest.mark.parametrize("after", [HALF, "a\0", "\udcff", "x" * 5000], ids=ascii)
def test_listing_after_a_name_that_no_store_can_hold(store: Store, after: str) -> None:
    refused(lambda: list(store.list("a", after)))


@pytest.mark.parametrize("start", [1 << 63, 1 << 64, 10**30])
def test_ranges_beyond_what_a_file_can_have(store: Store, start: int) -> None:
    for from_there, length in ((start, None), (start, 1), (0, start), (start - 1, start)):
        assert isinstance(refused(store.get, "a", from_there, length), UsageError)


def test_largest_range_is_a_range(tmp_path: Path) -> None:
    for store in (MemoryStore(), FileStore(tmp_path), Patient(FileStore(tmp_path))):
        store.put("a", b"content")
        assert store.get("a", 0, (1 << 63) - 1) == b"content"
        assert store.get("a", (1 << 63) - 1, (1 << 63) - 1) == b""


@pytest.mark.parametrize("length", [248, 255])
def test_longest_names_fit(tmp_path: Path, length: int) -> None:
    store, name = FileStore(tmp_path), "x" * length
    store.put(name, b"put")
    assert store.create(f"a/{name}", b"created")
    assert not store.create(f"a/{name}", b"again")
    assert [listed.key for listed in store.list("")] == [f"a/{name}", name]


@pytest.fixture
def abyss(tmp_path: Path) -> Iterator[Path]:
    """A folder with an object below 1,500 folders in each other, too many for pytest to clear away by itself."""
    folder = os.open(tmp_path, os.O_RDONLY)

    def move(name: str) -> None:
        nonlocal folder
        moved = os.open(name, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = moved

    for _ in range(1500):
        os.mkdir("d", dir_fd=folder)
        move("d")
    os.close(os.open("object", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
    yield tmp_path
    os.unlink("object", dir_fd=folder)
    for _ in range(1500):
        move("..")
        os.rmdir("d", dir_fd=folder)
    os.close(folder)


def test_folders_deeper_than_any_key_are_not_walked(abyss: Path) -> None:
    """Nested folders are free to make and could exhaust a reader's stack."""
    FileStore(abyss).put("a/b", b"")
    assert [listed.key for listed in FileStore(abyss).list("")] == ["a/b"]


def test_files_whose_keys_are_too_long_are_not_listed(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 250) / ("x" * 250) / ("x" * 250)
    deep.mkdir(parents=True)
    (deep / ("y" * 147)).write_bytes(b"")
    (deep / ("y" * 148)).write_bytes(b"")
    (tmp_path / os.fsdecode(b"\xff")).write_bytes(b"")
    (listed,) = FileStore(tmp_path).list("")
    assert len(listed.key) == 900
    assert FileStore(tmp_path).get(listed.key) == b""


@pytest.mark.parametrize("root", [HALF, "a\0b", "x" * 5000, "a/" * 3000, "x" * 256], ids=lambda root: ascii(root)[:10])
def test_roots_that_no_file_system_can_have(root: str) -> None:
    def use() -> None:
        store = FileStore(root)
        with pytest.raises((StoreError, UsageError)):
            store.put("a", b"")
        list(store.list(""))

    refused(use)


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1", "http://host:99999999/", "http://host:port/", "http://host:-1/", f"http://{HALF}/",
        f"http://host/{HALF}", "http://" + "a" * 70 + "ü.de/", "http://a b/", "http://host/a\nb", "http://host/a\0b",
        "http://ho\tst/", "http://host/\x7f", "http://..ü/", "https://host:0x50/",
    ],
    ids=ascii,
)  # fmt: skip
def test_malformed_web_addresses_are_refused(url: str) -> None:
    assert isinstance(refused(open_store, url), UsageError)


def test_web_address_with_other_letters_is_asked_for_in_ascii() -> None:
    asked: list[bytes] = []

    def answer(connection: object) -> None:
        asked.append(connection.recv(1000))  # type: ignore[attr-defined]
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")  # type: ignore[attr-defined]

    with answering(answer) as url:
        store = HttpStore(f"{url}/mod èle/ü%20b")
        assert store.get("語") == b"ok"
    assert asked[0].startswith(b"GET /mod%20%C3%A8le/%C3%BC%20b/%E8%AA%9E HTTP/1.1\r\n")
    assert store.url == f"{url}/mod èle/ü%20b"


@pytest.mark.parametrize(
    "answer",
    [
        *(
            b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: %s\r\n\r\n" % target
            for target in (
                b"http://[::1", b"http://host:99999999/", b"http://" + b"a" * 70 + b".de/", b"http://..x/", b"\xff",
                b"ftp://127.0.0.1:1/x", b"file:///etc/passwd", b"http://a b/", b"http://127.0.0.1:1/\xc3\xa4", b"//",
            )
        ),
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1125899906842624\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFFFFF\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabc",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 99999 OK\r\n\r\n",
        b"HTTP/1.1 206 OK\r\nContent-Range: bytes 1-" + b"9" * 40 + b"/*\r\nContent-Length: 3\r\n\r\nabc",
    ],
)  # fmt: skip
def test_answers_of_a_hostile_web_server(answer: bytes) -> None:
    for start, length in ((0, None), (1, 10)):
        with answering(answer) as url:
            assert isinstance(refused(HttpStore(url).get, "a", start, length), StoreError)


@pytest.mark.parametrize(
    "rows",
    [
        '["a", 9223372036854775808, 1]', '["a", 1e400, 1]', '["a", 1, 1], ["a", 2, 2]', '["\\ud800", 1, 1]',
        '["a\\u0000", 1, 1]', f'["{"x" * 256}", 1, 1]', '["a", ' + "9" * 5000 + ", 1]", '["a", 1, -1e-9]', "null",
    ],
    ids=ascii,
)  # fmt: skip
def test_index_with_nonsense_in_it(rows: str) -> None:
    error = refused(read_index, f'{{"format": 1, "objects": [{rows}]}}'.encode())
    assert isinstance(error, FormatError)
    assert len(str(error)) < 500


@pytest.mark.parametrize("number", ["true", '"' + "x" * 100_000 + '"', "1" * 4000, "[" * 900 + "]" * 900, "1.0"])
def test_index_of_an_absurd_format(number: str) -> None:
    error = refused(read_index, f'{{"format": {number}, "objects": []}}'.encode())
    assert isinstance(error, FormatError)
    assert len(str(error)) < 500


def test_prefix_is_checked_as_keys_are() -> None:
    for prefix in (HALF, "a/" + HALF, "x" * 256, "a\0"):
        assert isinstance(refused(check_prefix, prefix), UsageError)
    for prefix in ("", "a", "a/", "x" * 255):
        assert check_prefix(prefix) == prefix


def test_malformed_bucket_addresses_are_refused() -> None:
    for url in (
        f"s3://{HALF}",
        f"s3://bucket/{HALF}",
        "s3://bucket/a\0b",
        "gs://bucket/" + "x" * 256,
        "az://b\udcff/x",
    ):
        assert isinstance(refused(open_store, url), UsageError)


def test_folder_of_a_user_that_does_not_exist() -> None:
    assert isinstance(refused(open_store, "~nobody-of-that-name/x"), UsageError)


def test_missing_object_is_missing_whatever_its_name(tmp_path: Path) -> None:
    with pytest.raises(MissingError):
        FileStore(tmp_path).get("x" * 255 + "/" + "y" * 255)
