"""`weightcast gc URL`"""

from typing import Annotated, Any

import typer

from weightcast.channel.retention import Retention
from weightcast.cli.console import AsJson, Url, open_chain, say, tell, warn, working
from weightcast.cli.text import Table
from weightcast.cli.wording import size
from weightcast.cli.words import count, ranges, seconds
from weightcast.upkeep import collect

_MOST_LINES = 20


def gc(
    url: Url,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted, and why not.")] = False,
    window: Annotated[
        str, typer.Option(metavar="TIME", help="Keep versions younger than this, and every route on from them.")
    ] = "7d",
    keep_last: Annotated[int, typer.Option(min=0, metavar="N", help="Keep the newest N versions.")] = 0,
    keep_daily: Annotated[
        int, typer.Option(min=0, metavar="N", help="Keep the newest version of each of the last N days that have one.")
    ] = 0,
    keep_weekly: Annotated[
        int, typer.Option(min=0, metavar="N", help="Keep the newest version of each of the last N weeks that have one.")
    ] = 0,
    grace: Annotated[
        str,
        typer.Option(metavar="TIME", help="Delete nothing younger, and objects only this long after their versions."),
    ] = "1d",
    patience: Annotated[
        str, typer.Option(metavar="TIME", help="Wait for no replica whose version is older than this.")
    ] = "28d",
    as_json: AsJson = False,
) -> None:
    """Delete what no replica needs any more.

    A version is kept if any rule keeps it: the window, --keep-last, --keep-daily, --keep-weekly, a pin, a tag, or a
    replica that is there. What is kept can be reached exactly, so versions on the way to it stay, too. Days and weeks
    are UTC and weeks begin on Monday; a version belongs to the day when the store got it. Times are like 90s, 15m, 12h,
    7d. In a damaged channel only leftovers are deleted: the rest may be needed to repair it.
    """
    with working(1, as_json, kernels=False):
        times = seconds(window), seconds(grace), seconds(patience)
        policy = Retention(*times, keep_last=keep_last, keep_daily=keep_daily, keep_weekly=keep_weekly)
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
        "doomed_bytes": found.doomed_nbytes,
        "kept": {str(version): list(reasons) for version, reasons in found.kept.items()},
        "ignored_pins": list(found.ignored_pins),
        "ignored_tags": list(found.ignored_tags),
        "damage": list(found.damage),
    }


def _print(found: collect.Collected, url: str, grace: str, dry_run: bool) -> None:
    for version in found.ignored_pins:
        warn(f"version {version} is pinned and is not there. `weightcast unpin {url} {version}` removes the pin.")
    for name in found.ignored_tags:
        warn(f"the tag {name} names a version that is not there. `weightcast tag {url} --delete {name}` deletes it.")
    if found.damage:
        warn("the channel is damaged, so no version is deleted: what is left may be needed to repair it")
        for line in found.damage[:_MOST_LINES]:
            warn(line)
        more = f"{len(found.damage) - _MOST_LINES:,} more; " if len(found.damage) > _MOST_LINES else ""
        warn(f"{more}`weightcast verify {url}` lists what is wrong")
    if dry_run and found.kept:
        say(_reasons(found))
        say("")
    would = "would be deleted" if dry_run else "deleted"
    which = f": {ranges(found.versions)}" if found.versions else ""
    say(f"{count(len(found.versions), 'version')} {would}{which}")
    say(f"{count(len(found.objects), 'object')} {would}, {size(found.nbytes)}")
    if found.debris:
        say(f"{count(len(found.debris), 'unfinished upload')} {would}, included in that size")
    say(f"{count(len(found.doomed), 'object')} to delete in a run {grace} from now, {size(found.doomed_nbytes)}")


def _reasons(found: collect.Collected) -> Table:
    """Every version that stays, and why; neighbours with the same reasons in one row."""
    table = Table()
    table.add_column("kept", justify="right")
    table.add_column("why", shrink=True)
    runs: list[tuple[list[int], tuple[str, ...]]] = []
    for version, reasons in sorted(found.kept.items()):
        if runs and runs[-1][1] == reasons and runs[-1][0][-1] == version - 1:
            runs[-1][0].append(version)
        else:
            runs.append(([version], reasons))
    for versions, reasons in reversed(runs):
        table.add_row(ranges(versions), ", ".join(reasons))
    return table
