"""Events as lines of JSON in a file."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import TracebackType

from weightcast.errors import UsageError
from weightcast.events.event import Event


class JsonLines:
    """A sink that appends each event to a file, as one line of JSON (`Event.as_json`).

    A line is written by one call, so several processes may append to one file of a local disk. Nothing is buffered:
    what was told survives a kill.

    >>> weights = wc.Arrays({"w": np.zeros(4, np.float32)})
    >>> with wc.JsonLines("events.jsonl") as sink, wc.Publisher("told", weights, on_event=sink) as publisher:
    ...     weights.read("w")[1] = 0x3F800000
    ...     receipt = publisher.publish(step=1)
    >>> [json.loads(line)["phase"] for line in Path("events.jsonl").read_text().splitlines()]
    ['detect', 'resolve', 'encode', 'upload', 'commit']
    """

    def __init__(self, path: str | Path):
        """``path`` is appended to, or created. `UsageError` if that cannot be."""
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            problem = f"events cannot be written there: {error.strerror}"
            raise UsageError(problem, file=str(path), hint="Name another file.") from error

    def __call__(self, event: Event) -> None:
        line = json.dumps(event.as_json()).encode() + b"\n"
        if os.write(self._file, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file; events after that are lost, with a warning."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
