"""The rate of a link below which `banded` arrives sooner than `gap`, from what RESULTS.md says was measured.

    python benchmarks/break_even.py

Nothing is measured here: times are the rows of "Speed and overhead on a model", as multiples of a memcpy whose seconds
RESULTS gives for each machine; bits a change are those of "Sizes", fp32 masters, whole. A version is encoded once and
decoded once with the same number of threads, and goes up one link and down another one like it. Prints a table.
"""

from __future__ import annotations

import re
from pathlib import Path

from weightcast.publish.codec_choice import Cost, break_even

RESULTS = (Path(__file__).parent / "RESULTS.md").read_text().replace("*", "")
CHANGED = int(596_050_944 * 0.0107)
MACHINES = (("machine A", 0.09, (1, 2)), ("the H200's host", 0.165, (1, 2, 4, 8, 16)))
"""In the order of the tables: their names, the seconds of a memcpy of 1.19 GB on one thread, and numbers of threads."""


def numbers(row: str, table: str) -> list[float]:
    """The cells of a table's row, without the first."""
    found = re.search(rf"^\| {re.escape(row)} \|(.*)\|$", table, re.MULTILINE)
    assert found is not None
    return [float(cell) for cell in found[1].split("|")]


def main() -> None:
    bits = {codec: numbers(f"`{codec}`", RESULTS)[0] for codec in ("gap", "banded")}
    saved = CHANGED * (bits["gap"] - bits["banded"]) / 8
    print(f"{CHANGED:,} changes: `gap` is {saved / 1e6:.2f} MB larger than `banded`\n")
    print("| | threads | `banded` works longer by | and arrives sooner below |\n|---|---|---|---|")
    tables = RESULTS.partition("## Speed and overhead on a model")[2].split("| diff |")[1:]
    for (machine, memcpy, threads), table in zip(MACHINES, tables, strict=False):
        for i, count in enumerate(threads):
            column = i + 1 if machine == "machine A" else i  # the first column there is a floor
            seconds = {
                codec: memcpy * sum(numbers(f"`{codec}` {verb}", table)[column] for verb in ("encode", "decode"))
                for codec in bits
            }
            banded, gap = (Cost(bits[codec] / 8, seconds[codec] / 2 / CHANGED) for codec in ("banded", "gap"))
            even = 8 * break_even(banded, gap, 0.0, CHANGED) / 1e6
            longer = 1000 * (seconds["banded"] - seconds["gap"])
            print(f"| {machine} | {count} | {longer:.0f} ms | {even:,.0f} Mbit/s |")


if __name__ == "__main__":
    main()
