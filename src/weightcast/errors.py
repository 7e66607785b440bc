"""Everything weightcast raises on purpose.

    WeightcastError
    ├── UsageError          the caller asked for something that cannot be
    ├── FormatError         bytes from outside break docs/SPEC.md
    │   └── VersionError    they are of a format this release does not read
    ├── CheckpointError     a file or folder of weights is not what it should be
    ├── MismatchError       the weights do not stand where a patch expects them
    │   ├── BaseError       before applying: another base
    │   └── ResultError     after decoding: another result than stated
    └── InterruptedApplyError    a target is half changed and its redo file must be replayed first

Each carries what it is about (`file`, `tensor`) and what to do next (`hint`), and shows all of it as its text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "BaseError",
    "CheckpointError",
    "FormatError",
    "InterruptedApplyError",
    "MismatchError",
    "ResultError",
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
def about(*, file: str | None = None, tensor: str | None = None) -> Iterator[None]:
    """Errors raised in here say which file and tensor they are about, if they did not know."""
    try:
        yield
    except WeightcastError as error:
        error.file = error.file or file
        error.tensor = error.tensor or tensor
        raise


class UsageError(WeightcastError, ValueError):
    """The caller asked for something that cannot be."""


class FormatError(WeightcastError):
    """Bytes from outside break the format."""


class VersionError(FormatError):
    """A format, codec or dtype that this release does not know."""


class CheckpointError(WeightcastError):
    """A file or folder of weights is not what it should be."""


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
