"""The options that every verb has, before or after its name: for whom it prints, where it logs, how fast it goes."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from weightcast.cli.wording import one_line, rate_of
from weightcast.errors import UsageError

_log = logging.getLogger("weightcast")


@dataclass
class Settings:
    """What was asked for in this run of the command."""

    as_json: bool = False
    verbose: bool = False
    quiet: bool = False
    limit_rate: float | None = None
    """Bytes per second."""
    log: logging.Handler | None = None

    def record(self, level: int, text: str) -> None:
        """Write a line of the command's own to the log file, if there is one."""
        if self.log is not None:
            self.log.handle(logging.LogRecord("weightcast", level, "", 0, text, None, None))


settings = Settings()


def common(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of text: one object, or one a line while following.")
    ] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Also print what the library logs.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print no warnings and no progress bars.")] = False,
    log_file: Annotated[
        str | None, typer.Option("--log-file", metavar="PATH", help="Append what the library logs to a file.")
    ] = None,
    limit_rate: Annotated[
        str | None,
        typer.Option("--limit-rate", metavar="RATE", help="Bytes per second to and from buckets, as 50M or 1.5MB/s."),
    ] = None,
) -> None:
    """The options by themselves: `apply_setting` is called with each that is given."""


def apply_setting(name: str, value: Any) -> None:
    """Set one of the options of `common`; `UsageError` if its value makes no sense."""
    if name == "log_file":
        settings.log = _log_to(Path(value))
        _log.addHandler(settings.log)
    elif name == "limit_rate":
        settings.limit_rate = rate_of(value)
    else:
        setattr(settings, name, value)
        if name == "verbose":
            _log.setLevel(logging.DEBUG)


def begin_run() -> None:
    """Forget what another run in this process was asked for."""
    if settings.log is not None:
        _log.removeHandler(settings.log)
        settings.log.close()
    _log.setLevel(logging.INFO)
    settings.__init__()  # type: ignore[misc]


class _OneLine(logging.Formatter):
    """One line for each record, times in UTC: a message from outside cannot forge a line of its own."""

    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        return one_line(super().format(record))


class _LogFile(logging.FileHandler):
    """Warns once and stops logging if the file cannot be written to; the work goes on."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is that of logging
        from weightcast.cli.console import warn

        error = sys.exc_info()[1]
        _log.removeHandler(self)
        settings.log = None
        with suppress(OSError):  # closing writes again what could not be written
            self.close()
        why = error.strerror if isinstance(error, OSError) else error
        warn(f"no longer logging to {self.baseFilename}: {why}")


def _log_to(path: Path) -> logging.Handler:
    try:
        handler = _LogFile(path, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot log there: {error.strerror}", file=str(path), hint="Name another file.") from error
    handler.setFormatter(_OneLine("%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S"))
    return handler
