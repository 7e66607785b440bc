"""Every error that weightcast raises on purpose.

    WeightcastError
    ├── UsageError          the caller asked for something impossible
    ├── FormatError         bytes from outside break docs/SPEC.md
    │   └── VersionError    they are in a format that this release does not read
    ├── CheckpointError     a file or folder of weights is damaged, missing or in use
    │   └── BusyError       another process holds its lock; a later attempt may succeed
    ├── MismatchError       weights and patch do not belong together
    │   ├── BaseError       before applying: the weights are not the patch's base
    │   └── ResultError     after decoding: the patch does not lead to its stated result
    ├── InterruptedApplyError    a target is half changed: its redo file must be replayed first
    ├── StoreError          a call to a bucket failed
    │   ├── MissingError    it has no such object
    │   ├── AccessError     it refuses these credentials, or this operation with them
    │   ├── UnreachableError    it did not answer in time; another attempt may succeed
    │   └── UnsupportedError    this kind of store cannot do that
    ├── ChannelError        no channel, another channel, or no route to the version
    │   ├── ConflictError   another writer committed first
    │   └── NoRouteError    no intact route leads to the wanted version
    ├── TrustError          what the trusted key does not vouch for, or less than was seen before
    ├── EngineError         a call to an inference engine failed
    │   ├── EngineGoneError     it does not answer: not started yet, or dead
    │   ├── EngineBusyError     another agent owns it
    │   └── MisfitError     the channel is of another model than the engine's; a retry does not help
    ├── PeerError           another rank of a sharded training failed, or did not come
    └── SpaceError          the disk is full

Each has the `file` and `tensor` it is about and a `hint` with the remedy; its text includes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

__all__ = [
    "AccessError",
    "BaseError",
    "BusyError",
    "ChannelError",
    "CheckpointError",
    "ConflictError",
    "EngineBusyError",
    "EngineError",
    "EngineGoneError",
    "FormatError",
    "InterruptedApplyError",
    "MisfitError",
    "MismatchError",
    "MissingError",
    "NoRouteError",
    "PeerError",
    "ResultError",
    "SpaceError",
    "StoreError",
    "TrustError",
    "UnreachableError",
    "UnsupportedError",
    "UsageError",
    "VersionError",
    "WeightcastError",
    "about",
]


class WeightcastError(Exception):
    """Base of all errors. Nothing was changed, unless the text says otherwise."""

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
    """Add a file, a tensor and a hint to errors raised in here that have none."""
    try:
        yield
    except WeightcastError as error:
        error.file = error.file or file
        error.tensor = error.tensor or tensor
        error.hint = error.hint or hint
        raise


class UsageError(WeightcastError, ValueError):
    """The caller asked for something impossible."""


class FormatError(WeightcastError):
    """Bytes from outside break the format."""


class VersionError(FormatError):
    """A format, codec or dtype that this release does not know."""


class CheckpointError(WeightcastError):
    """A file or folder of weights is damaged, missing or in use."""


class BusyError(CheckpointError):
    """Another process holds the lock of a folder and did not release it in time."""


class MismatchError(WeightcastError):
    """Weights and patch do not belong together; `expected` and `found` are digests."""

    def __init__(self, problem: str, *, expected: str, found: str, tensor: str | None = None, hint: str | None = None):
        super().__init__(problem, tensor=tensor, hint=hint)
        self.expected = expected
        self.found = found


class BaseError(MismatchError):
    """The weights are not the patch's base."""


class ResultError(MismatchError):
    """The decoded patch does not lead to its stated result."""


class InterruptedApplyError(WeightcastError):
    """An apply was killed: the target is half changed until its redo file is replayed."""


class StoreError(WeightcastError):
    """A call to a bucket failed; `url` is the bucket's, `key` the object's."""

    def __init__(self, problem: str, *, url: str, key: str | None = None, hint: str | None = None):
        super().__init__(problem, file=f"{url.rstrip('/')}/{key}" if key else url, hint=hint)
        self.url = url
        self.key = key


class MissingError(StoreError):
    """The bucket has no such object."""


class AccessError(StoreError):
    """The bucket refuses these credentials, or this operation with them."""


class UnreachableError(StoreError):
    """No answer, a late answer, or one that asks for a retry: the only error that is retried."""


class UnsupportedError(StoreError):
    """This kind of store cannot do that; for example, write over HTTP."""


class ChannelError(WeightcastError):
    """The bucket holds no channel, another channel than expected, or one without a route to the version."""


class ConflictError(ChannelError):
    """Another writer committed this version first; nothing of ours is visible."""


class NoRouteError(ChannelError):
    """No intact route leads to the wanted version; ``reason`` is the error of the last route that was tried."""

    def __init__(self, problem: str, *, file: str, hint: str, reason: WeightcastError | None = None):
        super().__init__(problem, file=file, hint=hint)
        self.reason = reason


Distrust = Literal["unsigned", "forged", "unknown key", "not allowed", "not covered", "rollback", "fork", "stale"]


class TrustError(WeightcastError):
    """A reader with a trusted key refuses something; what it holds stays as it is.

    ``reason`` is one of: "unsigned"; "forged" (the signature is not of these bytes); "unknown key" (in no key list of
    the trusted key); "not allowed" (the key has another role, or its versions are others); "not covered" (signatures
    do not reach it); "rollback" (older than what was seen); "fork" (another history than what was seen); "stale" (older
    than the reader allows). ``signer`` is the id of the key that is named in the object, if it names one.
    """

    def __init__(
        self, problem: str, *, reason: Distrust, file: str | None = None, signer: str | None = None, hint: str
    ):
        super().__init__(problem, file=file, hint=hint)
        self.reason: Distrust = reason
        self.signer = signer


class EngineError(WeightcastError):
    """A call to the inference engine at `url` failed."""

    def __init__(self, problem: str, *, url: str, tensor: str | None = None, hint: str | None = None):
        super().__init__(problem, file=url, tensor=tensor, hint=hint)
        self.url = url


class EngineGoneError(EngineError):
    """The engine does not answer: it has not started yet, or it is dead."""


class EngineBusyError(EngineError):
    """Another agent, named by ``holder``, owns the engine."""

    def __init__(self, problem: str, *, url: str, holder: str, hint: str | None = None):
        super().__init__(problem, url=url, hint=hint)
        self.holder = holder


class MisfitError(EngineError):
    """The channel is of another model than the engine's, or of one it cannot update: a retry does not help."""


class PeerError(WeightcastError):
    """Another rank of a sharded training failed, or did not come to a round of messages.

    >>> error = PeerError("rank 3 failed: no room for changes", rank=3)
    >>> error.rank
    3
    """

    def __init__(self, problem: str, *, rank: int, hint: str | None = None):
        super().__init__(problem, hint=hint)
        self.rank = rank


class SpaceError(WeightcastError, OSError):
    """The disk has too little room."""
