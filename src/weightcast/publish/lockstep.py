"""The updates of one rank of a sharded training: a pipeline whose turns are taken by all ranks together.

Every rank publishes the same number of times, but resolves its scans in its own time. A version carries what all ranks
have resolved, so updates are merged only when that is agreed on, and not as they come.
"""

from __future__ import annotations

from collections import deque

from weightcast.channel.records import Manifest
from weightcast.publish.pipeline import Pipeline, Resolved, Stage, Uploaded


class Lockstep(Pipeline):
    """A `Pipeline` that keeps resolved updates apart until `take` says which ones are sent together."""

    def __init__(self, head: Manifest):
        super().__init__(head)
        self._queue: deque[Resolved] = deque()
        self.ready = 0
        """How many scans were resolved since the publisher opened."""

    def begin_merge(self) -> Resolved | None:
        return None

    def resolved(self, update: Resolved) -> None:
        super().resolved(update)
        self._waiting = None
        if self.ended is None:
            self._queue.append(update)
            self.ready += 1

    @property
    def steps(self) -> list[int | None]:
        """The steps of the updates that wait, in their order."""
        return [update.step for update in self._queue]

    @property
    def can_send(self) -> bool:
        return self._has_waiting if self._failed is None else self._lacking is not None

    @property
    def _has_waiting(self) -> bool:
        return bool(self._queue)

    @property
    def tried(self) -> Uploaded | None:
        """The commit that is to be tried again."""
        return self._failed if isinstance(self._failed, Uploaded) else None

    def begin_round(self) -> bool:
        """Whether there is something to send; while closing, not after the store has failed."""
        if self.ended is not None:
            return False
        if self.is_closing and (self._failure is not None or not self._has_waiting):
            self.begin_send()  # gives up what is left
            return False
        return True

    def take(self, upto: int) -> tuple[Stage, ...]:
        """What is sent now: what failed before, and the first ``upto`` updates as far as they were not sent yet.

        A commit that was tried goes alone.
        """
        parts: list[Stage] = [] if self._failed is None else [self._failed]
        if self.tried is None:
            while self._queue and self.ready - len(self._queue) < upto:
                parts.append(self._queue.popleft())
        self._failed = self._lacking = None
        self.is_hurried = False
        self._sending = tuple(parts)
        return self._sending

    def end(self, error: BaseException) -> None:
        for update in self._queue:
            for receipt in update.receipts:
                receipt.fail(error)
        self._queue.clear()
        super().end(error)
