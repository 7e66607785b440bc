"""What a run came to, for the end of the demo."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from examples.wordle.evaluation import Evaluation
from examples.wordle.record import Record, Version
from examples.wordle.view import histogram


@dataclass(frozen=True)
class Proof:
    """What a replica holds in memory at the end."""

    version: int
    digest: str


@dataclass(frozen=True)
class Trace:
    """A recorded GRPO run of a model of full size."""

    name: str
    changed: float
    """Share of the weights, per step."""
    bits: float
    """On the wire, per change."""

    @property
    def ratio(self) -> float:
        """Full copies in bf16 against what is shipped."""
        return 16 / (self.changed * self.bits)


TRACES = (
    Trace("596 M parameters, fp32 masters, AdamW at 1e-6", 0.0137, 6.76),
    Trace("596 M parameters, pure bf16, AdamW at 1e-6", 0.0050, 4.45),
)
"""From benchmarks/RESULTS.md, section Sizes."""


def failures(record: Record, proofs: Mapping[str, Proof], must_learn: bool = True) -> list[str]:
    """Why the run did not end well; nothing if it did. A short one need not be seen to learn."""
    found = []
    if record.digest is None or not record.exact:
        found.append("the channel's last version is not what the trainer holds")
    for name, proof in proofs.items():
        if (proof.version, proof.digest) != (record.head, record.digest):
            found.append(f"{name} holds version {proof.version} ({proof.digest[:12]}), not the last one")
    if not proofs:
        found.append("no replica said what it holds")
    if record.before is None or record.after is None:
        found.append("the policy was not measured")
    elif must_learn and not record.before.is_beaten_by(record.after):
        found.append("the policy did not get measurably better")
    return found


def summary(record: Record, proofs: Mapping[str, Proof]) -> RenderableType:
    parts = (
        _learning(record),
        _bytes(record),
        _traces(),
        _times(record),
        _replicas(record),
        _proof(record, proofs),
    )
    return Group(*(line for part in parts for line in (part, "")))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _learning(record: Record) -> RenderableType:
    table = _table("The policy", "", "version", "games", "won", "95 % interval", "reward")
    for when, found in (("before", record.before), ("after", record.after)):
        if found is not None:
            table.add_row(when, *_evaluated(found))
    return table


def _evaluated(found: Evaluation) -> tuple[str, ...]:
    interval = f"{100 * found.low:.1f} – {100 * found.high:.1f} %"
    return str(found.version), f"{found.games:,}", f"{found.rate:.1%}", interval, f"{found.reward:.3f}"


def _bytes(record: Record) -> RenderableType:
    deltas = [version for version in record.versions.values() if version.stepped and version.nbytes]
    if not deltas:
        return Text("no version was published")
    shipped, copies = sum(version.nbytes for version in deltas), record.full * len(deltas)
    changed = sorted(version.changed for version in deltas)
    table = _table("The wire", "", "")
    table.add_row("versions", f"{len(deltas):,}")
    table.add_row("shipped, without version 0", _each(shipped, len(deltas)))
    table.add_row("full copies in bf16", _each(copies, len(deltas)))
    table.add_row("what TRL would broadcast, in fp32", _each(2 * copies, len(deltas)))
    table.add_row("full copies : shipped", f"{copies / shipped:.1f} : 1")
    table.add_row("weights that changed", f"{median(changed):.2%} median, {changed[-1]:.2%} most")
    return table


def _each(nbytes: int, versions: int) -> str:
    return f"{nbytes / 1e6:.2f} MB, {nbytes / versions / 1000:.1f} kB a version"


def _traces() -> RenderableType:
    table = _table("Recorded GRPO runs of full size, for comparison", "", "changed", "ratio")
    for trace in TRACES:
        table.add_row(trace.name, f"{trace.changed:.2%}", f"{trace.ratio:.0f} : 1")
    return table


def _times(record: Record) -> RenderableType:
    table = _table("From the trainer's step to the first rollout, ms", "", "p50", "p99")
    for name, values in phases(record.versions.values()).items():
        if values:
            table.add_row(name, *_percentiles(values, 0))
    staleness = f"Staleness of the games learned from, in versions: {histogram(record)}"
    dropped = f"; {record.dropped:,} games were too old" if record.dropped else ""
    return Group(table, Text(staleness + dropped))


def _replicas(record: Record) -> RenderableType:
    table = _table("The replicas", "", "joined at", "updates", "fetched", "lag p50", "p99", "pause p50", "p99")
    for name, replica in sorted(record.replicas.items()):
        lags = [
            version.live[name] - version.committed
            for number, version in record.versions.items()
            if version.committed and name in version.live and number != replica.joined
        ]
        fetched = f"{replica.nbytes / 1e6:.2f} MB" if replica.nbytes else "–"
        figures = [*_percentiles(lags, 0), *_percentiles(replica.pauses, 1)]
        table.add_row(name, f"version {replica.joined}", str(replica.updates), fetched, *figures)
    return Group(table, Text("Lag is from commit to live; lag and pause are in ms, without the version it joined at."))


def _percentiles(seconds: Sequence[float], digits: int) -> list[str]:
    """p50 and p99 in milliseconds."""
    return [f"{1000 * percentile(seconds, share):.{digits}f}" if seconds else "–" for share in (50, 99)]


def phases(versions: Iterable[Version]) -> dict[str, list[float]]:
    """Seconds of each phase, for the versions that went through it."""
    found: dict[str, list[float]] = {
        "step → committed": [],
        "committed → live in the first replica": [],
        "live → first rollout on it": [],
        "step → first rollout on it": [],
    }
    for version in versions:
        if version.stepped and version.committed:
            found["step → committed"].append(version.committed - version.stepped)
        live = min(version.live.values(), default=None)
        if version.committed and live and live >= version.committed:
            found["committed → live in the first replica"].append(live - version.committed)
        if live and version.rolled and version.rolled >= live:
            found["live → first rollout on it"].append(version.rolled - live)
        if version.stepped and version.rolled and version.rolled >= version.stepped:
            found["step → first rollout on it"].append(version.rolled - version.stepped)
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so many percent do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share / 100 * len(ordered)) - 1)]


def _proof(record: Record, proofs: Mapping[str, Proof]) -> RenderableType:
    same = bool(proofs) and all((p.version, p.digest) == (record.head, record.digest) for p in proofs.values())
    if not same or not record.exact:
        return Text("The replicas do not hold the trainer's weights.", style="bold red")
    names, hold = " and ".join(sorted(proofs)), "holds" if len(proofs) == 1 else "hold"
    return Text(
        f"Every replica is bit-identical: {names} {hold} version {record.head}, {record.digest}, as the trainer does.",
        style="bold green",
    )
