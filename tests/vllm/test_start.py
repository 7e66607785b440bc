"""vLLM starts from a mirror that somebody keeps, whose files may be half of one version and half of another."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import serving
from world import must_be
from written import Written

import weightcast as wc

LOADED = "WEIGHTCAST_TEST_LOADED"  # as in site/faults.py
PATIENCE = 240


@pytest.fixture
def channel(model: Callable[[str], Path], tmp_path: Path) -> Iterator[Written]:
    written = Written(model("qwen3"), tmp_path / "channel")
    yield written
    written.close()


def mirror_of(channel: Written, model: Path, folder: Path) -> wc.Subscriber:
    """A mirror that vLLM can start from: its files are version 0, its log leads to 1."""
    with wc.Subscriber(channel.channel, folder) as following:
        following.sync()
    for path in model.iterdir():
        if not (folder / path.name).exists():
            shutil.copy(path, folder)
    for spec in channel.weights.table:
        channel.weights.read(spec.name)[...] ^= 1
    channel.publish()
    following = wc.Subscriber(channel.channel, folder, fold=False)
    following.sync()
    return following


def hold_fold(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Two events: the next fold has written some tensors and waits, and it may go on."""
    held, going_on, written, real = threading.Event(), threading.Event(), list[str](), wc.Checkpoint.write

    def write(files: wc.Checkpoint, name: str, bits: Any) -> None:
        written.append(name)
        if len(written) == 4:
            held.set()
            assert going_on.wait(PATIENCE)
        real(files, name, bits)

    monkeypatch.setattr(wc.Checkpoint, "write", write)
    return held, going_on


def test_engine_that_loads_a_mirror_while_a_fold_runs_has_its_version(
    model: Callable[[str], Path], channel: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, loaded = tmp_path / "mirror", tmp_path / "loaded"
    following = mirror_of(channel, model("qwen3"), mirror)
    held, going_on = hold_fold(monkeypatch)
    folding = threading.Thread(target=following.fold)
    folding.start()

    def go_on_once_loaded() -> None:
        while not loaded.exists():
            time.sleep(0.05)
        going_on.set()

    assert held.wait(PATIENCE)
    threading.Thread(target=go_on_once_loaded, daemon=True).start()
    try:
        with serving(mirror, env={LOADED: str(loaded)}) as engine:
            folding.join()
            following.close()
            attach = ["attach", channel.channel, "--engine", engine.url, "--mirror", str(mirror), "--once", "--json"]
            done = subprocess.run([sys.executable, "-m", "weightcast", *attach], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout) == {"event": "there", "version": 1}
            must_be(engine, channel.channel, 1)
    finally:
        going_on.set()
