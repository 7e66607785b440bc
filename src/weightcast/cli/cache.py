"""`weightcast cache`, `weightcast cache prune`"""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from weightcast.cli.columns import Column, fitted
from weightcast.cli.console import AsJson, say, tell, working
from weightcast.cli.text import Text
from weightcast.cli.wording import size
from weightcast.cli.words import ago, count, seconds
from weightcast.errors import BusyError, UsageError

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
        str | None, typer.Option(metavar="TIME", help="prune: delete mirrors that were not used for this long (30d).")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="prune: delete all mirrors that are not in use.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="prune: only say what would be deleted.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the mirrors in your cache, or delete old ones.

    `publish` and `attach` keep weights there unless they get --mirror; a deleted mirror is fetched again when it is
    needed. One that a process uses is never deleted.
    """
    with working(1, as_json, kernels=False):
        if action == "list" and (older_than is not None or everything or dry_run):
            raise UsageError("--older-than, --all and --dry-run are for `weightcast cache prune`")
        if action == "prune" and everything == (older_than is not None):
            raise UsageError("what is to be deleted?", hint="Say --older-than 30d, or --all.")
        found = mirrors(cache_folder())
        if action == "prune":
            age = 0.0 if older_than is None else seconds(older_than)
            now = time.time()
            if not dry_run:
                _sweep(cache_folder())
            _prune([mirror for mirror in found if everything or now - mirror.last_used >= age], dry_run, as_json)
        elif as_json:
            tell({"cache": str(cache_folder()), "mirrors": [asdict(mirror) for mirror in found]})
        else:
            _print(found)


def cache_folder() -> Path:
    """Where this user's mirrors are kept by default."""
    from weightcast.follow.mirror_folder import default_mirror

    return default_mirror("0" * 32).parent


def mirrors(folder: Path) -> list[Cached]:
    """The mirrors in the cache, those used last first."""
    from weightcast.channel.keys import is_channel_id
    from weightcast.disk.checkpoint import MIRROR

    found = [_read(path) for path in folder.iterdir() if is_channel_id(path.name) and (path / MIRROR).is_dir()]
    return sorted(found, key=lambda mirror: -mirror.last_used)


def _read(folder: Path) -> Cached:
    from weightcast.follow.mirror_reader import mirror_status

    state = mirror_status(folder)
    sizes, times = [0], [folder.stat().st_mtime]
    for path in folder.rglob("*"):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue  # its follower is at work
        sizes.append(0 if path.is_dir() else status.st_size)
        times.append(status.st_mtime)
    with ExitStack() as locks:
        in_use = not _held(folder, locks, shared=True)
    version = None if state is None else state.log_at if state.log_at is not None else state.files_at.version
    return Cached(
        folder=str(folder),
        channel=state.url if state and state.url else folder.name,
        version=version,
        bytes=sum(sizes),
        last_used=max(times),
        in_use=in_use,
    )


def _held(folder: Path, locks: ExitStack, shared: bool = False) -> bool:
    """Take a mirror's locks for as long as ``locks`` is open; False if a process holds one of them."""
    from weightcast.disk.checkpoint import MIRROR
    from weightcast.disk.durable import locked

    try:
        with ExitStack() as taking:
            for name in ("owner", "lock"):
                if (folder / MIRROR / name).exists():
                    taking.enter_context(locked(folder / MIRROR / name, shared=shared, patience=0))
            locks.enter_context(taking.pop_all())
    except BusyError:
        return False
    return True


def _prune(old: list[Cached], dry_run: bool, as_json: bool) -> None:
    deleted: list[Cached] = []
    links = [mirror for mirror in old if Path(mirror.folder).is_symlink()]
    for mirror in old:
        if mirror in links:
            continue  # its files are elsewhere, put there by the user
        with ExitStack() as locks:
            if _held(Path(mirror.folder), locks):
                deleted.append(mirror)
                if not dry_run:
                    _delete(Path(mirror.folder))
    freed = sum(mirror.bytes for mirror in deleted)
    in_use = [mirror for mirror in old if mirror not in deleted and mirror not in links]
    if as_json:
        folders = {"deleted": deleted, "in_use": in_use, "links": links}
        named = {name: [mirror.folder for mirror in some] for name, some in folders.items()}
        tell({"dry_run": dry_run, "bytes": freed, **named})
        return
    for mirror in in_use:
        say(f"kept, in use: {mirror.folder}")
    for mirror in links:
        say(f"kept, a symbolic link: {mirror.folder}")
    would = "would be deleted" if dry_run else "deleted"
    say(f"{count(len(deleted), 'mirror')} {would}, {size(freed)}")


def _delete(folder: Path) -> None:
    """Out of the way first: whoever needs a mirror meanwhile makes a new one instead of finding half of the old."""
    gone = folder.with_name(f".{folder.name}{_PRUNED}")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone)


def _sweep(folder: Path) -> None:
    """Delete what an interrupted prune left."""
    from weightcast.channel.keys import is_channel_id

    for path in folder.glob(f".*{_PRUNED}"):
        if is_channel_id(path.name[1 : -len(_PRUNED)]) and not path.is_symlink():
            with ExitStack() as locks:
                if _held(path, locks):  # else another prune is deleting it
                    shutil.rmtree(path)


def _print(found: list[Cached]) -> None:
    if not found:
        say(f"no mirrors in {cache_folder()}")
        return
    now = time.time()
    say(
        fitted(
            [
                Column("version", [Text("" if m.version is None else str(m.version)) for m in found]),
                Column("size", [Text(size(m.bytes)) for m in found]),
                Column("last used", [Text("now" if m.in_use else ago(now - m.last_used)) for m in found]),
                Column("channel", [Text(m.channel) for m in found], rank=1, left=True, shortest=20),
                Column("folder", [Text(m.folder, "dim") for m in found], rank=2, left=True),
            ]
        )
    )
    say(f"{count(len(found), 'mirror')}, {size(sum(mirror.bytes for mirror in found))}")
