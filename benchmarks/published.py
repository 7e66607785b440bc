"""`weightcast estimate` for the examples that others have published, as the tables of docs/guides/estimate.md.

    python benchmarks/published.py

Nothing is measured here: the rates are those of docs/guides/rates/h200.json. What others state is quoted in the first
column of figures; densities are those that their bytes imply, at 48 bits a change in TRL's encoding and at 23 in
PULSE's. Prints two tables.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from weightcast.cli import app
from weightcast.cli.wording import brief, size, span

RATES = Path(__file__).parents[1] / "docs" / "guides" / "rates" / "h200.json"


@dataclass(frozen=True)
class Example:
    name: str
    stated: str
    arguments: str


def _links(rate: str) -> str:
    return f"--up {rate} --down {rate} --fabric {rate}"


EXAMPLES = (
    Example("0.6B", "27.4 MB instead of 1.2 GB (TRL)", f"596M --density 0.77 --tensors 311 {_links('125MB/s')}"),
    Example(
        "7B, trained in bf16",
        "108 MB instead of 14 GB (PULSE)",
        f"7.6B --density 0.49 --training wire --tensors 339 --ranks 8 --replicas 4 {_links('1GB/s')}",
    ),
    Example(
        "405B, links of 100 GB/s",
        "6 GB; broadcast 8 s, pause 2 s (TRL)",
        f"405B --density 0.25 --tensors 1137 --ranks 64 --workers 16 --replicas 8 {_links('100GB/s')}",
    ),
    Example(
        "405B, links of 1 GB/s",
        "6 GB; 13 min against 6 s (TRL)",
        f"405B --density 0.25 --tensors 1137 --ranks 64 --workers 16 --replicas 8 {_links('1GB/s')}",
    ),
    Example(
        "1T, five regions",
        "15 GB (TRL)",
        "1T --density 0.25 --tensors 70000 --ranks 256 --workers 16 --replicas 1000 --regions 5 --up 20GB/s"
        " --down 3GB/s --between 2.5GB/s --fabric 50GB/s",
    ),
)


def estimated(example: Example) -> dict[str, Any]:
    """What the command says."""
    done = CliRunner().invoke(app, ["estimate", *example.arguments.split(), "--rates", str(RATES), "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def seconds(value: float) -> str:
    return brief(value) if value < 60 else span(value)


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def tables() -> tuple[str, str]:
    found = {example: estimated(example) for example in EXAMPLES}
    sizes = [row("", "they state", "full copy", "TRL's encoding", "`gap`", "`banded`"), row(*["---"] * 6)]
    times = [
        row("", "full copies", "broadcast", "TRL's encoding", "`gap`", "`banded`", "a broadcast is sooner above"),
        row(*["---"] * 7),
    ]
    names = ("full copies", "TRL's encoding", "gap", "banded")
    for example, facts in found.items():
        methods = facts["methods"]
        sizes.append(row(example.name, example.stated, *(size(methods[name]["bytes"]) for name in names)))
        shown = (f"{seconds(one['seconds'])} ({seconds(one['pause'])})" for one in methods.values())
        times.append(row(example.name, *shown, f"{size(facts['broadcast_is_sooner_above'])}/s"))
    return "\n".join(sizes), "\n".join(times)


def main() -> None:
    print(*tables(), sep="\n\n")


if __name__ == "__main__":
    main()
