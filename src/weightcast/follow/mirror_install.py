"""Installing an anchor in a mirror: its files are moved in, and an interrupted move is completed by doing it again."""

from __future__ import annotations

import shutil
from collections.abc import Iterable

from weightcast.disk.checkpoint import INDEX
from weightcast.disk.durable import discard, remove, sync_folder
from weightcast.follow.mirror_folder import MirrorFolder
from weightcast.follow.mirror_state import FilesState, read_state, write_state
from weightcast.follow.redo_log import log_name
from weightcast.follow.replica import StagedAnchor, StagedPatch


def prepare_install(
    place: MirrorFolder, anchor: StagedAnchor, patches: Iterable[StagedPatch], channel: str, url: str
) -> None:
    """Lay out an anchor and the patches after it: from now on they will be installed, however often we are killed."""
    for left in (place.new_files, place.new_log):
        discard(left)
    place.new_log.mkdir()
    version = anchor.position.version
    for number, patch in enumerate(patches):
        patch.path.replace(place.new_log / log_name(number, version, patch.position.version))
        version = patch.position.version
    anchor.folder.rename(place.new_files)
    for changed in (place.new_log, place.new_files, place.inner):
        sync_folder(changed)
    files = {path.name: (path.stat().st_size, 0) for path in place.new_files.iterdir()}
    write_state(place.install, FilesState(channel, url, anchor.position, anchor.digests, files))


def move_in(place: MirrorFolder, new: FilesState) -> None:
    """Move the prepared files and log in; what was moved before an interruption is in place already."""
    before = read_state(place.position)
    for name in sorted(new.files):
        if (place.new_files / name).exists():
            (place.new_files / name).replace(place.path / name)
    for name in {INDEX, *(before.files if before else ())} - new.files.keys():
        (place.path / name).unlink(missing_ok=True)
    sync_folder(place.path)
    if place.new_log.exists():
        shutil.rmtree(place.log)
        place.new_log.rename(place.log)
        sync_folder(place.inner)


def finish_install(place: MirrorFolder) -> None:
    """Remove what is left of an installation."""
    remove(place.install)
    discard(place.history)  # nothing leads back over an anchor
    discard(place.new_files)
    discard(place.new_log)
