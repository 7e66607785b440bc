"""References: checkpoints outside the bucket, on the Hugging Face Hub, fetched through the Hub's own cache."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import Any

from weightcast.channel.keys import is_plain_file
from weightcast.channel.records import ObjectRef, Reference
from weightcast.disk.checkpoint import INDEX, SINGLE
from weightcast.disk.companions import remove_code_references, wanted
from weightcast.disk.durable import Report, discard, require_space, scratch, silent, space_errors, sync_folder
from weightcast.errors import (
    AccessError,
    FormatError,
    MissingError,
    StoreError,
    TrustError,
    UnreachableError,
    UnsupportedError,
    UsageError,
)
from weightcast.format.json import parse_json
from weightcast.format.safetensors import MAX_HEADER
from weightcast.store.download import sha256_of, summed
from weightcast.store.hub import asking, endpoint, library

_COMPANIONS = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
_WEIGHTS = "*.safetensors"
_OTHERS = ["*/*", ".*"]
"""Folders hold other formats of the same weights."""

_MAX_COMPANIONS = 256 << 20
"""Bytes of all files other than weights, at most; the largest tokenizers have some 40 MB."""

_HEADERS = 128 << 20
"""Bytes that weight files may have beyond twice those of the tensors: a coarse limit, since sizes are not exact."""

_OTHER_MODEL = "Check which model it is, or download it yourself into the replica's folder."

_SECONDS = 10.0
"""Seconds for the Hub to answer a question; downloads have no limit."""


def resolved(reference: Reference) -> Reference:
    """The same reference with its revision resolved to a commit, which never changes."""
    with _asking(reference) as hub:
        found = _api(hub).model_info(reference.repository, revision=reference.revision, timeout=_SECONDS)
        if not found.sha:
            raise StoreError("the Hub does not say which commit this is", url=_url(reference))
        return Reference(reference.repository, found.sha)


def bring(
    reference: Reference,
    folder: Path,
    report: Report = silent,
    *,
    linked: bool = False,
    expected_bytes: int | None = None,
    pins: Sequence[ObjectRef] = (),
) -> None:
    """Put the model's weights, and the files needed to load them, into ``folder``; `StoreError` if that fails.

    Files in the Hub's cache are not fetched again. The files are durable copies that a mirror may change, and refer to
    no code; with ``linked`` they are the cache's own where possible, and must not be changed.

    Sizes are checked before anything is downloaded. Weights of far more than ``expected_bytes``, the size of the
    channel's tensors, are a `StoreError`; more than the disk has room for is a `SpaceError`.

    With ``pins`` these files are put there and no others, and `TrustError` is raised if one of them has other bytes.
    """
    with _asking(reference) as hub:
        snapshot = _snapshot(hub, reference, folder, report, linked=linked, expected_bytes=expected_bytes)
    files = _files_in(snapshot)
    if pins:
        files = _pinned(files, pins, _url(reference))
    for path in folder.iterdir():
        discard(path)
    if not linked:
        require_space(folder, sum(path.stat().st_size for path in files.values()))
    with space_errors(folder):
        for name, path in sorted(files.items()):
            _place(path, folder / name, linked)
        if not linked:
            remove_code_references(folder)
        sync_folder(folder)


def _snapshot(
    hub: Any, reference: Reference, folder: Path, report: Report, *, linked: bool, expected_bytes: int | None
) -> Path:
    """The folder of the model in the Hub's cache; its files are symbolic links."""
    import httpx2

    model = _Model(hub, reference.repository, reference.revision, _url(reference))
    try:  # one attempt, where a download makes many: is the Hub reachable, and may we read?
        found = _api(hub).model_info(
            reference.repository, revision=reference.revision, timeout=_SECONDS, files_metadata=True
        )
    except (httpx2.TransportError, hub.errors.OfflineModeIsEnabled):
        cached = _weights(model.cached(INDEX), model.cached(SINGLE) is not None, model.url)
        return model.download([*_COMPANIONS, *cached], report, local_files_only=True)
    # Download the commit whose sizes were checked: a branch may move meanwhile.
    model = replace(model, revision=found.sha or reference.revision)
    sizes = {file.rfilename: file.size for file in found.siblings or []}
    companions = model.select(sizes, _COMPANIONS)
    what = "files other than weights"
    _refuse_large(companions, _MAX_COMPANIONS, what, f"; the limit is {_MAX_COMPANIONS:,}", model.url)
    index = model.download([INDEX], silent) / INDEX if INDEX in sizes else None
    weights = model.select(sizes, _weights(index, SINGLE in sizes, model.url))
    if expected_bytes is not None:
        most, than = 2 * expected_bytes + _HEADERS, f", but the channel's have {expected_bytes:,}"
        _refuse_large(weights, most, "weights", than, model.url)
    model.require_space(companions | weights, folder, linked=linked)
    return model.download([escape(name) for name in companions | weights], report)


@dataclass(frozen=True)
class _Model:
    """A revision of a model on the Hub."""

    hub: Any
    repository: str
    revision: str
    url: str

    def select(self, sizes: Mapping[str, int | None], patterns: list[str]) -> dict[str, int]:
        """The files that match, with their sizes."""
        names = self.hub.utils.filter_repo_objects(sizes, allow_patterns=patterns, ignore_patterns=_OTHERS)
        selected = {name: sizes[name] for name in names}
        if any(size is None for size in selected.values()):
            hint = "Check HF_ENDPOINT if it is set."
            raise StoreError("the Hub does not say how large the model's files are", url=self.url, hint=hint)
        return {name: size or 0 for name, size in selected.items()}

    def cached(self, name: str) -> Path | None:
        found = self.hub.try_to_load_from_cache(self.repository, name, revision=self.revision)
        return Path(found) if isinstance(found, str) else None

    def require_space(self, sizes: Mapping[str, int], folder: Path, *, linked: bool) -> None:
        """`SpaceError` unless the Hub's cache has room for what is downloaded, and ``folder`` for what is copied."""
        cache = Path(self.hub.constants.HF_HUB_CACHE)
        while not cache.exists():
            cache = cache.parent
        missing = sum(size for name, size in sizes.items() if not self.cached(name))
        same_disk = cache.stat().st_dev == folder.stat().st_dev
        copied = 0 if linked and same_disk else sum(sizes.values())
        require_space(folder, copied)
        require_space(cache, missing + copied if same_disk else missing)

    def download(self, patterns: list[str], report: Report, **options: Any) -> Path:
        snapshot = self.hub.snapshot_download(
            self.repository,
            revision=self.revision,
            endpoint=endpoint(),
            allow_patterns=patterns,
            ignore_patterns=_OTHERS,
            library_name="weightcast",
            tqdm_class=_telling(self.hub, report),
            **options,
        )
        return Path(snapshot)


def _weights(index: Path | None, single: bool, url: str) -> list[str]:
    """Patterns of the files that hold the checkpoint's weights, without copies in other layouts."""
    if index is not None:
        return _named_in(index, url)
    return [SINGLE if single else _WEIGHTS]


def _named_in(index: Path, url: str) -> list[str]:
    """Patterns of the files that an index names. The names are untrusted: they match files of the model or nothing."""
    try:
        if index.stat().st_size > MAX_HEADER:
            raise FormatError("the index is too large")
        found = parse_json(index.read_bytes(), "index")
    except FormatError as error:
        raise StoreError(f"the model's {INDEX} is broken: {error.problem}", url=url, hint=_OTHER_MODEL) from None
    files = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise StoreError(f"the model's {INDEX} is broken: it has no map of weights", url=url, hint=_OTHER_MODEL)
    return sorted({escape(name) for name in files.values()})


def _refuse_large(sizes: Mapping[str, int], most: int, what: str, than: str, url: str) -> None:
    total = sum(sizes.values())
    if total > most:
        raise StoreError(f"the model's {what} have {total:,} bytes{than}", url=url, hint=_OTHER_MODEL)


def _files_in(snapshot: Path) -> dict[str, Path]:
    """The files of a snapshot that belong in a checkpoint folder, by name; the cache may hold files for other tools."""
    names = {path.name for path in snapshot.iterdir() if path.is_file()}
    weights = _weights(snapshot / INDEX if INDEX in names else None, SINGLE in names, str(snapshot))
    matching = {name for name in names if any(fnmatchcase(name, pattern) for pattern in (*_COMPANIONS, *weights))}
    return {name: (snapshot / name).resolve() for name in wanted(filter(is_plain_file, matching))}


def pins_of(reference: Reference, report: Report = silent) -> tuple[ObjectRef, ...]:
    """The files that readers of a reference get, with their sizes and SHA-256s; fetches what the cache lacks."""
    with scratch() as folder, _asking(reference) as hub:
        snapshot = _snapshot(hub, reference, folder, report, linked=True, expected_bytes=None)
    found = summed(_files_in(snapshot))  # in the cache itself: a link would look like a change of the file
    return tuple(ObjectRef(name, size, sha256) for name, (sha256, size) in sorted(found.items()))


def _pinned(files: Mapping[str, Path], pins: Sequence[ObjectRef], url: str) -> dict[str, Path]:
    for pin in pins:
        path = files.get(pin.key)
        if path is None or path.stat().st_size != pin.size or sha256_of(path) != pin.sha256:
            what = f"the model has no {pin.key}" if path is None else f"{pin.key} has other bytes"
            hint = "The model's repository was changed, or the Hub is not who it should be."
            raise TrustError(f"{what} than were signed", reason="forged", file=url, hint=hint)
    return {pin.key: files[pin.key] for pin in pins}


def _place(source: Path, target: Path, linked: bool) -> None:
    if linked:
        with suppress(OSError):  # another disk, or a file system without links
            os.link(source, target)
            return
        require_space(target.parent, source.stat().st_size)
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def _api(hub: Any) -> Any:
    return hub.HfApi(endpoint=endpoint(), library_name="weightcast")


def _url(reference: Reference) -> str:
    return f"hf://{reference.repository}@{reference.revision}"


@contextmanager
def _asking(reference: Reference) -> Iterator[Any]:
    """The Hub's library; its errors become ours, with the name of this model."""
    url = _url(reference)
    try:
        hub = library()
    except UsageError as error:
        raise UnsupportedError(error.problem, url=url, hint=error.hint) from None
    with asking("read", url):
        try:
            yield hub
        except hub.errors.GatedRepoError:
            hint = "Request access on the model's page, then run `hf auth login`, or set HF_TOKEN."
            raise AccessError("access to this model must be requested", url=url, hint=hint) from None
        except hub.errors.RevisionNotFoundError:
            raise MissingError("the model has no such revision", url=url, hint="Check the revision.") from None
        except (hub.errors.RepositoryNotFoundError, hub.errors.HFValidationError):
            hint = "Check the name; if it is private, run `hf auth login`, or set HF_TOKEN."
            raise MissingError("the Hub has no such model, or it is private", url=url, hint=hint) from None
        except hub.errors.LocalEntryNotFoundError:
            hint = "Check the network, HF_HUB_OFFLINE, and HF_ENDPOINT if it is set."
            raise UnreachableError(
                "the Hub cannot be reached, and its cache does not hold the whole model", url=url, hint=hint
            ) from None


def _telling(hub: Any, report: Report) -> Any:
    """A progress bar that is not drawn and calls ``report`` instead."""

    class Telling(hub.utils.tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any):
            self._counts = options.get("name") == "huggingface_hub.snapshot_download"
            super().__init__(*arguments, **options | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._counts:
                report("download", int(self.n), int(self.total or self.n))

    return Telling
