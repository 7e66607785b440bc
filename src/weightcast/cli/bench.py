"""`weightcast bench codec [TRACE]`"""

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from weightcast.bench import bench_codecs
from weightcast.cli.console import AsJson, facts, say, tell, working
from weightcast.errors import CheckpointError

SHIPPED = Path(__file__).parents[3] / "benchmarks" / "data"

bench = typer.Typer(help="Measure on this machine.", no_args_is_help=True)


@bench.callback()
def group() -> None:
    """Measure on this machine."""


@bench.command()
def codec(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[TRACE]...", help="Folders of recorded steps; else the shipped ones."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Size and speed of every codec on recorded training steps, beside other systems' sizes, all in one run."""
    cores = len(os.sched_getaffinity(0))
    with working(1, as_json) as (_, report):
        results = [
            bench_codecs(trace, (1, cores) if cores > 1 else (1,), lambda done, total: report("steps", done, total))
            for trace in traces or _shipped()
        ]
        if not all(codec["bit_exact"] for result in results for codec in result["codecs"].values()):
            raise CheckpointError("a codec was not exact: this is a defect of weightcast, please report it")
    if as_json:
        tell({"traces": results} if len(results) > 1 else results[0])
        return
    for result in results:
        facts({key: value for key, value in result.items() if not isinstance(value, dict)}, as_json=False)
        say(_table(result))


def _shipped() -> list[Path]:
    if not SHIPPED.is_dir():
        raise CheckpointError("no traces are installed", hint="Name one, or run this in a clone of the repository.")
    return sorted(path for path in SHIPPED.iterdir() if path.is_dir())


def _table(result: dict[str, Any]) -> Table:
    threads = next(iter(result["codecs"].values()))["encode_memcpys_by_threads"].keys()
    note = f"times: multiples of one memcpy of the tensors, on {' / '.join(threads)} threads"
    table = Table(box=None, header_style="dim", caption=note, caption_justify="left")
    table.add_column("", no_wrap=True)
    for column in ("bits/change", "bit-exact", "diff+encode", "decode+apply"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in result["codecs"].items():
        times = (row["encode_memcpys_by_threads"], row["decode_apply_memcpys_by_threads"])
        cells = (" / ".join(f"{value:.1f}" for value in by_threads.values()) for by_threads in times)
        bits = Text(f"{row['bits_per_change']:.2f}", "bold")
        table.add_row(Text(name, "bold"), bits, "yes" if row["bit_exact"] else "NO", *cells)
    for name, value in result["others_bits_per_change"].items():
        table.add_row(Text(name, "dim"), "needs zstandard" if value is None else f"{value:.2f}")
    return table
