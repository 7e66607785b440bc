"""Buckets of the Hub: the real huggingface_hub and the real hf_xet, against a stand-in for the Hub's and Xet's routes.

The live Hub was never reached from here.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from channels import blank, channel_of, small_model, train
from hub import READING, Hub, found
from memory import sent_and_taken
from servers import answering

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.errors import (
    AccessError,
    ChannelError,
    MissingError,
    StoreError,
    UnreachableError,
    UsageError,
)
from weightcast.store import open_store
from weightcast.store.base import Store
from weightcast.store.contract import StoreContract
from weightcast.store.hub import HubStore, xet_session


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with found(tmp_path_factory.mktemp("hub")) as hub:
        yield hub


@pytest.fixture
def bucket(hub: Hub) -> str:
    return hub.make_bucket(f"b-{secrets.token_hex(8)}")


@pytest.fixture
def _hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """huggingface_hub does not wait between its attempts, nor hf_xet between its own."""
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_BASE_DELAY", "1ms")
    monkeypatch.setattr("huggingface_hub.utils._xet._GLOBAL_XET_HOLDER._session", None)
    yield
    monkeypatch.setattr("huggingface_hub.utils._xet._GLOBAL_XET_HOLDER._session", None)


class TestHub(StoreContract):
    honours_create = False
    many = 60

    @pytest.fixture
    def store(self, hub: Hub) -> Store:
        return HubStore(hub.make_bucket("contract"))


class TestPatientHub(StoreContract):
    """In a folder of a bucket, where the Hub tells more of what is not there."""

    honours_create = False
    many = 60

    @pytest.fixture
    def store(self, hub: Hub) -> Iterator[Store]:
        hub.tells_missing = hub.tells_empty = True
        yield open_store(hub.make_bucket("contract") + "/a folder/of-it/")
        hub.tells_missing = hub.tells_empty = False


# -- addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "hf://", "hf://buckets", "hf://buckets/", "hf://buckets/x", "hf://me/model", "hf://datasets/me/data",
        "hf://models/me/model", "hf://buckets/me//x", "hf://buckets/me/x/../y", "hf://buckets/m e/x",
        "hf://buckets/me/x?token=y", "hf://buckets/me/x//y",
    ],
)  # fmt: skip
def test_other_addresses_of_the_hub_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="not the address of a bucket") as caught:
        open_store(url)
    assert "hf://buckets/OWNER/NAME" in str(caught.value)


def test_address_is_shown_as_it_was_given(hub: Hub) -> None:
    for url in ("hf://buckets/me/x", "HF://buckets/me/x/", "hf://buckets/me/x"):
        assert open_store(url).url == "hf://buckets/me/x"
    assert open_store("hf://buckets/me/x/run/42").url == "hf://buckets/me/x/run/42"


def test_folders_of_a_bucket_do_not_see_each_other(bucket: str) -> None:
    whole, one, other = open_store(bucket), open_store(f"{bucket}/a/b"), open_store(f"{bucket}/a/bc")
    one.put("x", b"one")
    other.put("x", b"other")
    whole.put("y", b"whole")
    assert [listed.key for listed in whole.list("")] == ["a/b/x", "a/bc/x", "y"]
    assert [listed.key for listed in one.list("")] == ["x"]
    assert whole.get("a/b/x") == one.get("x") == b"one"


def test_files_that_are_not_keys_are_not_listed(hub: Hub, bucket: str) -> None:
    """A bucket may hold what others put there."""
    store = HubStore(bucket)
    store.put("a", b"")
    files = hub.buckets[bucket.removeprefix("hf://buckets/")]
    for name in (".hidden", "a//b", "a/../b", "a\\b", "c/"):
        files[name] = files["a"]
    assert [listed.key for listed in store.list("")] == ["a"]


@pytest.mark.parametrize("name", ["huggingface_hub", "hf_xet"])
def test_missing_library_is_an_error_with_a_remedy(name: str) -> None:
    code = f"import sys; sys.modules[{name!r}] = None; import weightcast as wc; wc.open_store('hf://buckets/me/x')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'weightcast[hf]'" in run.stderr
    assert "UsageError" in run.stderr


def test_library_is_not_imported_for_other_stores() -> None:
    code = "import sys, weightcast as wc; wc.open_store('.'); print('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


# -- times -------------------------------------------------------------------------------------------------------------


def test_objects_without_a_date_count_as_new(
    hub: Hub, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The time that it has from the uploader's disk says nothing, and nothing of unknown age may be collected."""
    store = HubStore(bucket)
    old = tmp_path / "old"
    old.write_bytes(b"old")
    os.utime(old, (1e9, 1e9))
    store.put("a", old)
    assert time.time() - next(store.list("a")).modified < 60
    monkeypatch.setattr(hub, "tells_times", False)
    before = time.time()
    assert before <= next(store.list("a")).modified <= time.time()


# -- refusals ----------------------------------------------------------------------------------------------------------


def calls(store: Store) -> list[tuple[str, Callable[[], object]]]:
    return [
        ("read", lambda: store.get("key")),
        ("read", lambda: store.get("key", 0, 10)),
        ("write", lambda: store.put("key", secrets.token_bytes(10))),
        ("write", lambda: store.create("key", secrets.token_bytes(10))),
        ("list", lambda: list(store.list("k"))),
        ("delete", lambda: store.delete("key")),
    ]


def refused(call: Callable[[], object], kind: type[StoreError], says: str) -> StoreError:
    """The call fails with exactly that kind of error, in words for people."""
    with pytest.raises(kind) as caught:
        call()
    error, text = caught.value, str(caught.value)
    assert type(error) is kind, text
    assert says in error.problem
    assert error.hint is None or error.hint.endswith(".")
    assert error.url.startswith("hf://buckets/")
    assert len(text) < 300
    for dump in ("\n", "Request ID", "Traceback", "http://", "secret", "hf_wrong", "127.0.0.1"):
        assert dump not in text
    assert error.__cause__ is None, "the dump would be shown as the cause"
    return error


def test_unknown_token_is_an_access_error(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    for _, call in calls(HubStore(bucket)):
        assert "hf auth login" in str(refused(call, AccessError, "does not accept the token").hint)


def test_read_only_token_is_an_access_error(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = HubStore(bucket)
    store.put("key", b"content")
    monkeypatch.setenv("HF_TOKEN", READING)
    reader = HubStore(bucket)
    assert reader.get("key") == b"content"
    assert [listed.key for listed in reader.list("")] == ["key"]
    for verb, call in calls(reader):
        if verb in ("write", "delete"):
            assert "write permission" in str(refused(call, AccessError, f"may not {verb} here").hint)


def test_missing_bucket_is_an_error(hub: Hub) -> None:
    for _, call in calls(HubStore("hf://buckets/tester/missing/folder")):
        error = refused(call, MissingError, "the bucket does not exist")
        assert error.key is None
        assert "`hf buckets create tester/missing --private`" in str(error.hint)
    with pytest.raises(ChannelError, match=r"no channel here: the bucket does not exist .* `hf buckets create"):
        Chain.open(HubStore("hf://buckets/tester/missing"))
    with pytest.raises(MissingError, match="the bucket does not exist"):
        wc.init("hf://buckets/tester/missing", small_model())


@pytest.mark.parametrize(
    "body", [b"null", b"[1]", b'{"error": "sign in first"}', b"[null]", b'[{"type": "file"}]', b"<html>"]
)
def test_malformed_answers_raise_our_errors(bucket: str, body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that wants a login answers 200 to everything."""
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: application/json\r\n"
    with answering(head + b"Content-Length: %d\r\n\r\n" % len(body) + body) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        store = HubStore(bucket)
        for call in (lambda: list(store.list("a")), lambda: store.get("a")):
            with pytest.raises(StoreError) as caught:
                call()
            assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("_hasty")
@pytest.mark.parametrize(
    ("status", "kind", "says"),
    [
        (503, UnreachableError, "cannot answer now (503)"),
        (500, UnreachableError, "cannot answer now (500)"),
        (429, UnreachableError, "limits the rate of requests"),
        (401, AccessError, "does not accept the token"),
        (403, AccessError, "may not"),
        (418, StoreError, "refuses the request (418)"),
    ],
)
def test_error_answers_raise_our_errors(hub: Hub, bucket: str, status: int, kind: type[StoreError], says: str) -> None:
    store = HubStore(bucket)
    store.put("key", b"content")
    hub.statuses = dict.fromkeys(("tree", "resolve", "batch", "write-token"), status)
    try:
        for _, call in calls(store):
            refused(call, kind, says)
    finally:
        hub.statuses = {}
    assert store.get("key") == b"content"


@pytest.mark.usefixtures("_hasty")
@pytest.mark.parametrize("route", ["read-token", "xet-read", "xet-bytes"])
@pytest.mark.parametrize("status", [401, 404, 429, 503])
def test_contents_that_cannot_be_fetched_raise_our_errors(hub: Hub, bucket: str, route: str, status: int) -> None:
    """hf_xet says little, and of some troubles nothing: a stream that ends early must not be taken for the object."""
    store = HubStore(bucket)
    content = secrets.token_bytes(100_000)
    store.put("key", content)
    hub.statuses = {route: status}
    try:
        for range_ in ((0, None), (10, 10), (50_000, 50_000)):
            xet_session.cache_clear()  # a session keeps what it has fetched
            with pytest.raises(StoreError) as caught:
                store.get("key", *range_)
            assert "127.0.0.1" not in str(caught.value)
            if status in (429, 503):
                assert type(caught.value) is UnreachableError
    finally:
        hub.statuses = {}
    assert store.get("key") == content, "it goes on as soon as the trouble is over"


@pytest.mark.usefixtures("_hasty")
def test_unreachable_server_is_an_error(hub: Hub, bucket: str, capfd: pytest.CaptureFixture[str]) -> None:
    store = HubStore(bucket)
    store.put("key", b"content")
    hub.stop()
    try:
        for verb, call in calls(store):
            says = "the Hub cannot be reached" if verb == "write" else "nothing answers at the Hub's address"
            refused(call, UnreachableError, says)
    finally:
        hub.start()
    assert store.get("key") == b"content"
    assert capfd.readouterr().err == "", "one error tells of all attempts"


@pytest.mark.usefixtures("_hasty")
def test_unknown_host_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("no_proxy", "*")
    for verb, call in calls(HubStore("hf://buckets/me/x")):
        refused(call, UnreachableError, "cannot be reached" if verb == "write" else "name cannot be resolved")


@pytest.mark.usefixtures("_hasty")
def test_calls_of_other_code_are_logged_as_usual(hub: Hub, bucket: str, caplog: pytest.LogCaptureFixture) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    HubStore(bucket)
    hub.statuses = {"tree": 503}
    with pytest.raises(HfHubHTTPError):
        list(HfApi(endpoint=hub.url).list_bucket_tree(bucket.removeprefix("hf://buckets/")))
    hub.statuses = {}
    assert "HTTP Error 503" in caplog.text


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_large_file_is_sent_and_received_in_bounded_memory(bucket: str, tmp_path: Path) -> None:
    sent, taken = sent_and_taken(bucket, tmp_path, megabytes=250)
    assert sent < 350, "hf_xet holds a few parts of 64 MB"
    assert taken < 150


def test_concurrent_reads_share_one_handshake(hub: Hub, bucket: str) -> None:
    store = HubStore(bucket)
    contents = {f"k{i}": secrets.token_bytes(200_000) for i in range(8)}
    for key, content in contents.items():
        store.put(key, content)
    store.get("k0")
    asked = len(hub.asked)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(store.get, contents)) == list(contents.values())
    assert hub.since(asked) == {"resolve": 8}


def test_forked_process_can_read(bucket: str) -> None:
    code = """
import os, sys
from weightcast.store.hub import HubStore
store = HubStore(sys.argv[1])
store.put("a", b"content")
assert store.get("a") == b"content"
child = os.fork()
assert store.get("a") == b"content"
store.put(str(child), b"")
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    run = subprocess.run([sys.executable, "-c", code, bucket], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


# -- progress ----------------------------------------------------------------------------------------------------------


def test_no_operation_draws_a_progress_bar(bucket: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nor is huggingface_hub's own switch touched, which the user's program may rely on."""
    from huggingface_hub.utils import are_progress_bars_disabled

    large = tmp_path / "large"
    large.write_bytes(secrets.token_bytes(40 << 20))
    store = open_store(bucket)
    for data in (b"small", secrets.token_bytes(1 << 20), large):
        store.put("a", data)
        store.get("a", 0, 1000)
    list(store.list(""))
    store.delete("a")
    assert capfd.readouterr() == ("", "")
    assert not are_progress_bars_disabled()


def test_progress_of_a_large_file_is_reported(bucket: str, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    large = tmp_path / "large"
    large.write_bytes(secrets.token_bytes(40 << 20))
    store = open_store(bucket, lambda *report: told.append(report))
    store.put("small", b"small")
    assert told == []
    store.put("large", large)
    assert told[-1] == ("sending", 40 << 20, 40 << 20)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


# -- channels ----------------------------------------------------------------------------------------------------------


def test_idle_poll_is_one_small_request_at_any_chain_length(hub: Hub, bucket: str) -> None:
    hub.page = 3
    try:
        channel_of(open_store(bucket), 8)
        with wc.Subscriber(bucket, blank(small_model()), threads=1) as subscriber:
            staged = subscriber.poll()
            assert staged is not None
            assert subscriber.apply(staged).version == 8
            for _ in range(5):
                asked = len(hub.asked)
                assert subscriber.poll() is None
                assert hub.since(asked, contents=True) == {"tree": 1}
    finally:
        hub.page = 25


def test_version_costs_this_many_requests(hub: Hub, bucket: str) -> None:
    """Requests to the Hub; those for contents go to Xet."""
    model = small_model()
    wc.init(bucket, model)
    with wc.Publisher(bucket, model, threads=1) as publisher:
        train(model, 1)
        publisher.publish().result(30)
        publisher.flush()
        asked = len(hub.asked)
        train(model, 2)
        publisher.publish().result(30)
        publisher.flush()
        time.sleep(0.2)
        assert hub.since(asked) == {"write-token": 3, "batch": 3, "tree": 5, "resolve": 2}
