"""`weightcast gc URL`"""

from typing import Annotated

import typer

from weightcast.channel.retention import Retention
from weightcast.cli.console import caution, say, tell
from weightcast.cli.options import TrustedKey, Url
from weightcast.cli.text import Column, Table
from weightcast.cli.trusting import open_trusted, trust_of
from weightcast.cli.wording import count, ranges, seconds, size
from weightcast.upkeep import collect

_MOST_LINES = 20


def gc(
    url: Url,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be deleted, and why the rest stays.")
    ] = False,
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
        str, typer.Option(metavar="TIME", help="Keep nothing for replicas whose version is older than this.")
    ] = "28d",
    trust: TrustedKey = None,
) -> None:
    """Delete what no replica needs any more.

    A version is kept if any rule keeps it: the window, --keep-last, --keep-daily, --keep-weekly, a pin, a tag, or a
    replica that reports it. What is kept stays reachable exactly, so versions on the route to it stay, too. Days and
    weeks are UTC and weeks begin on Monday; a version belongs to the day when the store got it. Times are like 90s,
    15m, 12h, 7d. In a damaged channel only leftovers are deleted: the rest may be needed to repair it.
    """
    times = seconds(window), seconds(grace), seconds(patience)
    policy = Retention(*times, keep_last=keep_last, keep_daily=keep_daily, keep_weekly=keep_weekly)
    found = collect.collect(open_trusted(url, trust_of(trust)), policy, dry_run=dry_run)
    tell(
        {
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
    )
    _caution(found, url)
    if dry_run and found.kept:
        say(_reasons(found))
        say("")
    would = "would be deleted" if dry_run else "deleted"
    which = f": {ranges(found.versions)}" if found.versions else ""
    say(f"{count(len(found.versions), 'version')} {would}{which}")
    say(f"{count(len(found.objects), 'object')} {would}, {size(found.nbytes)}")
    if found.debris:
        say(f"{count(len(found.debris), 'unfinished upload')} {would}, included in that size")
    if found.doomed:
        say(f"{count(len(found.doomed), 'object')} to delete in a run {grace} from now, {size(found.doomed_nbytes)}")


def _caution(found: collect.Collected, url: str) -> None:
    for version in found.ignored_pins:
        caution(f"version {version} is pinned and is not there. `weightcast unpin {url} {version}` removes the pin.")
    for name in found.ignored_tags:
        caution(f"the tag {name} names a version that is not there. `weightcast tag {url} --delete {name}` deletes it.")
    if found.damage:
        caution("the channel is damaged, so no version is deleted: what is left may be needed to repair it")
        for line in found.damage[:_MOST_LINES]:
            caution(line)
        more = f"{len(found.damage) - _MOST_LINES:,} more; " if len(found.damage) > _MOST_LINES else ""
        caution(f"{more}`weightcast verify {url}` lists what is wrong")


def _reasons(found: collect.Collected) -> Table:
    """Every version that stays, and why; neighbours with the same reasons in one row."""
    table = Table("kept", Column("why", left=True, shortest=1))
    runs: list[tuple[list[int], tuple[str, ...]]] = []
    for version, reasons in sorted(found.kept.items()):
        if runs and runs[-1][1] == reasons and runs[-1][0][-1] == version - 1:
            runs[-1][0].append(version)
        else:
            runs.append(([version], reasons))
    for versions, reasons in reversed(runs):
        table.add(ranges(versions), ", ".join(reasons))
    return table
