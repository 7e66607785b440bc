"""`weightcast gc URL`"""

import re
from typing import Annotated

import typer

from weightcast import collect
from weightcast.cli.console import AsJson, Url, open_chain, say, tell, working
from weightcast.cli.wording import size
from weightcast.errors import UsageError
from weightcast.retention import Retention

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def gc(
    url: Url,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    window: Annotated[
        str, typer.Option(metavar="TIME", help="Versions younger than this can be reached, and left from, by everyone.")
    ] = "7d",
    grace: Annotated[
        str, typer.Option(metavar="TIME", help="Nothing younger goes; objects go this long after their versions.")
    ] = "1d",
    patience: Annotated[
        str, typer.Option(metavar="TIME", help="A replica whose version is older than this holds nothing back.")
    ] = "28d",
    as_json: AsJson = False,
) -> None:
    """Delete what nobody needs any more.

    Times are like 90s, 15m, 12h, 7d, and are measured by the store's clock.
    """
    with working(1, as_json, kernels=False):
        policy = Retention(seconds(window), seconds(grace), seconds(patience))
        found = collect.collect(open_chain(url), policy, dry_run=dry_run)
        if as_json:
            values = {
                "dry_run": dry_run,
                "versions": list(found.versions),
                "objects": list(found.objects),
                "doomed": list(found.doomed),
                "bytes": found.nbytes,
            }
            tell(values)
            return
        would = "would go" if dry_run else "gone"
        say(f"{len(found.versions):,} versions {would}{_ranges(found.versions)}")
        say(f"{len(found.objects):,} objects {would}, {size(found.nbytes)}")
        say(f"{len(found.doomed):,} objects follow in a run {grace} later")


def seconds(text: str) -> float:
    """A duration such as 90s, 15m, 12h, 7d; `UsageError` if it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not found:
        raise UsageError(f"{text!r} is no duration", hint="Write a number and s, m, h or d: 90s, 15m, 12h, 7d.")
    return float(found[1]) * _UNITS[found[2]]


def _ranges(versions: tuple[int, ...]) -> str:
    """`: 3–17, 20`, and nothing for none."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and version == runs[-1][1] + 1:
            runs[-1][1] = version
        else:
            runs.append([version, version])
    shown = [str(first) if first == last else f"{first}–{last}" for first, last in runs]
    return f": {', '.join(shown)}" if shown else ""
