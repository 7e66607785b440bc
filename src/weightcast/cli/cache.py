"""`weightcast cache`, `weightcast cache prune`"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from weightcast.channel.keys import is_channel_id
from weightcast.cli.console import say, tell
from weightcast.cli.text import Column, Table
from weightcast.cli.wording import ago, count, seconds, size
from weightcast.disk.durable import locked
from weightcast.errors import BusyError, UsageError
from weightcast.follow.mirror_folder import MirrorFolder, cache_folder
from weightcast.follow.mirror_reader import mirror_status

_PRUNED = ".pruned"
"""The end of a mirror's name while it is being deleted."""


@dataclass(frozen=True)
class Cached:
    """A mirror in the user's cache."""

    folder: str
    channel: str
    """Where the channel was last found; its id if that is not known."""
    version: int | None
    bytes: int
    last_used: float
    in_use: bool


def cache(
    action: Annotated[
        Literal["list", "prune"], typer.Argument(metavar="[list|prune]", help="What to do; `list` by default.")
    ] = "list",
    older_than: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="prune: delete mirrors that were not used for this long, such as 30d."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="prune: delete all mirrors that are not in use.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="prune: only print what would be deleted.")] = False,
) -> None:
    """List the mirrors in your cache, or delete old ones.

    `publish` and `attach` keep weights there unless they get --mirror; a deleted mirror is fetched again when it is
    needed. One that a process uses is never deleted.
    """
    if action == "list" and (older_than is not None or everything or dry_run):
        raise UsageError("--older-than, --all and --dry-run are for `weightcast cache prune`")
    if action == "prune" and everything == (older_than is not None):
        raise UsageError("prune needs either --older-than or --all", hint="Say --older-than 30d, or --all.")
    folder = cache_folder()
    found = mirrors(folder)
    if action == "prune":
        oldest = None if older_than is None else time.time() - seconds(older_than)
        if not dry_run:
            _sweep(folder)
        _prune([mirror for mirror in found if oldest is None or mirror.last_used <= oldest], dry_run)
        return
    tell({"cache": str(folder), "mirrors": [asdict(mirror) for mirror in found]})
    if not found:
        say(f"no mirrors in {folder}")
        return
    channel, place = Column("channel", left=True, rank=1, shortest=20), Column("folder", left=True, style="dim", rank=2)
    table = Table("version", "size", "last used", channel, place)
    for mirror in found:
        version = "" if mirror.version is None else str(mirror.version)
        used = "now" if mirror.in_use else ago(time.time() - mirror.last_used)
        table.add(version, size(mirror.bytes), used, mirror.channel, mirror.folder)
    say(table)
    say(f"{count(len(found), 'mirror')}, {size(sum(mirror.bytes for mirror in found))}")


def mirrors(folder: Path) -> list[Cached]:
    """The mirrors in the cache, those used last first."""
    paths = [path for path in folder.iterdir() if is_channel_id(path.name) and MirrorFolder(path).inner.is_dir()]
    return sorted(map(_read, paths), key=lambda mirror: -mirror.last_used)


def _read(folder: Path) -> Cached:
    state = mirror_status(folder)
    sizes, times = [0], [folder.stat().st_mtime]
    for path in folder.rglob("*"):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue  # its follower is at work
        sizes.append(0 if path.is_dir() else status.st_size)
        times.append(status.st_mtime)
    version = None if state is None else state.log_at if state.log_at is not None else state.files_at.version
    return Cached(
        folder=str(folder),
        channel=state.url if state and state.url else folder.name,
        version=version,
        bytes=sum(sizes),
        last_used=max(times),
        in_use=MirrorFolder(folder).is_owned,
    )


@contextmanager
def _unused(folder: Path, dry_run: bool = False) -> Iterator[bool]:
    """Whether no process keeps or reads the mirror; then none can until this ends, unless it is a dry run."""
    with ExitStack() as locks:
        try:
            for name in ("owner", "lock"):
                if (path := MirrorFolder(folder).inner / name).exists():
                    shared = dry_run and name == "owner"  # a follower that starts now is not refused
                    locks.enter_context(locked(path, shared=shared, patience=0))
        except BusyError:
            locks.close()
            yield False
        else:
            yield True


def _prune(old: list[Cached], dry_run: bool) -> None:
    deleted: list[Cached] = []
    links = [mirror for mirror in old if Path(mirror.folder).is_symlink()]
    for mirror in old:
        if mirror in links:
            continue  # its files are elsewhere, put there by the user
        with _unused(Path(mirror.folder), dry_run) as unused:
            if unused:
                deleted.append(mirror)
                if not dry_run:
                    _delete(Path(mirror.folder))
    freed = sum(mirror.bytes for mirror in deleted)
    in_use = [mirror for mirror in old if mirror not in deleted and mirror not in links]
    folders = {"deleted": deleted, "in_use": in_use, "links": links}
    named = {name: [mirror.folder for mirror in some] for name, some in folders.items()}
    tell({"dry_run": dry_run, "bytes": freed, **named})
    for mirror in in_use:
        say(f"kept, in use: {mirror.folder}")
    for mirror in links:
        say(f"kept, a symbolic link: {mirror.folder}")
    would = "would be deleted" if dry_run else "deleted"
    say(f"{count(len(deleted), 'mirror')} {would}, {size(freed)}")


def _delete(folder: Path) -> None:
    """Rename it first: whoever needs a mirror meanwhile makes a new one instead of finding half of the old."""
    gone = folder.with_name(f".{folder.name}{_PRUNED}")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone)


def _sweep(folder: Path) -> None:
    """Delete what an interrupted prune left."""
    for path in folder.glob(f".*{_PRUNED}"):
        if is_channel_id(path.name[1 : -len(_PRUNED)]) and not path.is_symlink():
            with _unused(path) as unused:
                if unused:  # else another prune is deleting it
                    shutil.rmtree(path)
