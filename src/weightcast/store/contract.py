"""The promises of a `Store` as tests: subclass `StoreContract` to test another kind of store."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from weightcast.errors import MissingError, UsageError
from weightcast.store.base import Data, Store, debris, delete_all, discard_debris, put_all
from weightcast.store.probe import clock, honours_create

LARGE = 20_000_000

HOSTILE_KEYS = [
    "", "/", "a/", "/a", "a//b", ".", "..", "../a", "a/../b", "a/./b", "a/..", ".hidden", "a/.tmp/b",
    "a\0b", "a\nb", "a\x7fb", "a\\b", "..\\a", "a" * 256, "a/" * 450 + "a", "ä" * 128,
    "a" * 255 + "/" + "b" * 255 + "/" + "c" * 255 + "/" + "d" * 255, "\ud800", "a/\udcff", "a\x85b", "a\u2028b",
]  # fmt: skip

ODD_KEYS = [
    "a b", "a%20b", "a%2Fb", "a#b", "a?b=c&d", "a*b", "a[b]{c}", "a^b~", "a:b@c=d+e,f;g", "'a'", '"a"', "a!$(b)",
    "a|<b>`c`", "-a", "~", "a.", "a..b", "ä/ö", "語", "🙂", " a ", "x" * 255, "a.partial", "index.json",
]  # fmt: skip


class StoreContract:
    """One test for each promise. A subclass gives a store that can be written to; it need not be empty:

    import pytest
    from weightcast.store.contract import StoreContract

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self):
            return MyStore(...)
    """

    honours_create = True
    """False for a store whose `create` may overwrite: channels then fence writers by listing."""

    overlapping = True
    """False for a store in which `a` and `a/b` cannot both be objects, as in a file system."""

    many = 1100
    """Objects in the long listing: more than a page has. Take fewer where a write takes long."""

    clock_slack = 2.0
    """Seconds by which ``modified`` may seem to go back, for stores that round it."""

    @pytest.fixture
    def place(self, store: Store) -> Iterator[str]:
        """A folder for one test, empty before and afterwards."""
        place = f"contract-{secrets.token_hex(8)}/"
        yield place
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(store.delete, [listed.key for listed in store.list(place)]))

    def keys(self, store: Store, prefix: str, after: str = "") -> list[str]:
        return [listed.key for listed in store.list(prefix, after)]

    @pytest.mark.parametrize("size", [0, 1, LARGE])
    @pytest.mark.parametrize("kind", ["bytes", "memoryview", "path"])
    def test_round_trip(self, store: Store, place: str, tmp_path: Path, size: int, kind: str) -> None:
        content = secrets.token_bytes(size)
        file = tmp_path / "content"
        file.write_bytes(content)
        kinds: dict[str, Data] = {"bytes": content, "memoryview": memoryview(b"--" + content)[2:], "path": file}
        data = kinds[kind]
        store.put(place + "put", data)
        assert store.create(place + "create", data)
        assert store.get(place + "put") == content
        assert store.get(place + "create") == content
        assert [listed.size for listed in store.list(place)] == [size, size]

    def test_ranges(self, store: Store, place: str) -> None:
        content = bytes(range(256)) * 10
        store.put(place + "a", content)
        for start, length in [(0, 1), (0, 100), (1000, 100), (2559, 1), (2559, 100), (2000, 10_000), (0, 2560)]:
            assert store.get(place + "a", start, length) == content[start : start + length]
        assert store.get(place + "a", 1000) == content[1000:]

    def test_ranges_at_and_after_the_end_are_empty(self, store: Store, place: str) -> None:
        store.put(place + "a", b"content")
        store.put(place + "empty", b"")
        for start, length in [(7, 1), (7, None), (8, 1), (10**9, 10), (3, 0), (0, 0), (10**12, None)]:
            assert store.get(place + "a", start, length) == b""
        assert store.get(place + "empty", 0, 10) == b""

    def test_ranges_count_from_the_beginning(self, store: Store, place: str) -> None:
        store.put(place + "a", b"content")
        for start, length in [(-1, 1), (0, -1), (-3, None), (1 << 63, None), (0, 10**30)]:
            with pytest.raises(UsageError):
                store.get(place + "a", start, length)

    def test_put_replaces(self, store: Store, place: str) -> None:
        for content in (b"first, and longer", b"second", b""):
            store.put(place + "a", content)
            assert store.get(place + "a") == content
        assert self.keys(store, place) == [place + "a"]

    def test_probe_finds_whether_create_is_conditional(self, store: Store) -> None:
        assert honours_create(store) == self.honours_create

    def test_create_does_not_replace(self, store: Store, place: str) -> None:
        if not self.honours_create:
            pytest.skip("this store does not promise it")
        assert store.create(place + "a", b"first")
        assert not store.create(place + "a", b"second")
        assert store.get(place + "a") == b"first"
        store.put(place + "b", b"put")
        assert not store.create(place + "b", b"second")
        assert store.get(place + "b") == b"put"
        store.delete(place + "a")
        assert store.create(place + "a", b"third")

    def test_create_has_one_winner(self, store: Store, place: str) -> None:
        if not self.honours_create:
            pytest.skip("this store does not promise it")
        for race in range(5):
            ready = threading.Barrier(16)

            def run(i: int, key: str = f"{place}{race}", ready: threading.Barrier = ready) -> bool:
                ready.wait()
                return store.create(key, str(i).encode())

            with ThreadPoolExecutor(16) as threads:
                won = list(threads.map(run, range(16)))
            assert sum(won) == 1
            assert store.get(f"{place}{race}") == str(won.index(True)).encode()

    def test_listing_order_is_that_of_the_bytes(self, store: Store, place: str) -> None:
        names = ["a", "a-b", "a.b", "a/b", "a/b/c", "a/b-c", "a0", "B", "ab", "b/a", "ä", "z/z/z", "語"]
        if not self.overlapping:
            names = [name for name in names if name not in ("a", "a/b")]
        for name in names:
            store.put(place + name, name.encode())
        expected = sorted((place + name for name in names), key=str.encode)
        assert self.keys(store, place) == expected
        for i, key in enumerate(expected):
            assert self.keys(store, place, key) == expected[i + 1 :]

    def test_long_listing_is_complete_and_ordered(self, store: Store, place: str) -> None:
        names = [f"{place}{i % 3}/{i:012d}.json" for i in range(self.many)]
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(lambda key: store.put(key, key.encode()), names))
        names.sort()
        assert self.keys(store, place) == names
        assert self.keys(store, f"{place}1/") == [name for name in names if name.startswith(f"{place}1/")]
        middle = len(names) // 2
        assert self.keys(store, place, names[middle]) == names[middle + 1 :]
        assert self.keys(store, place, names[middle] + "0") == names[middle + 1 :]
        assert self.keys(store, place, names[-1]) == []

    def test_prefix_need_not_be_a_folder(self, store: Store, place: str) -> None:
        for name in ("m/0001", "m/0002", "m/0010", "m-x", "n/1"):
            store.put(place + name, b"")
        assert self.keys(store, f"{place}m") == [place + name for name in ("m-x", "m/0001", "m/0002", "m/0010")]
        assert self.keys(store, f"{place}m/00") == [place + name for name in ("m/0001", "m/0002", "m/0010")]
        assert self.keys(store, f"{place}m/000") == [place + name for name in ("m/0001", "m/0002")]
        assert self.keys(store, f"{place}m/0002") == [f"{place}m/0002"]
        assert self.keys(store, f"{place}m/00", f"{place}m/0001") == [place + name for name in ("m/0002", "m/0010")]
        assert self.keys(store, f"{place}m/", f"{place}n/0") == []
        assert self.keys(store, f"{place}n/", f"{place}m/0") == [f"{place}n/1"]

    def test_listing_of_nothing_is_empty(self, store: Store, place: str) -> None:
        store.put(place + "a", b"")
        assert self.keys(store, place + "b") == []
        assert self.keys(store, place + "b/c/") == []
        assert self.keys(store, place + "a/") == []

    def test_listing_shows_what_is_written_and_not_what_is_deleted(self, store: Store, place: str) -> None:
        for i in range(20):
            store.put(f"{place}{i:02}", b"")
            assert len(self.keys(store, place)) == i + 1
        for i in range(20):
            store.delete(f"{place}{i:02}")
            assert len(self.keys(store, place)) == 19 - i

    def test_delete_of_a_missing_object_succeeds(self, store: Store, place: str) -> None:
        store.put(place + "a", b"")
        for key in (place + "a", place + "a", place + "b", place + "c/d/e"):
            store.delete(key)
        assert self.keys(store, place) == []

    def test_many_are_written_and_removed_together(self, store: Store, place: str, tmp_path: Path) -> None:
        """With as few requests as the store allows, or one for each."""
        (tmp_path / "file").write_bytes(b"file")
        objects: dict[str, Data] = {f"{place}{i:02}": str(i).encode() for i in range(30)}
        objects |= {place + "a/b": b"", place + "file": tmp_path / "file"}
        stored: list[str] = []
        put_all(store, objects, stored.append)
        assert sorted(stored) == sorted(objects)
        assert self.keys(store, place) == sorted(objects)
        assert store.get(place + "07") == b"7"
        assert store.get(place + "file") == b"file"
        delete_all(store, [*list(objects)[:20], place + "missing"])
        assert self.keys(store, place) == sorted(list(objects)[20:])
        put_all(store, {})
        put_all(store, {place + "29": b"replaced"})
        assert store.get(place + "29") == b"replaced"
        delete_all(store, [])
        with pytest.raises(UsageError):
            put_all(store, {place + "a/../b": b""})
        with pytest.raises(UsageError):
            delete_all(store, [place + "a/../b"])

    def test_missing_object_is_named(self, store: Store, place: str) -> None:
        store.put(place + "a/b", b"")
        for key in (place + "missing", place + "a/c", place + "a", place + "a/b/c"):
            for start, length in [(0, None), (0, 10), (5, None), (0, 0)]:
                with pytest.raises(MissingError) as caught:
                    store.get(key, start, length)
                assert caught.value.key == key
                assert caught.value.url == store.url
                assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("key", HOSTILE_KEYS)
    def test_hostile_keys_are_refused(self, store: Store, key: str) -> None:
        for call in (store.get, store.delete, lambda key: store.put(key, b""), lambda key: store.create(key, b"")):
            with pytest.raises(UsageError):
                call(key)

    @pytest.mark.parametrize("prefix", ["/", "..", "../", "a//", "a/../", ".", "a\0", "a\\", "\ud800", "a" * 256])
    def test_hostile_prefixes_are_refused(self, store: Store, prefix: str) -> None:
        with pytest.raises(UsageError):
            list(store.list(prefix))

    def test_odd_keys_are_kept_as_they_are(self, store: Store, place: str) -> None:
        for key in ODD_KEYS:
            store.put(place + key, key.encode())
            if self.honours_create:
                assert not store.create(place + key, b"other")
        assert self.keys(store, place) == sorted((place + key for key in ODD_KEYS), key=str.encode)
        for key in ODD_KEYS:
            assert store.get(place + key) == key.encode()
            assert place + key in self.keys(store, place + key)
            store.delete(place + key)
        assert self.keys(store, place) == []

    def test_object_appears_whole_or_not_at_all(self, store: Store, place: str) -> None:
        """Readers run beside a writer that replaces an object by others, each of one byte repeated."""
        size, seen, writing = 3_000_000, [0], threading.Event()
        writing.set()

        def read() -> None:
            while writing.is_set():
                there = seen[0] > 0
                try:
                    content = store.get(place + "a")
                except MissingError:
                    assert not there
                    continue
                seen[0] += 1
                assert content == content[:1] * size
                assert [listed.size for listed in store.list(place)] == [size]

        with ThreadPoolExecutor(3) as threads:
            readers = [threads.submit(read) for _ in range(3)]
            try:
                for i in range(10_000):
                    store.put(place + "a", bytes([i % 256]) * size)
                    if any(reader.done() for reader in readers) or (i > 20 and seen[0] > 20):
                        break
            finally:
                writing.clear()
            for reader in readers:
                reader.result()
        assert seen[0] > 20

    def test_modified_is_by_the_stores_clock(self, store: Store, place: str) -> None:
        before = clock(store)
        for i in range(5):
            store.put(f"{place}{i}", b"")
        after = clock(store)
        times = [listed.modified for listed in store.list(place)]
        for earlier, later in zip([before, *times], [*times, after], strict=True):
            assert earlier <= later + self.clock_slack

    def test_finished_writes_leave_no_debris(self, store: Store, place: str) -> None:
        store.put(place + "a", b"content")
        before = {listed.key for listed in debris(store)}
        store.put(place + "a", b"replaced")
        store.create(place + "b", b"content")
        store.create(place + "b", b"content")
        assert {listed.key for listed in debris(store)} <= before
        discard_debris(store, [])

    def test_unreadable_file_is_not_stored(self, store: Store, place: str, tmp_path: Path) -> None:
        for call in (store.put, store.create):
            with pytest.raises(UsageError):
                call(place + "a", tmp_path / "missing")
        assert self.keys(store, place) == []
