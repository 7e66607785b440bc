"""What the replicas of a channel want tensors to be cut into, by their heartbeats."""

from __future__ import annotations

from contextlib import suppress

from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import heartbeats
from weightcast.errors import StoreError
from weightcast.follow.heartbeat_sender import BEAT_EVERY, FRESH
from weightcast.format.cut import Cut, merged_cuts
from weightcast.store.backoff import CLOCK, Clock
from weightcast.store.probe import clock as store_clock


class ReplicaCuts:
    """Asks for heartbeats at most every half minute. No version needs an answer: without one, the last one holds."""

    def __init__(self, chain: Chain, clock: Clock = CLOCK):
        self._chain, self._clock = chain, clock
        self._ahead: float | None = None
        self._next = clock.now()

    def news(self) -> tuple[Cut, ...] | None:
        """What replicas that report now want, first what most of them want; None if it is not time to ask."""
        now = self._clock.now()
        if now < self._next:
            return None
        self._next = now + BEAT_EVERY
        with suppress(StoreError):
            if self._ahead is None:
                self._ahead = store_clock(self._chain.store) - now
            oldest = now + self._ahead - FRESH
            return merged_cuts(beat.cuts for beat, when in heartbeats(self._chain) if when >= oldest)
        return None
