"""Everything weightcast raises on purpose.

    WeightcastError
    ├── UsageError          the caller asked for something that cannot be
    ├── FormatError         bytes from outside break docs/SPEC.md
    │   └── VersionError    they are of a format this release does not read
    ├── CheckpointError     a file or folder of weights is not what it should be
    │   └── BusyError       another process holds its lock; trying again later may help
    ├── MismatchError       the weights do not stand where a patch expects them
    │   ├── BaseError       before applying: another base
    │   └── ResultError     after decoding: another result than stated
    ├── InterruptedApplyError    a target is half changed and its redo file must be replayed first
    ├── StoreError          a bucket did not do what was asked
    │   ├── MissingError    it has no such object
    │   ├── AccessError     it refuses these credentials, or this operation to them
    │   ├── UnreachableError    it did not answer, or not in time; trying again may help
    │   └── UnsupportedError    this kind of store cannot do that at all
    ├── ChannelError        a bucket holds no channel, another one, or one without a way to where we want to go
    │   ├── ConflictError   another writer committed first
    │   └── NoRouteError    no intact route leads to the version that is wanted
    ├── EngineError         an inference engine did not do what was asked
    │   ├── EngineGoneError     it does not answer: not started yet, or dead
    │   └── MisfitError     the channel is of another model than the engine's; trying again does not help
    └── SpaceError          the disk would not hold what has to be written

Each carries what it is about (`file`, `tensor`) and what to do next (`hint`), and shows all of it as its text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "AccessError",
    "BaseError",
    "BusyError",
    "ChannelError",
    "CheckpointError",
    "ConflictError",
    "EngineError",
    "EngineGoneError",
    "FormatError",
    "InterruptedApplyError",
    "MisfitError",
    "MismatchError",
    "MissingError",
    "NoRouteError",
    "ResultError",
    "SpaceError",
    "StoreError",
    "UnreachableError",
    "UnsupportedError",
    "UsageError",
    "VersionError",
    "WeightcastError",
    "about",
]


class WeightcastError(Exception):
    """Base of all errors; nothing was changed unless the text says otherwise."""

    def __init__(self, problem: str, *, file: str | None = None, tensor: str | None = None, hint: str | None = None):
        super().__init__(problem)
        self.problem = problem
        self.file = file
        self.tensor = tensor
        self.hint = hint

    def __str__(self) -> str:
        where = [f"file {self.file}"] * bool(self.file) + [f"tensor {self.tensor}"] * bool(self.tensor)
        text = self.problem + (f" ({', '.join(where)})" if where else "")
        return f"{text}. {self.hint}" if self.hint else text


@contextmanager
def about(*, file: str | None = None, tensor: str | None = None, hint: str | None = None) -> Iterator[None]:
    """Errors raised in here say which file and tensor they are about, and what to do, if they did not know."""
    try:
        yield
    except WeightcastError as error:
        error.file = error.file or file
        error.tensor = error.tensor or tensor
        error.hint = error.hint or hint
        raise


class UsageError(WeightcastError, ValueError):
    """The caller asked for something that cannot be."""


class FormatError(WeightcastError):
    """Bytes from outside break the format."""


class VersionError(FormatError):
    """A format, codec or dtype that this release does not know."""


class CheckpointError(WeightcastError):
    """A file or folder of weights is not what it should be."""


class BusyError(CheckpointError):
    """Another process holds the lock of a folder, and did not let go of it in time."""


class MismatchError(WeightcastError):
    """Weights and patch do not belong together; `expected` and `found` are digests."""

    def __init__(self, problem: str, *, expected: str, found: str, tensor: str | None = None, hint: str | None = None):
        super().__init__(problem, tensor=tensor, hint=hint)
        self.expected = expected
        self.found = found


class BaseError(MismatchError):
    """The weights do not stand at the patch's base."""


class ResultError(MismatchError):
    """The decoded patch does not lead to the result it states."""


class InterruptedApplyError(WeightcastError):
    """A kill left a redo file behind: the target is half changed until it is replayed."""


class StoreError(WeightcastError):
    """A bucket did not do what was asked; `url` is the bucket's, `key` the object's."""

    def __init__(self, problem: str, *, url: str, key: str | None = None, hint: str | None = None):
        super().__init__(problem, file=f"{url.rstrip('/')}/{key}" if key else url, hint=hint)
        self.url = url
        self.key = key


class MissingError(StoreError):
    """The bucket has no such object."""


class AccessError(StoreError):
    """The bucket refuses these credentials, or refuses them this operation."""


class UnreachableError(StoreError):
    """No answer, an answer too late, or one that says to try again: the only kind that is worth a retry."""


class UnsupportedError(StoreError):
    """This kind of store cannot do that: writing over http, for one."""


class ChannelError(WeightcastError):
    """The bucket holds no channel, another one than expected, or none that leads where we want to go."""


class ConflictError(ChannelError):
    """Another writer committed this version first; nothing of ours is visible."""


class NoRouteError(ChannelError):
    """No intact route leads to the version that is wanted; ``reason`` is what was wrong with the ways tried, if any."""

    def __init__(self, problem: str, *, file: str, hint: str, reason: WeightcastError | None = None):
        super().__init__(problem, file=file, hint=hint)
        self.reason = reason


class EngineError(WeightcastError):
    """An inference engine did not do what was asked; `url` says which."""

    def __init__(self, problem: str, *, url: str, tensor: str | None = None, hint: str | None = None):
        super().__init__(problem, file=url, tensor=tensor, hint=hint)
        self.url = url


class EngineGoneError(EngineError):
    """The engine does not answer: it has not started yet, or it is dead."""


class MisfitError(EngineError):
    """The channel is of another model than the engine's, or of one it cannot update: trying again does not help."""


class SpaceError(WeightcastError, OSError):
    """The disk has not the room that would be needed; nothing was written."""
