"""Temporary folders and locks that outlive nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from weightcast.disk.durable import locked

MANY = """
import sys, tempfile
from weightcast.disk.durable import scratch
tempfile.tempdir = sys.argv[1]
for i in range(150):
    with scratch() as folder:
        (folder / "mine").write_text("x")
        assert (folder / "owner").is_file() and (folder / "mine").read_text() == "x"
"""

KILLED = """
import os, signal, sys, tempfile
from weightcast.disk.durable import scratch
tempfile.tempdir = sys.argv[1]
with scratch() as folder:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_folder_of_a_running_process_is_kept(tmp_path: Path) -> None:
    running = [subprocess.Popen([sys.executable, "-c", MANY, str(tmp_path)]) for _ in range(4)]
    assert [one.wait(120) for one in running] == [0, 0, 0, 0]
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_process_are_removed_by_the_next(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    subprocess.run([sys.executable, "-c", MANY, str(tmp_path)], check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_lock_is_released_although_a_forked_process_inherited_it(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with locked(tmp_path / "lock"):
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)  # until the test closes the other end
            os._exit(0)
    try:
        with locked(tmp_path / "lock", patience=0):
            pass
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)
