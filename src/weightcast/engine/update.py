"""What brought an engine to a version, and how long each phase of it took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weightcast.channel.keys import Position

PAUSED = ("pause", "apply", "prove", "resume")
"""The phases in which the engine is paused."""


@dataclass(frozen=True)
class EngineUpdate:
    """An engine has reached a version; ``seconds`` are by phase."""

    position: Position
    changed: int
    """Elements written, on all workers."""
    nbytes: int
    """Memory that was staged for it."""
    reloaded: int
    """Tensors that went through the engine's own loader."""
    unproven: tuple[str, ...]
    """Tensors whose live bits cannot be read back."""
    seconds: Mapping[str, float]

    @property
    def pause(self) -> float:
        """Seconds that the engine was paused."""
        return sum(self.seconds.get(phase, 0.0) for phase in PAUSED)

    def as_json(self) -> dict[str, Any]:
        return {
            "version": self.position.version,
            "digest": self.position.digest,
            "changed": self.changed,
            "reloaded": self.reloaded,
            "unproven": list(self.unproven),
            "pause": round(self.pause, 4),
            "seconds": {phase: round(value, 4) for phase, value in self.seconds.items()},
        }
