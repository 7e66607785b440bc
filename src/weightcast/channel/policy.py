"""Which version a subscriber goes to next: pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from weightcast.errors import UsageError


class Policy(Protocol):
    """Decides where to go."""

    def goal(self, at: int | None, head: int) -> int | None:
        """The version to go to from ``at`` (None: nothing is held); None to stay."""
        ...


@dataclass(frozen=True)
class Newest:
    """The head; what lies between is skipped."""

    def goal(self, at: int | None, head: int) -> int | None:
        return head if at is None or head > at else None


@dataclass(frozen=True)
class Every:
    """One version after the other, beginning at the head if nothing is held."""

    def goal(self, at: int | None, head: int) -> int | None:
        if at is None:
            return head
        return at + 1 if head > at else None


@dataclass(frozen=True)
class Pinned:
    """That version, forwards or backwards, and no other."""

    version: int

    def goal(self, at: int | None, head: int) -> int | None:
        if self.version > head:
            hint = "`weightcast log URL` lists the versions there are."
            raise UsageError(f"there is no version {self.version} yet: the newest is {head}", hint=hint)
        return self.version if at != self.version else None


@dataclass(frozen=True)
class AtLeast:
    """Stay as long as ``version`` or a newer one is held; else go to the head once it is that far."""

    version: int

    def goal(self, at: int | None, head: int) -> int | None:
        if (at is not None and at >= self.version) or head < self.version:
            return None
        return head


def accepts(policy: Policy, at: int | None, version: int) -> bool:
    """Whether ``policy`` would go from ``at`` to ``version`` if that were the newest."""
    try:
        return policy.goal(at, version) == version
    except UsageError:
        return False
