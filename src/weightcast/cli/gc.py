"""`weightcast gc URL`"""

import re
from typing import Annotated, Any

import typer

from weightcast.channel.retention import Retention
from weightcast.cli.console import AsJson, Url, open_chain, say, tell, warn, working
from weightcast.cli.wording import size
from weightcast.errors import UsageError
from weightcast.upkeep import collect

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


_MOST_LINES = 20


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

    In a damaged channel only leftovers go: what is left may be needed to mend it, and you are told what is missing.
    Times are like 90s, 15m, 12h, 7d, and are measured by the store's clock.
    """
    with working(1, as_json, kernels=False):
        policy = Retention(seconds(window), seconds(grace), seconds(patience))
        found = collect.collect(open_chain(url), policy, dry_run=dry_run)
        tell(_fields(found, dry_run)) if as_json else _print(found, url, grace, dry_run)


def _fields(found: collect.Collected, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "versions": list(found.versions),
        "objects": list(found.objects),
        "doomed": list(found.doomed),
        "debris": list(found.debris),
        "bytes": found.nbytes,
        "ignored_pins": list(found.ignored_pins),
        "damage": list(found.damage),
    }


def _print(found: collect.Collected, url: str, grace: str, dry_run: bool) -> None:
    for version in found.ignored_pins:
        warn(f"version {version} is pinned and not there: the pin holds nothing. `weightcast unpin {url} {version}`")
    if found.damage:
        warn("the channel is damaged, so no version is deleted: what is left may be needed to mend it")
        for line in found.damage[:_MOST_LINES]:
            warn(line)
        more = f"{len(found.damage) - _MOST_LINES:,} more; " if len(found.damage) > _MOST_LINES else ""
        warn(f"{more}`weightcast verify {url}` lists what is wrong")
    would = "would go" if dry_run else "gone"
    say(f"{len(found.versions):,} versions {would}{_ranges(found.versions)}")
    say(f"{len(found.objects):,} objects {would}, {size(found.nbytes)}")
    if found.debris:
        say(f"{len(found.debris):,} unfinished uploads {would}, their bytes among these")
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
