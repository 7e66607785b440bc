"""What goes wrong: one line, the exit code, and nothing changed."""

from __future__ import annotations

import re
import shutil
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from cases import Bag, gaussian, write_folder
from cli_world import (
    ACCESS,
    CHANNEL,
    CHECKPOINT,
    CONFLICT,
    FORMAT,
    STORE,
    USAGE,
    VERSIONS,
    Folder,
    Web,
    World,
    facts,
    model,
    refused,
    run,
    tree,
)
from commands import at_once

from weightcast.cli.console import EXIT_CODES
from weightcast.errors import SpaceError
from weightcast.format.tensors import TensorSpec


def test_typo_in_an_address_is_refused(shared: World, tmp_path: Path) -> None:
    for url in ("s3:/bucket/run", "s4://bucket/run", "htps://host/run"):
        for verb in (("pull", url, tmp_path / "x"), ("publish", url, shared.checkpoints[1]), ("log", url)):
            assert "Did you mean" in refused(tmp_path, USAGE, *verb)
    assert "there is no channel here" in refused(tmp_path, CHANNEL, "pull", f"{shared.url}x", tmp_path / "x")
    assert "`weightcast init" in refused(tmp_path, CHANNEL, "publish", tmp_path / "none", shared.checkpoints[1])


def test_folder_without_weights_is_refused(world: World, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("train")
    notes, url = tmp_path / "notes", world.url
    assert "safetensors" in refused(tmp_path, CHECKPOINT, "init", tmp_path / "new", notes)
    assert "safetensors" in refused(tmp_path, CHECKPOINT, "publish", url, notes)
    assert "safetensors" in refused(tmp_path, CHECKPOINT, "verify", notes, url)
    assert "neither empty nor a checkpoint" in refused(tmp_path, USAGE, "pull", url, notes)
    assert "no such file or folder" in refused(tmp_path, CHECKPOINT, "publish", url, tmp_path / "gone")


def test_other_table_is_refused(world: World, tmp_path: Path) -> None:
    grown = {spec: gaussian(np.random.default_rng(0), spec.elements) for spec in model().table}
    grown[TensorSpec("model.extra.weight", "BF16", (4,))] = np.zeros(4, np.uint16)
    write_folder(tmp_path / "grown", Bag(grown))
    line = refused(tmp_path, USAGE, "publish", world.url, tmp_path / "grown")
    assert "model.extra.weight" in line
    assert "`weightcast reset`" in line
    assert "another model" in refused(tmp_path, USAGE, "pull", world.url, tmp_path / "grown")
    assert "another model" in refused(tmp_path, USAGE, "verify", tmp_path / "grown", world.url)


def test_newer_format_is_refused(world: World, tmp_path: Path) -> None:
    for name in ("channel.json", f"manifests/{9:012d}.json"):
        path = world.url / name
        path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":2'))
        for verb in (
            ("pull", world.url, tmp_path / "x"),
            ("status", world.url),
            ("publish", world.url, world.checkpoints[9]),
        ):
            assert "install a newer one" in refused(tmp_path, FORMAT, *verb)
        path.write_bytes(path.read_bytes().replace(b'"format":2', b'"format":1'))


def test_missing_version_is_refused(world: World, tmp_path: Path) -> None:
    url = world.url
    verbs: list[tuple[str | Path | int, ...]] = [
        ("show", url, 77),
        ("pin", url, 77),
        ("pull", url, tmp_path / "x", "--version", 77),
        ("plan", url, "--from", 0, "--to", 77),
    ]
    for verb in verbs:
        line = refused(tmp_path, USAGE, *verb)
        assert "there is no version 77" in line
        assert f"`weightcast log {url}`" in line
    assert "the newest is 9" in refused(tmp_path, USAGE, "plan", url, "--from", 77)


def test_folder_with_other_weights_is_refused(world: World, tmp_path: Path) -> None:
    write_folder(tmp_path / "other", model(seed=1))
    assert "Name an empty folder" in refused(tmp_path, USAGE, "pull", world.url, tmp_path / "other")


def test_init_over_a_channel_is_refused(world: World, tmp_path: Path) -> None:
    assert "`weightcast reset" in refused(tmp_path, CONFLICT, "init", world.url, world.checkpoints[0])


def test_arguments_that_exclude_each_other_are_refused(world: World, tmp_path: Path) -> None:
    url, folder = world.url, tmp_path / "x"
    refused(tmp_path, USAGE, "pull", url, folder, "--follow", "--version", 3)
    refused(tmp_path, USAGE, "pull", url, folder, "--replica", "a/b")
    refused(tmp_path, USAGE, "init", folder, world.checkpoints[0], "--reference", "no-revision")
    refused(tmp_path, USAGE, "gc", url, "--window", "soon")
    refused(tmp_path, USAGE, "verify", url, world.checkpoints[0])
    refused(tmp_path, USAGE, "verify", world.checkpoints[0])
    refused(tmp_path, USAGE, "verify", world.checkpoints[0], url, "--deep")
    refused(tmp_path, USAGE, "verify", url, url, url)
    assert "the folder above it" in refused(tmp_path, USAGE, "pull", url, tmp_path / "no" / "where")
    assert "no such folder" in refused(tmp_path, USAGE, "verify", url, "--deep", "--scratch", tmp_path / "nowhere")


def test_bucket_that_does_not_answer(shared: World, tmp_path: Path) -> None:
    with Web(Folder) as web:
        address = web.address
    before = tree(tmp_path)
    for done in at_once(("pull", address, tmp_path / "x"), ("publish", address, shared.checkpoints[1])):
        assert done.code == STORE
        assert "nothing answers at that address" in done.complaint
        assert "Check host and port" in done.complaint
    assert tree(tmp_path) == before


class S3(BaseHTTPRequestHandler):
    """As much of S3 as it takes to be refused: everything, or only what would write."""

    protocol_version = "HTTP/1.1"
    root: Path | None = None
    code = "SignatureDoesNotMatch"

    def do_GET(self) -> None:
        path = self.root / self.path.partition("?")[0].removeprefix("/bucket/") if self.root else None
        if path is None:
            self._answer(403, f"<Error><Code>{self.code}</Code></Error>".encode())
        elif "list-type=2" in self.path:
            self._answer(200, self._listing(parse_qs(urlsplit(self.path).query)["prefix"][0]))
        elif path.is_file():
            data, (first, last) = path.read_bytes(), re.findall(r"\d+", self.headers["Range"])
            part = data[int(first) : int(last) + 1]
            self._answer(206, part, f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}")
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(403, f"<Error><Code>{self.code}</Code></Error>".encode())

    def _listing(self, prefix: str) -> bytes:
        assert self.root is not None
        files = {str(path.relative_to(self.root)): path for path in self.root.rglob("*") if path.is_file()}
        rows = "".join(
            f"<Contents><Key>{key}</Key><Size>{files[key].stat().st_size}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key in sorted(files)
            if key.startswith(prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode()

    do_POST = do_DELETE = do_PUT  # noqa: N815 - the base class's way of naming

    def _answer(self, status: int, body: bytes, part: str = "") -> None:
        self.send_response(status)
        if part:
            self.send_header("Content-Range", part)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"0"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def s3(monkeypatch: pytest.MonkeyPatch, web: Web) -> str:
    pytest.importorskip("obstore")
    keys = {"AWS_ENDPOINT_URL": web.address, "AWS_REGION": "us-east-1"}
    keys |= {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "guess"}
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    return "s3://bucket/channel"


def test_wrong_credentials_are_refused(shared: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Web(S3) as web:
        url = s3(monkeypatch, web)
        verbs = (
            ("pull", url, tmp_path / "x"),
            ("publish", url, shared.checkpoints[1]),
            ("init", url, shared.checkpoints[0]),
        )
        for verb in verbs:
            line = refused(tmp_path, ACCESS, *verb)
            assert "Check AWS_SECRET_ACCESS_KEY" in line
            assert "guess" not in line


def test_missing_permission_is_refused(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ReadOnly(S3):
        root, code = tmp_path, "AccessDenied"

    with Web(ReadOnly) as web:
        url = s3(monkeypatch, web)
        line = refused(tmp_path, ACCESS, "publish", url, world.checkpoints[VERSIONS])
        assert "these credentials may not" in line
        assert "Grant the permission" in line
        assert facts("pull", url, tmp_path / "replica")["version"] == VERSIONS - 1, "reading is allowed"


def test_full_disk_is_an_error_with_a_remedy(shared: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    done = run("pull", shared.url, tmp_path / "replica")
    assert done.code == EXIT_CODES[SpaceError]
    assert "Make room" in done.complaint
