"""The options that every verb has, before or after its name: how much is said, where it is logged, how fast it goes."""

from __future__ import annotations

import logging
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from weightcast.cli.wording import one_line
from weightcast.errors import UsageError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_RATE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?)b?(?:/s|ps)?", re.IGNORECASE)


@dataclass
class Settings:
    """What was asked for in this run of the command."""

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
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Print what the library logs, too.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print no notes, warnings or progress bars.")] = False,
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
    if name == "verbose":
        settings.verbose = True
        logging.getLogger("weightcast").setLevel(logging.DEBUG)
    elif name == "quiet":
        settings.quiet = True
    elif name == "log_file":
        settings.log = _log_to(Path(value))
        logging.getLogger("weightcast").addHandler(settings.log)
    elif name == "limit_rate":
        settings.limit_rate = rate_of(value)


def begin_run() -> None:
    """Forget what another run in this process was asked for."""
    if settings.log is not None:
        logging.getLogger("weightcast").removeHandler(settings.log)
        settings.log.close()
    logging.getLogger("weightcast").setLevel(logging.INFO)
    settings.__init__()  # type: ignore[misc]


def rate_of(text: str) -> float:
    """Bytes per second.

    >>> rate_of("50M"), rate_of("1.5MB/s"), rate_of("1kiB/s"), rate_of("800")
    (50000000.0, 1500000.0, 1024.0, 800.0)
    """
    found = _RATE.fullmatch(text.strip())
    rate = 0.0
    if found is not None:
        unit = _UNITS[found[2].lower()]
        rate = float(found[1]) * (1024 ** list(_UNITS.values()).index(unit) if found[3] else unit)
    if not 1 <= rate < float("inf"):
        hint = "Name bytes per second, at least 1, as 800k, 50M or 1.5GB/s."
        raise UsageError(f"not a rate: {text[:100]!r}", hint=hint)
    return rate


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
        logging.getLogger("weightcast").removeHandler(self)
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
