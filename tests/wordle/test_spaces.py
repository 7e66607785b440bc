"""The Spaces: what is packed, what the Hub reads of it, what the start scripts run, what the proxy lets out."""

from __future__ import annotations

import http.client
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import yaml
from wordle_boxes import ROOT, box, wait_until_it_answers

import weightcast as wc
from examples.wordle.boxes import free_port
from examples.wordle.policy import CHECKPOINT
from examples.wordle.spaces.pack import SPACES, pack

FOLDER = ROOT / "examples" / "wordle" / "spaces"
FIELDS = {
    *("title", "emoji", "colorFrom", "colorTo", "sdk", "python_version", "sdk_version", "suggested_hardware"),
    *("suggested_storage", "app_file", "app_build_command", "app_port", "base_path", "fullWidth", "header"),
    *("short_description", "models", "datasets", "tags", "thumbnail", "pinned", "hf_oauth", "hf_oauth_scopes"),
    *("hf_oauth_expiration_minutes", "hf_oauth_authorized_org", "disable_embedding", "startup_duration_timeout"),
    *("custom_headers", "preload_from_hub", "license"),
}
"""Of a Space's front matter, as the Hub documents them."""
COLOURS = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    """A folder with a wheel; what is in it matters to Docker alone."""
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / f"weightcast-{wc.__version__}-py3-none-any.whl").write_bytes(b"")
    return tmp_path / "dist"


@pytest.mark.parametrize("space", SPACES)
def test_front_matter_has_documented_fields_and_values(space: str) -> None:
    _, front, text = (FOLDER / space / "README.md").read_text().split("---\n", 2)
    fields = yaml.safe_load(front)
    assert set(fields) <= FIELDS
    assert fields["sdk"] == "docker"
    assert {fields["colorFrom"], fields["colorTo"]} <= COLOURS
    assert fields["suggested_hardware"] in ("cpu-basic", "cpu-upgrade", "l4x1")
    assert len(fields["short_description"]) <= 60
    assert f"EXPOSE {fields['app_port']}" in (FOLDER / space / "Dockerfile").read_text()
    for setting in settings_of(space):
        assert f"`{setting}`" in text, "every variable and secret is in the README"


def settings_of(space: str) -> list[str]:
    lines = (FOLDER / space / "start.sh").read_text().splitlines()
    return [line.split()[1] for line in lines if line.endswith(("(variable)", "(secret)"))]


@pytest.mark.parametrize("space", SPACES)
def test_dockerfiles_pass_hadolint(space: str) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, FOLDER / space / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("space", SPACES)
def test_packed_folder_has_all_that_the_dockerfile_copies(space: str, tmp_path: Path, dist: Path) -> None:
    pack(space, tmp_path / "space", dist)
    assert os.access(tmp_path / "space" / "start.sh", os.X_OK)
    assert (tmp_path / "space" / "README.md").is_file()
    copied = re.findall(r"^COPY \S+ (\S+\.whl)", (FOLDER / space / "Dockerfile").read_text(), re.MULTILINE)
    assert [path.name for path in (tmp_path / "space").glob("*.whl")] == copied
    assert not list((tmp_path / "space").rglob("__pycache__"))
    with pytest.raises(FileExistsError):
        pack(space, tmp_path / "space", dist)


def test_missing_wheel_is_named_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make wheel"):
        pack("vllm", tmp_path / "space", tmp_path)
    assert not (tmp_path / "space").exists()


@contextmanager
def started(space: str, folder: Path, dist: Path, **settings: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The start script of a packed Space, as Docker would run it, and its address."""
    pack(space, folder, dist)
    port = free_port()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PORT": str(port), "HOME": str(folder), **settings}
    with subprocess.Popen(
        ["./start.sh"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield f"http://127.0.0.1:{port}", process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_environment_starts(tmp_path: Path, dist: Path) -> None:
    with started("environment", tmp_path / "space", dist) as (url, process):
        wait_until_it_answers(f"{url}/health", process)
        wait_until_it_answers(f"{url}/web/", process)


def test_trainer_starts_trains_and_shows_its_reports(tmp_path: Path, dist: Path, environment: str) -> None:
    channel = tmp_path / "bucket"
    with wc.Checkpoint(CHECKPOINT) as weights:
        wc.init(channel, weights)
    with box("replica", "--channel", str(channel)) as replica:
        settings = {"CHANNEL": str(channel), "ENVIRONMENT": environment, "REPLICAS": replica, "STEPS": "2"}
        with started("trainer", tmp_path / "space", dist, **settings) as (url, process):
            assert process.stdout is not None
            for line in process.stdout:
                if '"event": "step"' in line:
                    break
            with urllib.request.urlopen(f"{url}/index.txt") as response:
                reports = [json.loads(line) for line in response.read().decode().splitlines() if line.startswith("{")]
    assert [report["event"] for report in reports][:2] == ["begin", "evaluation"]


@pytest.mark.parametrize("space", ["vllm", "trainer"])
def test_missing_settings_are_named(space: str, tmp_path: Path, dist: Path) -> None:
    with started(space, tmp_path / "space", dist) as (_, process):
        assert process.stdout is not None
        assert "CHANNEL: set it to the bucket" in process.stdout.read()
        assert process.wait(10) != 0


class Engine(http.server.BaseHTTPRequestHandler):
    """Answers everything, and says what it was asked for."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = json.dumps({"path": self.path, "key": self.headers["Authorization"]}).encode()
        self.send_response(200)
        for name, value in (("Content-Length", len(body)), ("x-weight-version", "40-41"), ("x-inner", "secret")):
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def proxy() -> Iterator[int]:
    """The port of a proxy in front of an engine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine) as engine:
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        with box("spaces.proxy", "--engine", f"http://127.0.0.1:{engine.server_port}") as url:
            yield int(url.rpartition(":")[2])
        engine.shutdown()


def ask(port: int, path: str, method: str = "POST") -> tuple[int, dict[str, str], bytes]:
    """The path as it is: other clients would resolve it."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request(method, path, b"{}" if method == "POST" else None, {"Authorization": "Bearer key"})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/completions", "/v1/chat/completions"])
def test_proxy_lets_the_api_out(proxy: int, path: str) -> None:
    status, headers, body = ask(proxy, path)
    assert (status, json.loads(body)) == (200, {"path": path, "key": "Bearer key"})
    assert headers["x-weight-version"] == "40-41"
    assert "x-inner" not in headers


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/v1", "/v1/", "/collective_rpc", "/pause", "/reset_prefix_cache", "/update_weights", "/v1/load_lora"),
        *("/v1/../collective_rpc", "/v1/%2e%2e/collective_rpc", "/health/../pause", "/health%2f..%2fpause"),
        *(
            "//collective_rpc",
            "/v1/completions/../../pause",
            "/v1/completions?x=/../../pause",
            "/v1/completions#/pause",
        ),
        *("/v1\\..\\pause", "http://127.0.0.1/pause"),
    ],
)
def test_proxy_lets_nothing_else_out(proxy: int, path: str) -> None:
    for method in ("GET", "POST"):
        status, _, body = ask(proxy, path, method)
        assert status in (400, 404)
        assert b'"key"' not in body


def test_proxy_says_when_the_engine_is_away() -> None:
    port = free_port()
    with box("spaces.proxy", "--engine", f"http://127.0.0.1:{port}", path="/nothing") as url:
        assert ask(int(url.rpartition(":")[2]), "/v1/models", "GET")[0] == 502


@pytest.mark.parametrize("space", SPACES)
def test_start_scripts_pass_shellcheck(space: str) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, FOLDER / space / "start.sh"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
