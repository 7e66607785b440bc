"""What all verbs share: options, progress, facts for people or programs, and errors with their exit code."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from weightcast.cli.progress import bars
from weightcast.cli.settings import settings
from weightcast.cli.text import Table, Text, printed
from weightcast.disk.durable import Report, silent
from weightcast.errors import (
    AccessError,
    ChannelError,
    CheckpointError,
    ConflictError,
    EngineError,
    FormatError,
    InterruptedApplyError,
    MismatchError,
    MissingError,
    SpaceError,
    StoreError,
    UsageError,
    WeightcastError,
)
from weightcast.format.workers import Workers

if TYPE_CHECKING:
    from weightcast.channel.chain import Chain
    from weightcast.channel.records import Manifest
    from weightcast.store.base import Store

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
}
"""The first that fits counts. Anything else that goes wrong is 1; a signal is 128 and its number."""

FOUND = EXIT_CODES[MismatchError]
"""For what `verify` finds."""

EXIT_CODES_HELP = (
    "Exit codes: 0 done; 1 anything else; 2 wrong usage; 3 weights do not belong together, or verify found something; "
    "4 bytes break the format; 5 a checkpoint is not what it should be; 6 an interrupted apply must be resumed first; "
    "7 the bucket did not do what was asked; 8 it refuses these credentials; 9 the channel does not allow it; "
    "10 another writer was first; 11 the disk is full; 12 an engine did not do what was asked; "
    "13 pull reached an older version than the newest, since newer ones are damaged; 130 interrupted."
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Threads to use; all cores by default.")]
Url = Annotated[
    str,
    typer.Argument(
        metavar="URL", help="The channel: a folder, s3://bucket/folder, gs://…, az://…, hf://buckets/… or https://…."
    ),
]


def leave(number: int, frame: FrameType | None) -> None:
    """For a signal: end the process at once, and quietly. All that is written survives a kill."""
    os.write(2, b"\x1b[?25h" if sys.stderr.isatty() else b"")  # a bar or a spinner may have hidden the cursor
    os._exit(128 + number)


class _Stop:
    """What a signal does: the first ends the work as an error would, the second does not wait for a hung store."""

    def __init__(self) -> None:
        self.number = 0
        self._printing = self._late = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            leave(number, frame)
        self.number = number
        self._late = self._printing
        if not self._late:
            raise KeyboardInterrupt

    @contextmanager
    def printing(self) -> Iterator[None]:
        """The screen is ours: no bars, and a signal waits until a line is out, whole and once."""
        bars.clear()
        if threading.current_thread() is not threading.main_thread():
            yield  # signals go to the main thread, and are not to be raised in another
            return
        self._printing = True
        try:
            yield
        finally:
            self._printing = False
        if self._late:
            self._late = False
            raise KeyboardInterrupt


_stop = _Stop()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A signal waits until what is inside is done."""
    with _stop.printing():
        yield


@contextmanager
def _stopping() -> Iterator[None]:
    """SIGINT and SIGTERM end the work inside, if this is the thread that gets them."""
    _stop.number = 0
    ours = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM)} if ours else {}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)


@contextmanager
def working(threads: int | None, as_json: bool, kernels: bool = True) -> Iterator[tuple[Workers, Report]]:
    """Threads, kernels and progress bars for one verb; errors become one line and an exit code."""
    try:
        # Not while kernels are loaded: an interrupt there is raised in a callback from C, and shown instead of obeyed.
        if kernels:
            prepare_kernels()
        with _stopping(), Workers(threads) as workers:
            yield workers, bars.report
    except BrokenPipeError:
        raise  # whoever reads our output has had enough of it
    except (WeightcastError, OSError) as error:
        fail(error, as_json)
    except KeyboardInterrupt:
        _complain("interrupted", {"kind": "KeyboardInterrupt", "text": "interrupted"}, as_json)
        raise typer.Exit(128 + (_stop.number or signal.SIGINT)) from None
    finally:
        bars.clear()


def prepare_kernels() -> None:
    """Compile or load the kernels where it can be seen, not inside the first thing that is measured."""
    from weightcast.cli.terminal import err
    from weightcast.format.kernels.ready import warm_up

    with err.status("preparing kernels (seconds, the first time on a machine)"):
        warm_up()


# -- what is said ------------------------------------------------------------------------------------------------------


def fail(error: Exception, as_json: bool) -> NoReturn:
    """One line for people, the fields for programs."""
    fields = fields_of(error)
    _complain(fields["text"], fields, as_json)
    raise typer.Exit(code_of(error))


def code_of(error: Exception) -> int:
    """The exit code for an error."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EXIT_CODES[SpaceError]
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)


def _complain(text: str, fields: dict[str, str], as_json: bool) -> None:
    settings.record(logging.ERROR, text)
    if as_json:
        tell({"error": fields})
        return
    _print_error_line(("error:", "bold red"), " ", text)


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
    errno.ENAMETOOLONG: "Name a shorter path.",
    errno.EMFILE: "Allow more open files, with `ulimit -n`.",
}
"""What to do about errors of the system that none of ours stands for."""


def _problem(error: OSError) -> str:
    text = error.strerror or type(error).__name__
    return f"{text[:1].lower()}{text[1:]}"


@contextmanager
def writing_to(target: Path) -> Iterator[None]:
    """Errors of the system in here that say one may not write become a `UsageError` about the place that was named."""
    try:
        yield
    except OSError as error:
        if isinstance(error, WeightcastError) or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        problem = f"nothing can be written there: {_problem(error)}"
        raise UsageError(problem, file=str(target), hint=_REMEDIES[error.errno]) from error


def note(text: str) -> None:
    """One line about what is going on, on standard error; with --quiet only in the log file."""
    settings.record(logging.INFO, text)
    _show_note(text)


def warn(text: str) -> None:
    """One line about what went wrong while the work goes on, on standard error; with --quiet only in the log file."""
    settings.record(logging.WARNING, text)
    _show_warning(text)


def _show_note(text: str) -> None:
    if not settings.quiet:
        _print_error_line(text)


def _show_warning(text: str) -> None:
    if not settings.quiet:
        _print_error_line(("warning:", "bold yellow"), " ", text)


def _print_error_line(*parts: str | tuple[str, str]) -> None:
    with _stop.printing():
        print(printed(Text.assemble(*parts), sys.stderr), file=sys.stderr, flush=True)


class Logged(logging.Handler):
    """Prints what libraries log: warnings as `warn` does, and with --verbose the rest as notes."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # arguments that do not fit the message
            text = str(record.msg)
        if record.levelno >= logging.WARNING:
            _show_warning(text)
        elif settings.verbose:
            _show_note(text)


def say(what: str | Text | Table) -> None:
    """Print for people: a string is one line. Nothing in it can act on the terminal."""
    with _stop.printing():
        print(printed(what), flush=True)


def tell(values: dict[str, Any]) -> None:
    """Print for programs: one line."""
    with _stop.printing():
        print(json.dumps(values), flush=True)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def facts(values: dict[str, Any], as_json: bool) -> None:
    """Name and value, one per line, or one JSON object."""
    if as_json:
        tell(values)
        return
    table = Table(header=False)
    table.add_column(justify="right", style="dim")
    table.add_column()
    for name, value in values.items():
        table.add_row(name, _shown(value))
    say(table)


# -- channels ----------------------------------------------------------------------------------------------------------


def open_bucket(url: str, report: Report = silent) -> Store:
    """The bucket at an address, within --limit-rate; ``report`` is for uploads."""
    from weightcast.store import open_store

    store = open_store(url, report)
    if settings.limit_rate is None:
        return store
    from weightcast.store.rate import Limited

    return Limited(store, settings.limit_rate)


def open_chain(url: str, report: Report = silent) -> Chain:
    """The channel at an address; ``report`` is for uploads."""
    from weightcast.channel.chain import Chain

    return Chain.open(open_bucket(url, report))


def commit_of(chain: Chain, version: int) -> Manifest:
    """The commit of a version; `UsageError` if there is none."""
    try:
        return chain.manifest(version)
    except MissingError:
        hint = f"`weightcast log {chain.store.url}` lists those there are."
        raise UsageError(f"there is no version {version}", file=chain.store.url, hint=hint) from None


def head_of(chain: Chain) -> Manifest:
    """The newest commit; `ChannelError` if there is none yet."""
    head = chain.head()
    if head is None:
        hint = "Finish it with `weightcast init URL CHECKPOINT`."
        raise ChannelError("the channel has no version yet", file=chain.store.url, hint=hint)
    return head
