"""What all verbs share: options, progress, facts for people or programs, and errors with their exit code."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from weightcast.channel.chain import Chain
from weightcast.channel.records import Manifest
from weightcast.cli.terminal import Terminal, err, out
from weightcast.cli.wording import one_line
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
from weightcast.format.kernels.ready import warm_up
from weightcast.format.workers import Workers
from weightcast.store import open_store

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


# -- progress ----------------------------------------------------------------------------------------------------------


class _Bars:
    """Bars on standard error, there only while something takes long: output never lands among them."""

    _PATIENCE = 0.3
    """Seconds: what is done sooner needs no bar."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._begun = 0.0

    def report(self, stage: str, done: int, total: int) -> None:
        with self._lock:
            if not err.is_terminal:
                return
            self._begun = self._begun or time.monotonic()
            if self._progress is None and time.monotonic() - self._begun < self._PATIENCE:
                return
            if self._progress is None:
                self._progress = _progress()
                self._progress.start()
            if stage not in self._tasks:
                self._tasks[stage] = self._progress.add_task(stage, total=total)
            self._progress.update(self._tasks[stage], completed=done, total=total)

    def clear(self) -> None:
        """Leave no trace on the screen; the next report begins anew."""
        with self._lock:
            if self._progress is not None:
                self._progress.stop()
            self._progress, self._tasks, self._begun = None, {}, 0.0


def _progress(console: Terminal = err) -> Progress:
    left = TimeRemainingColumn()
    percent = TextColumn("{task.percentage:>3.0f} %")
    return Progress(
        TextColumn("{task.description:>8}", markup=False), BarColumn(), percent, left, console=console, transient=True
    )


_bars = _Bars()


def leave(number: int, frame: FrameType | None) -> None:
    """For a signal: end the process at once, and quietly. All that is written survives a kill."""
    os.write(2, b"\x1b[?25h" if err.is_terminal else b"")  # a bar or a spinner may have hidden the cursor
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
        _bars.clear()
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
            yield workers, _bars.report
    except BrokenPipeError:
        raise  # whoever reads our output has had enough of it
    except (WeightcastError, OSError) as error:
        fail(error, as_json)
    except KeyboardInterrupt:
        _complain("interrupted", {"kind": "KeyboardInterrupt", "text": "interrupted"}, as_json)
        raise typer.Exit(128 + (_stop.number or signal.SIGINT)) from None
    finally:
        _bars.clear()


def prepare_kernels() -> None:
    """Compile or load the kernels where it can be seen, not inside the first thing that is measured."""
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
    if as_json:
        tell({"error": fields})
        return
    with _stop.printing():
        err.print(Text.assemble(("error:", "bold red"), " ", one_line(text)), soft_wrap=True)


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


def warn(text: str) -> None:
    """One line on standard error; the work goes on."""
    with _stop.printing():
        err.print(Text.assemble(("warning:", "bold yellow"), " ", one_line(text)), soft_wrap=True)


class Logged(logging.Handler):
    """What libraries log where nobody set up logging: one line each, as `warn` prints it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # arguments that do not fit the message
            text = str(record.msg)
        warn(text)


def say(what: RenderableType) -> None:
    """Print for people. Strings are not markup, and cannot act on the terminal: much of what they say is others'."""
    with _stop.printing():
        out.print(what, soft_wrap=isinstance(what, (str, Text)))


def tell(values: dict[str, Any]) -> None:
    """Print for programs: one line."""
    with _stop.printing():
        typer.echo(json.dumps(values))


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def facts(values: dict[str, Any], as_json: bool) -> None:
    """Name and value, one per line, or one JSON object."""
    if as_json:
        tell(values)
        return
    shown = [(one_line(name), one_line(_shown(value))) for name, value in values.items()]
    width = max(len(name) for name, _ in shown)
    for name, text in shown:
        say(Text.assemble((f"{name:>{width}}", "dim"), "  ", text))


# -- channels ----------------------------------------------------------------------------------------------------------


def open_chain(url: str, report: Report = silent) -> Chain:
    """The channel at an address; ``report`` is for uploads."""
    return Chain.open(open_store(url, report))


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
