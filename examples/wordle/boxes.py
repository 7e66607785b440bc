"""Boxes as processes of this machine: started, watched, killed and started again."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

ENDS_WITHIN = 10.0
"""Seconds that a box gets to end by itself."""
PATIENCE = 180.0
"""Seconds without a message from any box after which something is wrong."""


@dataclass(frozen=True)
class Message:
    """A line that a box reported. ``{"event": "gone", "code": …}`` when its process has ended."""

    box: str
    fields: dict[str, Any]


class Box:
    """One process and all that it starts. Standard output is read as messages, standard error goes to a log file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        messages: queue.SimpleQueue[Message],
        environment: Mapping[str, str] | None = None,
    ):
        self.name, self.log = name, log
        self._command, self._messages = list(command), messages
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[str] | None = None
        self.starts = 0

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        self.starts += 1
        with self.log.open("a") as log:
            # A session of its own: Ctrl-C reaches the demo alone, and a kill takes what the box has started.
            self._process = subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                errors="replace",
                env=self._environment,
                start_new_session=True,
            )
        threading.Thread(target=self._listen, args=(self._process, self.starts), daemon=True).start()

    def _listen(self, process: subprocess.Popen[str], start: int) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self.log.open("a") as log:
                log.write(line)
            with suppress(json.JSONDecodeError):  # other lines are in the log
                fields = json.loads(line)
                if isinstance(fields, dict) and "event" in fields:
                    self._messages.put(Message(self.name, fields))
        gone = {"time": time.time(), "event": "gone", "code": process.wait(), "start": start}
        self._messages.put(Message(self.name, gone))

    def exit_message(self, code: int) -> str:
        """That it ended by itself, with the end of its log."""
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
        return f"the {self.name} ended with exit code {code}:\n{tail}"

    def kill(self) -> None:
        """As a power cut would: SIGKILL to all of it."""
        assert self._process is not None
        self._signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        if self._process is None:
            return
        end = time.monotonic() + ENDS_WITHIN
        running = self._signal(signal.SIGTERM)
        while running and time.monotonic() < end:
            self._process.poll()  # else the leader would count for ever
            time.sleep(0.05)
            running = self._signal(0)
        self.kill()

    def _signal(self, number: int) -> bool:
        """Signal all of it; False if nothing of it is left."""
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True


class Boxes:
    """All boxes of a run; none outlives it."""

    def __init__(self, folder: Path):
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._heard = time.monotonic()
        self._folder = folder
        self._boxes: dict[str, Box] = {}

    def add(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Box:
        self._boxes[name] = Box(name, command, self._folder / f"{name}.log", self._messages, environment)
        return self._boxes[name]

    def __getitem__(self, name: str) -> Box:
        return self._boxes[name]

    def receive(self) -> Message | None:
        """The next message; None if none arrives in a quarter of a second. Ends the run if all boxes fall silent."""
        try:
            message = self._messages.get(timeout=0.25)
        except queue.Empty:
            if time.monotonic() - self._heard > PATIENCE:
                raise SystemExit(f"no box reported anything for {PATIENCE:.0f} s") from None
            return None
        self._heard = time.monotonic()
        return message

    def __enter__(self) -> Boxes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for box in reversed(self._boxes.values()):
            box.stop()


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
