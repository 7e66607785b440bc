"""The live terminal view of a run."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from examples.wordle.record import Record

BARS = "▁▂▃▄▅▆▇█"


class View:
    """Draws a record each time it is shown."""

    def __init__(self, title: str, record: Record):
        self._title, self._record, self._began = title, record, time.monotonic()

    def __rich__(self) -> RenderableType:
        seconds = int(time.monotonic() - self._began)
        title = f"{self._title}   {seconds // 60}:{seconds % 60:02}"
        return Panel(Group(self._trainer(), self._bucket(), self._replicas(), self._news()), title=title)

    def _trainer(self) -> RenderableType:
        record, rows = self._record, _rows()
        rows.add_row("trainer", _bar(record.steps, record.of) if record.of else "measuring the policy it begins with")
        if record.before:
            rows.add_row("", f"before: {record.before.rate:.1%} of {record.before.games:,} games won")
        if record.rewards:
            won = f"{mean(record.wins):.1%} won, " if record.wins else ""
            rows.add_row("", f"now: {won}reward {mean(record.rewards):.2f}   {_curve(record.curve)}")
            rows.add_row("", f"staleness of the games learned from: {histogram(record)}")
        return rows

    def _bucket(self) -> RenderableType:
        record, rows = self._record, _rows()
        deltas = [version for version in record.versions.values() if version.nbytes and version.stepped]
        if record.head is None or not deltas:
            return rows
        last = record.versions.get(record.head) or deltas[-1]
        ratio = record.full * len(deltas) / sum(version.nbytes for version in deltas)
        rows.add_row(
            "bucket",
            f"version {record.head}: {last.changed:.2%} of the weights changed, {last.nbytes / 1000:.1f} kB"
            f"   {ratio:.0f} : 1 against full copies",
        )
        return rows

    def _replicas(self) -> RenderableType:
        record, rows = self._record, _rows()
        for name, replica in sorted(record.replicas.items()):
            behind = (record.head or 0) - (replica.version or 0)
            pause = f"paused {1000 * replica.pauses[-1]:.1f} ms" if replica.pauses else "first version"
            rows.add_row(name, f"version {replica.version}, {behind} behind   {pause}   {replica.updates} updates")
        rows.add_row("environment", f"{record.games:,} games played")
        if record.page is not None:
            rows.add_row("dashboard", record.page)
        return rows

    def _news(self) -> RenderableType:
        return Text("\n".join(self._record.news), style="dim")


def _rows() -> Table:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(width=12, style="bold")
    rows.add_column()
    return rows


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _bar(done: int, of: int, width: int = 30) -> str:
    full = done * width // of
    return f"{'━' * full}{'─' * (width - full)} step {done} of {of}"


def _curve(points: Sequence[tuple[int, float]], width: int = 24) -> str:
    """The reward over the run, as bars from the lowest to the highest."""
    rewards = [reward for _, reward in points]
    size = max(1, -(-len(rewards) // width))
    means = [mean(rewards[start : start + size]) for start in range(0, len(rewards), size)]
    low, high = min(means), max(means)
    return "".join(BARS[int((value - low) / (high - low or 1) * (len(BARS) - 1))] for value in means)


def histogram(record: Record) -> str:
    total = record.staleness.total()
    return "   ".join(f"{age}: {count / total:.0%}" for age, count in sorted(record.staleness.items()))
