"""Checkpoints that a channel only names: models of the Hugging Face Hub, which come through its own cache."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from weightcast.checkpoint import Checkpoint
from weightcast.errors import AccessError, MissingError, StoreError, UnreachableError, UnsupportedError, UsageError
from weightcast.files import Report, discard, require_space, silent, sync_folder
from weightcast.keys import is_plain_file
from weightcast.manifest import Reference
from weightcast.store.hub import asking, endpoint, library

_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
_OTHERS = ["*/*", ".*"]
"""Other formats of the same weights are in folders of their own."""

_SECONDS = 10.0
"""For the Hub to answer who it is that we want; downloads take as long as they take."""


def resolved(reference: Reference) -> Reference:
    """The same with the commit that its revision stands for now, which never changes."""
    with _asking(reference) as hub:
        found = _api(hub).model_info(reference.repository, revision=reference.revision, timeout=_SECONDS)
        if not found.sha:
            raise StoreError("the Hub does not say which commit this is", url=_url(reference))
        return Reference(reference.repository, found.sha)


def bring(reference: Reference, folder: Path, report: Report = silent, *, linked: bool = False) -> None:
    """Put the model's weights and what is needed to load them into ``folder``; `StoreError` if they cannot be had.

    What the Hub's cache has is not fetched again. Files are copies, durable, so that a mirror may change them; with
    ``linked`` they are the cache's own wherever that can be, and must not be changed.
    """
    with _asking(reference) as hub:
        snapshot = _snapshot(hub, reference, report)
    files = {path.name: path.resolve() for path in snapshot.iterdir() if path.is_file() and is_plain_file(path.name)}
    for path in folder.iterdir():
        discard(path)
    if not linked:
        require_space(folder, sum(path.stat().st_size for path in files.values()))
    for name, path in sorted(files.items()):
        _place(path, folder / name, linked)
    _leave_out_copies(folder)
    sync_folder(folder)


def _snapshot(hub: Any, reference: Reference, report: Report) -> Path:
    """The model in the Hub's cache, where files are links to what they hold."""
    import httpx2

    options: dict[str, Any] = {
        "revision": reference.revision,
        "endpoint": endpoint(),
        "allow_patterns": _WANTED,
        "ignore_patterns": _OTHERS,
        "library_name": "weightcast",
        "tqdm_class": _telling(hub, report),
    }
    away = False
    try:  # without the many attempts that a download makes: whether the Hub is there, and lets us
        _api(hub).model_info(reference.repository, revision=reference.revision, timeout=_SECONDS)
    except (httpx2.TransportError, hub.errors.OfflineModeIsEnabled):
        away = True
    return Path(hub.snapshot_download(reference.repository, local_files_only=away, **options))


def _place(source: Path, target: Path, linked: bool) -> None:
    if linked:
        with suppress(OSError):  # another disk, or one without links
            os.link(source, target)
            return
        require_space(target.parent, source.stat().st_size)
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def _leave_out_copies(folder: Path) -> None:
    """Remove weights that are not of the checkpoint: in a mirror they would stay what they are for ever."""
    with Checkpoint(folder) as checkpoint:
        own = {path.name for path in checkpoint.files}
    for path in folder.glob("*.safetensors"):
        if path.name not in own:
            path.unlink()


def _api(hub: Any) -> Any:
    return hub.HfApi(endpoint=endpoint(), library_name="weightcast")


def _url(reference: Reference) -> str:
    return f"hf://{reference.repository}@{reference.revision}"


@contextmanager
def _asking(reference: Reference) -> Iterator[Any]:
    """The library; what goes wrong in here is said as of this model."""
    url = _url(reference)
    try:
        hub = library()
    except UsageError as error:
        raise UnsupportedError(error.problem, url=url, hint=error.hint) from None
    with asking("read", url):
        try:
            yield hub
        except hub.errors.GatedRepoError:
            hint = "Ask for access on the model's page, then run `hf auth login`, or set HF_TOKEN."
            raise AccessError("access to this model must be asked for", url=url, hint=hint) from None
        except hub.errors.RevisionNotFoundError:
            raise MissingError("the model has no such revision", url=url, hint="Check the revision.") from None
        except (hub.errors.RepositoryNotFoundError, hub.errors.HFValidationError):
            hint = "Check the name; if it is private, run `hf auth login`, or set HF_TOKEN."
            raise MissingError("the Hub shows no such model", url=url, hint=hint) from None
        except hub.errors.LocalEntryNotFoundError:
            hint = "Check the link, HF_HUB_OFFLINE, and HF_ENDPOINT if it is set."
            raise UnreachableError(
                "the Hub cannot be reached, and its cache has not all of it", url=url, hint=hint
            ) from None


def _telling(hub: Any, report: Report) -> Any:
    """A bar that is not drawn: it tells ``report`` how many bytes there are."""

    class Telling(hub.utils.tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any):
            self._counts = options.get("name") == "huggingface_hub.snapshot_download"
            super().__init__(*arguments, **options | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._counts:
                report("download", int(self.n), int(self.total or self.n))

    return Telling
