"""Boxes of the Wordle example, as processes of their own, and questions to them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from examples.wordle.boxes import free_port

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0


@contextmanager
def box(module: str, *options: str, path: str = "/health") -> Iterator[str]:
    """The address of a box that answers."""
    port = free_port()
    command = [sys.executable, "-m", f"examples.wordle.{module}", "--port", str(port), *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_it_answers(url + path, process)
            yield url
        finally:
            process.kill()


def wait_until_it_answers(url: str, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.HTTPError as answer:
            answer.close()
            return
        except OSError:
            assert process.poll() is None, process.stdout and process.stdout.read()
            assert time.monotonic() < end, f"no answer from {url}"
            time.sleep(0.1)


def post(url: str, body: object) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of an answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return response.status, dict(response.headers), json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), json.load(error)
