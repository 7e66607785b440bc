"""What all verbs share: options, progress, facts for people or programs, and errors with their exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from weightcast.errors import (
    CheckpointError,
    FormatError,
    InterruptedApplyError,
    MismatchError,
    UsageError,
    WeightcastError,
)
from weightcast.files import Report
from weightcast.kernels.ready import warm_up
from weightcast.workers import Workers

EXIT_CODES: dict[type[Exception], int] = {
    UsageError: 2,
    MismatchError: 3,
    FormatError: 4,
    CheckpointError: 5,
    InterruptedApplyError: 6,
}
"""Anything else that goes wrong, such as a full disk, is 1."""

# In a pipe nobody knows how wide the page is: cut nothing.
out = Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)
err = Console(stderr=True, highlight=False)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Threads to use; all cores by default.")]


@contextmanager
def working(threads: int | None, as_json: bool, kernels: bool = True) -> Iterator[tuple[Workers, Report]]:
    """Threads, kernels and progress bars for one verb; errors become one line and an exit code."""
    try:
        if kernels:
            prepare_kernels()
        bars = Progress(
            TextColumn("{task.description:>8}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(),
            console=err,
            transient=True,
            disable=not err.is_terminal,
        )
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done)

        with Workers(threads) as workers, bars:
            yield workers, report
    except (WeightcastError, OSError) as error:
        fail(error, as_json)


def prepare_kernels() -> None:
    """Compile or load the kernels where it can be seen, not inside the first thing that is measured."""
    with err.status("preparing kernels (seconds, the first time on a machine)"):
        warm_up()


def fail(error: Exception, as_json: bool) -> NoReturn:
    """One line for people, the fields for programs."""
    code = next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)
    if as_json:
        fields = {"kind": type(error).__name__, "text": str(error)}
        if isinstance(error, WeightcastError):
            fields |= {k: v for k, v in vars(error).items() if isinstance(v, str)}
        typer.echo(json.dumps({"error": fields}))
    else:
        err.print(Text.assemble(("error:", "bold red"), " ", str(error)), soft_wrap=True)
    raise typer.Exit(code)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def facts(values: dict[str, Any], as_json: bool) -> None:
    """Name and value, one per line, or one JSON object."""
    if as_json:
        typer.echo(json.dumps(values))
        return
    width = max(len(name) for name in values)
    for name, value in values.items():
        shown = _shown(value)
        # Text, not markup: names and paths are from outside.
        out.print(Text.assemble((f"{name:>{width}}", "dim"), "  ", shown), soft_wrap=True)
