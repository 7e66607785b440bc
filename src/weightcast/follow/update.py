"""What one update of a follower did, and how long each phase of it took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightcast.channel.keys import Position
from weightcast.errors import WeightcastError


@dataclass(frozen=True)
class Update:
    """A version that was applied."""

    position: Position
    before: Position | None
    """The position before; None if the weights were not a version of the channel."""
    nbytes: int
    """Bytes fetched for it."""
    seconds: Mapping[str, float]
    """By phase: ``find`` (the version and its route), ``fetch`` (as far as decoding waits for it), ``decode``,
    ``verify``, ``stage`` (writing and syncing what was decoded), ``apply``. Each moment is in one of them."""
    short: WeightcastError | None = None
    """Why this is not the version that the policy wants, if no intact route leads there."""

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())
