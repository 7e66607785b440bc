"""What all verbs share: signals, threads and kernels, what is printed for people or programs, and exit codes."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer

from weightcast.cli.progress import bars, spinner
from weightcast.cli.settings import settings
from weightcast.cli.text import Column, Table, Text, printed
from weightcast.cli.wording import in_words
from weightcast.disk.durable import Report
from weightcast.errors import (
    AccessError,
    ChannelError,
    CheckpointError,
    ConflictError,
    EngineError,
    FormatError,
    InterruptedApplyError,
    MismatchError,
    SpaceError,
    StoreError,
    TrustError,
    UsageError,
    WeightcastError,
)
from weightcast.format.workers import Workers

EXIT_CODES: dict[type[Exception], int] = {
    UsageError: 2,
    MismatchError: 3,
    FormatError: 4,
    CheckpointError: 5,
    InterruptedApplyError: 6,
    AccessError: 8,
    StoreError: 7,
    ConflictError: 10,
    ChannelError: 9,
    SpaceError: 11,
    EngineError: 12,
    TrustError: 15,
}
"""The first that fits counts. Any other error is 1; a signal is 128 and its number."""

FOUND = EXIT_CODES[MismatchError]
"""For what `verify` finds."""

SHORT = 13
"""An older version than the newest was reached, since no intact route leads further."""

UNPROVEN = 14
"""An engine is at a version as far as it can be read back, which is not everywhere."""

EXIT_CODES_HELP = (
    "Exit codes: 0 done; 1 anything else; 2 wrong usage; 3 weights do not belong together, or verify found something; "
    "4 bytes break the format; 5 a checkpoint is not what it should be; 6 an interrupted apply must be resumed first; "
    "7 the bucket did not do what was asked; 8 it refuses these credentials; 9 the channel does not allow it; "
    "10 another writer was first; 11 the disk is full; 12 an engine did not do what was asked; "
    "13 pull reached an older version than the newest, since newer ones are damaged; 14 an engine is at a version but "
    "for tensors that cannot be read back; 15 the trusted key does not vouch for it; 130 interrupted."
)


# -- signals -----------------------------------------------------------------------------------------------------------


def leave(number: int, frame: FrameType | None) -> None:
    """For a signal: end the process at once, and quietly. All that is written survives a kill."""
    os.write(2, b"\x1b[?25h" if sys.stderr.isatty() else b"")  # a bar or a spinner may have hidden the cursor
    os._exit(128 + number)


class _Stop:
    """What a signal does: the first ends the work as an error would, the second does not wait for a hung store."""

    def __init__(self) -> None:
        self.number = 0
        self._busy = self._late = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            leave(number, frame)
        self.number = number
        self._late = self._busy
        if not self._late:
            raise KeyboardInterrupt

    @contextmanager
    def waits(self) -> Iterator[None]:
        """The screen is free of bars, and a signal waits until what is inside is done."""
        bars.clear()
        if threading.current_thread() is not threading.main_thread():
            yield  # signals go to the main thread, and are not to be raised in another
            return
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
        if self._late:
            self._late = False
            raise KeyboardInterrupt


_stop = _Stop()
uninterrupted = _stop.waits


@contextmanager
def _on_signals(action: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """SIGINT and SIGTERM call ``action`` meanwhile, if this is the thread that gets them."""
    ours = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, action) for number in (signal.SIGINT, signal.SIGTERM)} if ours else {}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def working() -> Iterator[None]:
    """The work of one verb: a signal ends it, and errors become one line and an exit code."""
    _stop.number = 0
    try:
        with _on_signals(_stop):
            yield
    except BrokenPipeError:
        raise  # whoever reads our output has closed it
    except (WeightcastError, OSError) as error:
        fail(error)
    except KeyboardInterrupt:
        _print_error({"kind": "KeyboardInterrupt", "text": "interrupted"})
        raise typer.Exit(128 + (_stop.number or signal.SIGINT)) from None
    finally:
        bars.clear()


@contextmanager
def computing(threads: int | None, kernels: bool = True) -> Iterator[tuple[Workers, Report]]:
    """Threads, kernels and progress bars for a verb that reads weights."""
    if kernels:
        prepare_kernels()
    with Workers(threads) as workers:
        yield workers, bars.report


def prepare_kernels() -> None:
    """Compile or load the kernels where it can be seen, not inside the first thing that is measured."""
    from weightcast.format.kernels.ready import warm_up

    # An interrupt here would be raised in a callback from C, and shown instead of obeyed.
    with _on_signals(leave), spinner("preparing kernels (seconds, the first time on a machine)"):
        warm_up()


# -- errors ------------------------------------------------------------------------------------------------------------


def fail(error: Exception) -> NoReturn:
    """Print one line for people, or the fields for programs, and end the verb."""
    _print_error(fields_of(error))
    raise typer.Exit(code_of(error))


def code_of(error: Exception) -> int:
    """The exit code for an error."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EXIT_CODES[SpaceError]
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)


def _print_error(fields: dict[str, str]) -> None:
    settings.record(logging.ERROR, fields["text"])
    tell({"error": fields})
    if not settings.as_json:
        _print_error_line(("error:", "bold red"), " ", fields["text"])


def fields_of(error: Exception) -> dict[str, str]:
    """What an error says, for programs."""
    fields = {"kind": type(error).__name__, "text": str(error) or type(error).__name__}
    if isinstance(error, OSError) and not isinstance(error, WeightcastError) and error.strerror:
        where = f" (file {error.filename})" if error.filename else ""
        hint = _REMEDIES.get(error.errno or 0, "Check the disk and the folder, then try again.")
        fields |= {"text": f"{_problem(error)}{where}. {hint}", "hint": hint}
    if isinstance(error, WeightcastError):
        fields |= {name: value for name, value in vars(error).items() if isinstance(value, str)}
    return fields


_REMEDIES = {
    errno.EACCES: "Check what you may do there, or name another place.",
    errno.EPERM: "Check what you may do there, or name another place.",
    errno.EROFS: "Name a place that can be written to.",
    errno.ENOSPC: "Make room and try again.",
    errno.EDQUOT: "Make room and try again.",
    errno.ENOENT: "Check the path.",
    errno.ENOTDIR: "Check the path.",
    errno.EEXIST: "Name another place.",
    errno.ENAMETOOLONG: "Name a shorter path.",
    errno.EMFILE: "Allow more open files, with `ulimit -n`.",
}
"""What to do about errors of the system that none of ours stands for."""


def _problem(error: OSError) -> str:
    text = error.strerror or type(error).__name__
    return f"{text[:1].lower()}{text[1:]}"


@contextmanager
def writing_to(target: Path) -> Iterator[None]:
    """Inside, errors of the system that forbid writing become a `UsageError` about the place that was named."""
    try:
        yield
    except OSError as error:
        if isinstance(error, WeightcastError) or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        problem = f"nothing can be written there: {_problem(error)}"
        raise UsageError(problem, file=str(target), hint=_REMEDIES[error.errno]) from error


# -- what is printed ---------------------------------------------------------------------------------------------------


def say(what: str | Text | Table) -> None:
    """Print for people, unless --json is given: a string is one line. Nothing in it can act on the terminal."""
    if not settings.as_json:
        _print_whole(printed(what))


def tell(values: dict[str, Any]) -> None:
    """Print for programs, if --json is given: one line."""
    if settings.as_json:
        _print_whole(json.dumps(values))


def facts(values: dict[str, str]) -> None:
    """Print names and values for people, one per line."""
    table = Table(Column(style="dim"), Column(left=True), header=False)
    for name, value in values.items():
        table.add(name, value)
    say(table)


def report(values: dict[str, Any], **for_programs: Any) -> None:
    """Print facts: in words for people; as they are, and with more, for programs."""
    tell(values | for_programs)
    facts(in_words(values))


def warn(text: str) -> None:
    """One line about what went wrong while the work goes on, on standard error; with --quiet only in the log file."""
    settings.record(logging.WARNING, text)
    _show_warning(text)


def caution(text: str) -> None:
    """Warn people; with --json a program finds the same in what it is told."""
    if not settings.as_json:
        warn(text)


class Logged(logging.Handler):
    """Prints what libraries log: warnings as `warn` does, and with --verbose the rest."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # arguments that do not fit the message
            text = str(record.msg)
        if record.levelno >= logging.WARNING:
            _show_warning(text)
        elif settings.verbose and not settings.quiet:
            _print_error_line(text)


def _show_warning(text: str) -> None:
    if not settings.quiet:
        _print_error_line(("warning:", "bold yellow"), " ", text)


def _print_error_line(*parts: str | tuple[str, str]) -> None:
    _print_whole(printed(Text.assemble(*parts), sys.stderr), sys.stderr)


def _print_whole(text: str, stream: Any = None) -> None:
    with uninterrupted():
        print(text, file=stream, flush=True)
