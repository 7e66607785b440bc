"""The engines that follow a channel, known by their agents' heartbeats: a trainer has no other link to them."""

from __future__ import annotations

import time

from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import heartbeats
from weightcast.channel.records import Heartbeat
from weightcast.follow.heartbeat_sender import FRESH
from weightcast.store.probe import clock


class Followers:
    """Engines with a recent heartbeat, by the store's clock."""

    def __init__(self, chain: Chain):
        self._chain = chain
        self._ahead = clock(chain.store) - time.monotonic()

    def now(self) -> list[Heartbeat]:
        """The heartbeat of each engine that follows; not of mirrors, nor of engines that are held at a version."""
        oldest = time.monotonic() + self._ahead - FRESH
        return [beat for beat, when in heartbeats(self._chain) if when >= oldest and beat.pause is not None]
