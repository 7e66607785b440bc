"""Object stores: the contract on a real S3, and what is said when one refuses, fails or is not there."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import pytest
from memory import sent_and_taken
from rgw import Endpoint
from servers import answering, certificate, serving_folder

from weightcast.errors import AccessError, MissingError, StoreError, UnreachableError
from weightcast.store import open_store
from weightcast.store.base import Store
from weightcast.store.contract import StoreContract
from weightcast.store.file import FileStore
from weightcast.store.object import ObjectStore


class TestObject(StoreContract):
    @pytest.fixture
    def store(self, rgw: Endpoint) -> Store:
        return ObjectStore(rgw.make_bucket("contract"))


class TestPatientObject(StoreContract):
    @pytest.fixture
    def store(self, rgw: Endpoint) -> Store:
        return open_store(rgw.make_bucket("contract") + "/a folder/of-it/")


@pytest.fixture
def bucket(rgw: Endpoint) -> str:
    return rgw.make_bucket(f"b-{secrets.token_hex(8)}")


def calls(store: Store) -> list[tuple[str, Callable[[], object]]]:
    return [
        ("read", lambda: store.get("key")),
        ("read", lambda: store.get("key", 0, 10)),
        ("read", lambda: store.get("key", 10)),
        ("write", lambda: store.put("key", b"content")),
        ("write", lambda: store.put("key", bytes(20_000_000))),
        ("write", lambda: store.create("key", b"content")),
        ("list", lambda: list(store.list(""))),
        ("delete", lambda: store.delete("key")),
    ]


def refused(call: Callable[[], object], kind: type[StoreError], says: str) -> None:
    """The call fails with exactly that kind of error, in words for people."""
    with pytest.raises(kind) as caught:
        call()
    error, text = caught.value, str(caught.value)
    assert type(error) is kind
    assert says in error.problem
    assert error.hint is None or error.hint.endswith(".")
    assert error.url.startswith("s3://")
    assert len(text) < 300
    for dump in ("\n", "Debug source", "RetryError", "<?xml", "reqwest", "secret-", "http://"):
        assert dump not in text
    assert error.__cause__ is None, "the dump would be shown as the cause"


def test_folders_of_a_bucket_do_not_see_each_other(bucket: str) -> None:
    whole, one, other = open_store(bucket), open_store(f"{bucket}/a/b"), open_store(f"{bucket}/a/bc")
    one.put("x", b"one")
    other.put("x", b"other")
    whole.put("y", b"whole")
    assert [listed.key for listed in whole.list("")] == ["a/b/x", "a/bc/x", "y"]
    assert [listed.key for listed in one.list("")] == ["x"]
    assert whole.get("a/b/x") == one.get("x") == b"one"
    assert one.url == f"{bucket}/a/b"
    assert open_store(bucket.replace("s3:", "s3a:")).get("y") == b"whole"


def test_wrong_credentials_are_an_access_error(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret-and-wrong")
        for _, call in calls(ObjectStore(bucket)):
            refused(call, AccessError, "the secret key does not belong to this access key")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "secret-and-unknown")
        for _, call in calls(ObjectStore(bucket)):
            refused(call, AccessError, "does not know this access key")


def test_missing_permission_is_an_access_error(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An anonymous client asks for objects of the test's user."""
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    for verb, call in calls(ObjectStore(bucket)):
        refused(call, AccessError, f"may not {verb} here")


def test_missing_credentials_are_an_access_error(rgw: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    for _, call in calls(ObjectStore("s3://bucket")):
        refused(call, AccessError, "no credentials were found")


def test_missing_bucket_is_an_error(rgw: Endpoint) -> None:
    for _, call in calls(ObjectStore("s3://no-such-bucket/folder")):
        refused(call, MissingError, "the bucket does not exist")
    with pytest.raises(MissingError) as caught:
        ObjectStore("s3://no-such-bucket").get("a")
    assert caught.value.key is None


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("http://127.0.0.1:1", "nothing answers at the endpoint"),
        ("http://host.invalid", "name cannot be resolved"),
        ("https://{here}", "does not speak TLS"),
    ],
)
def test_unreachable_server_is_an_error(
    rgw: Endpoint, monkeypatch: pytest.MonkeyPatch, endpoint: str, says: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint.format(here=rgw.url.removeprefix("http://")))
    monkeypatch.setenv("no_proxy", "*")
    store = ObjectStore("s3://bucket")
    for _, call in calls(store)[:4]:
        refused(call, UnreachableError, says)


@pytest.fixture
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret-of-nobody")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def http(status: str, body: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def s3_error(code: str) -> str:
    return f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>dump</Message></Error>'


@pytest.mark.usefixtures("_keys")
@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (http("503 Slow Down", s3_error("SlowDown")), UnreachableError, "limits the rate of requests"),
        (http("503 Service Unavailable"), UnreachableError, "cannot answer now (503)"),
        (http("500 Internal Server Error", "oops"), UnreachableError, "cannot answer now (500)"),
        (http("429 Too Many Requests"), UnreachableError, "cannot answer now (429)"),
        (http("409 Conflict", s3_error("ConditionalRequestConflict")), UnreachableError, ""),
        (http("403 Forbidden", s3_error("RequestTimeTooSkewed")), AccessError, "clock"),
        (http("403 Forbidden", s3_error("AccessDenied")), AccessError, "these credentials may not"),
        (http("400 Bad Request", s3_error("ExpiredToken")), AccessError, "expired"),
        (http("400 Bad Request", s3_error("AuthorizationHeaderMalformed")), AccessError, "another region"),
        (http("301 Moved Permanently", s3_error("PermanentRedirect")), AccessError, "another region"),
        (http("400 Bad Request", s3_error("SomethingNew")), StoreError, "refuses the request (400 SomethingNew)"),
        (b"", UnreachableError, "the connection to the store broke"),
        (b"nonsense\r\n\r\n", UnreachableError, "the connection to the store broke"),
    ],
)
def test_error_answers_raise_our_errors(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, kind: type[StoreError], says: str
) -> None:
    with answering(answer) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        store = ObjectStore("s3://bucket")
        for call in (lambda: store.get("a"), lambda: store.create("a", b""), lambda: list(store.list(""))):
            refused(call, kind, says)


@pytest.mark.usefixtures("_keys")
def test_truncated_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    head = 'HTTP/1.1 200 OK\r\nContent-Length: 10\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\nETag: "x"\r\n\r\n'
    with answering(head.encode() + b"abc") as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        refused(lambda: ObjectStore("s3://bucket").get("a"), UnreachableError, "the connection to the store broke")


@pytest.mark.usefixtures("_keys")
def test_certificate_of_an_unknown_authority_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, *pair = certificate(tmp_path)
    FileStore(tmp_path / "site").put("bucket/a", b"")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    with serving_folder(tmp_path / "site", (pair[0], pair[1])) as web:
        monkeypatch.setenv("AWS_ENDPOINT_URL", web.url)
        refused(lambda: ObjectStore("s3://bucket").get("a"), UnreachableError, "certificate is not trusted")
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        with pytest.raises(MissingError):
            ObjectStore("s3://bucket").get("b")


@pytest.mark.parametrize("name", ["GOOGLE_APPLICATION_CREDENTIALS", "AZURE_STORAGE_ACCOUNT_NAME"])
def test_other_clouds_name_the_missing_variable(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    url = "gs://bucket" if name.startswith("G") else "az://bucket"
    with pytest.raises(StoreError) as caught:
        ObjectStore(url).get("a")
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


def test_large_file_is_sent_and_received_in_bounded_memory(bucket: str, tmp_path: Path) -> None:
    sent, taken = sent_and_taken(bucket, tmp_path, megabytes=320)
    assert sent < 250
    assert taken < 150
