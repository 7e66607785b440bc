"""How good a policy is: the share of games it wins, with its interval."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from examples.wordle.rollouts import Rollouts


@dataclass(frozen=True)
class Evaluation:
    """Games of one version. ``low`` and ``high`` bound the win rate with 95 % confidence."""

    version: int
    games: int
    wins: int
    low: float
    high: float
    reward: float

    @property
    def rate(self) -> float:
        return self.wins / self.games

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def is_beaten_by(self, other: Evaluation) -> bool:
        """Whether the other's interval lies above this one."""
        return other.low > self.high


def interval(wins: int, games: int) -> tuple[float, float]:
    """Wilson's interval of 95 %.

    >>> [round(bound, 3) for bound in interval(50, 100)]
    [0.404, 0.596]
    """
    z, rate = 1.96, wins / games
    middle = (rate + z * z / (2 * games)) / (1 + z * z / games)
    half = z / (1 + z * z / games) * math.sqrt(rate * (1 - rate) / games + z * z / (4 * games * games))
    return middle - half, middle + half


def evaluate(version: int, rollouts: list[Rollouts]) -> Evaluation:
    won = np.concatenate([one.won for one in rollouts])
    rewards = np.concatenate([one.rewards for one in rollouts])
    wins, games = int(won.sum()), len(won)
    return Evaluation(version, games, wins, *interval(wins, games), float(rewards.mean()))
