"""Finding the version to go to: the newest commit, and the version that the replica holds, if it is one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from weightcast.channel.chain import Chain
from weightcast.channel.nearest import Nearest
from weightcast.channel.policy import Policy
from weightcast.channel.records import Manifest
from weightcast.errors import ChannelError, FormatError, MissingError, TrustError
from weightcast.follow.replica import Replica, position_of
from weightcast.format.diff import refuse_other_table

_LIST_EVERY = 32
"""Idle polls until the head is found by listing: the next versions may be collected, or the channel reset."""


class Finder:
    """A channel and a replica of it; both are replaced if the channel is reset."""

    def __init__(self, chain: Chain, open_replica: Callable[[Chain], Replica]):
        self.chain = chain
        self.replica = open_replica(chain)
        self._open_replica = open_replica
        self._idle = _LIST_EVERY

    def goal(self, policy: Policy) -> Manifest | None:
        """The commit that ``policy`` goes to; None to stay."""
        head = self._head()
        at = self.replica.version
        newest = head.position.version if head else at
        version = policy.goal(at, newest) if newest is not None else None
        if version is None or version == at:
            return None
        if head is not None and version == newest:
            return head
        try:
            return self.chain.manifest(version)
        except MissingError:
            # Collected: a follower of every version goes on with the next that is left; one of a pinned version fails.
            left = next(self.chain.versions(version), None)
            if left is None or at is None or version < at or policy.goal(left - 1, left) != left:
                raise
            return self.chain.manifest(left)

    def applied(self) -> None:
        """An update was applied: the next poll asks only for the version after it."""
        self._idle = 0

    def list_next(self) -> None:
        """Find the head by listing at the next poll."""
        self._idle = _LIST_EVERY

    def _head(self) -> Manifest | None:
        """The head; None if nothing is new, which takes one small request."""
        try:
            at = self.replica.version
            return self.list_head() if at is None or self._idle >= _LIST_EVERY else self._newer_than(at)
        except TrustError:
            self.list_next()  # what follows ours may be of a key that was revoked, and the head of another
            raise
        except ChannelError:
            if not self._follow_reset():
                raise
            return self.list_head()

    def _newer_than(self, at: int) -> Manifest | None:
        following = self.chain.after(at)
        if following is None:
            self._idle += 1
            return None
        self._idle = 0
        beyond = self.chain.after(at + 1)
        return following if beyond is None else self.chain.head(known=at + 2)

    def list_head(self) -> Manifest | None:
        """The head, by listing; also determine which version the replica holds."""
        self._idle = 0
        if self.chain.guard is not None:
            self.chain.guard.refresh()
        if self.replica.fingerprint is None:
            self.replica.examine()
        else:
            self.replica.examine_if_changed()
        if isinstance(self.chain.store, Nearest):
            seen = self.chain.guard.seen.version if self.chain.guard is not None else -1
            self.chain.store.expect(max(seen, -1 if self.replica.version is None else self.replica.version))
        head = self.chain.head()
        if head is None or self._is_of_another_history(head):
            self._follow_reset()
            head = self.chain.head()
            if head is not None and self._is_of_another_history(head):
                self.replica.locate(None)
        if head is not None and self.replica.version is None and self.replica.fingerprint is not None:
            self.replica.locate(self.chain.find(self.replica.fingerprint.digest, head))
        return head

    def _is_of_another_history(self, head: Manifest) -> bool:
        """Whether the channel lacks our version, or has another under its number: it was put back, or reset."""
        at = position_of(self.replica)
        if at is None or at.version < head.position.version:
            return False  # the next edges show whether they begin at our bits
        try:
            return at != head.position and self.chain.manifest(at.version).position != at
        except MissingError as error:
            if error.key is None:
                raise
            return True

    def _follow_reset(self) -> bool:
        """Switch to the channel that replaced ours, if one did; the weights may well be a version of it."""
        chain = self.chain.opened_again()
        if chain.channel.id == self.chain.channel.id:
            return False
        refuse_other_table(self.chain.channel.table, chain.channel.table)
        try:
            self.replica.close()
        finally:  # it is closed also if it says that a fold in the background failed
            self.replica = self._open_replica(chain)
            self.chain = chain
        return True

    def is_elsewhere(self) -> bool:
        """Whether the replica does not hold the version that it seemed to; if so, it has none until it is located."""
        at = position_of(self.replica)
        with suppress(MissingError, FormatError):
            if at is not None and self.chain.manifest(at.version).position != at:
                self.replica.locate(None)
                return True
        return not self.replica.examine()
