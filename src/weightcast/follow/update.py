"""What one update of a follower did, and how long each phase of it took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from weightcast.channel.keys import Position
from weightcast.errors import WeightcastError
from weightcast.store.backoff import CLOCK, Clock


@dataclass(frozen=True)
class Update:
    """A version that was applied."""

    position: Position
    before: Position | None
    """The position before; None if the weights were not a version of the channel."""
    nbytes: int
    """Bytes fetched for it."""
    seconds: Mapping[str, float]
    """By phase: ``find`` (the version and its route), ``fetch`` (with decode and verify), ``apply``."""
    short: WeightcastError | None = None
    """Why this is not the version that the policy wants, if no intact route leads there."""

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


@dataclass
class Phases:
    """Adds up seconds by phase."""

    clock: Clock = CLOCK
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = self.clock.now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.clock.now() - began
