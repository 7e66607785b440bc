"""Which version a subscriber goes to next; pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from weightcast.errors import UsageError


class Policy(Protocol):
    """Decides which version to go to."""

    def goal(self, at: int | None, head: int) -> int | None:
        """The version to go to from ``at`` (None: nothing is held); None to stay."""
        ...


@dataclass(frozen=True)
class Newest:
    """The newest version; those in between are skipped."""

    def goal(self, at: int | None, head: int) -> int | None:
        return head if at is None or head > at else None


NEWEST = Newest()


@dataclass(frozen=True)
class Every:
    """One version after the other; the newest first if nothing is held."""

    def goal(self, at: int | None, head: int) -> int | None:
        if at is None:
            return head
        return at + 1 if head > at else None


@dataclass(frozen=True)
class Pinned:
    """That version and no other, whether it is newer or older."""

    version: int

    def goal(self, at: int | None, head: int) -> int | None:
        if self.version > head:
            hint = "`weightcast log URL` lists the versions there are."
            raise UsageError(f"there is no version {self.version} yet: the newest is {head}", hint=hint)
        return self.version if at != self.version else None


@dataclass(frozen=True)
class AtLeast:
    """Stay while ``version`` or a newer one is held; else go to the newest once it is at least ``version``."""

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
