"""`weightcast dashboard` and `weightcast report`."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path

import pytest
from cli_world import CHANNEL, USAGE, World, ended, facts, refused, run
from commands import COMMAND
from signed_channel import SignedChannel


def test_report_is_one_page_with_the_channel_inside(shared: World, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    told = facts("report", shared.url, "-o", file)
    assert told == {
        "report": str(file),
        "bytes": file.stat().st_size,
        "head": 9,
        "replicas": told["replicas"],
        "findings": 0,
    }
    assert file.read_text().startswith("<!doctype html>")
    assert '"version":9' in file.read_text()


def test_report_keeps_what_is_there_unless_forced(shared: World, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text("mine")
    assert "exists already" in refused(tmp_path, USAGE, "report", shared.url, "-o", file)
    assert run("report", shared.url, "-o", file, "--force").code == 0
    assert file.read_text() != "mine"


def test_report_never_replaces_the_channel_or_the_events(world: World, tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    events.write_text("")
    for out in (world.url, events):
        assert "made from" in refused(tmp_path, USAGE, "report", world.url, "-o", out, "--events", events, "--force")


@pytest.mark.parametrize("verb", ["report", "analyze"])
def test_page_in_a_folder_that_is_not_there_is_refused(shared: World, tmp_path: Path, verb: str) -> None:
    line = refused(tmp_path, USAGE, verb, shared.url, "-o", tmp_path / "none" / "page.html")
    assert "no such folder" in line
    assert "partial" not in line


def test_interval_without_an_end_is_refused(shared: World, tmp_path: Path) -> None:
    for every in ("inf", "1e300"):
        assert run("dashboard", shared.url, "--every", every).code == USAGE
        assert run("pull", shared.url, tmp_path / "replica", "--follow", "--every", every).code == USAGE
    assert not (tmp_path / "replica").exists()


def test_report_of_no_channel_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    assert "no channel" in refused(tmp_path, CHANNEL, "report", tmp_path / "none", "-o", tmp_path / "x.html")


def test_report_with_a_trusted_key_names_what_it_does_not_vouch_for(tmp_path: Path) -> None:
    signed = SignedChannel(tmp_path, 2)
    signed.rewrite("manifests/000000000001.json", writer="somebody else")
    told = facts("report", signed.url, "-o", tmp_path / "r.html", "--trust", signed.trust)
    assert told["findings"] == 1
    assert '"signed":true' in (tmp_path / "r.html").read_text()


def test_dashboard_says_its_address_serves_and_ends_at_a_signal(shared: World) -> None:
    command = [*COMMAND, "dashboard", str(shared.url), "--listen", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        told = json.loads(child.stdout.readline())
        assert told["event"] == "listening"
        assert told["url"].startswith("http://127.0.0.1:")
        with urllib.request.urlopen(told["url"], timeout=30) as answer:
            assert b"<!doctype html>" in answer.read()
        done = ended(child, signal.SIGTERM)
    assert done.code in (0, 128 + signal.SIGTERM)
    assert done.err == ""


def test_address_that_others_reach_is_served_with_a_warning(shared: World) -> None:
    command = [*COMMAND, "dashboard", str(shared.url), "--listen", "0.0.0.0:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline().startswith("http://127.0.0.1:")
        done = ended(child, signal.SIGINT)
    assert "everybody who reaches 0.0.0.0" in done.err


@pytest.mark.parametrize("listen", ["nowhere", "127.0.0.1:99999", "127.0.0.1:", "host:٣"])
def test_address_that_is_none_is_refused(shared: World, listen: str) -> None:
    assert "not an address" in refused(shared.url, USAGE, "dashboard", shared.url, "--listen", listen)


def test_port_that_is_taken_is_refused_if_it_was_named(shared: World) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert "cannot listen" in refused(shared.url, USAGE, "dashboard", shared.url, "--listen", address)


def test_dashboard_of_no_channel_is_refused(tmp_path: Path) -> None:
    assert "no channel" in refused(tmp_path, CHANNEL, "dashboard", tmp_path / "none")
