"""A client of the environment, as OpenEnv makes them."""

from __future__ import annotations

from typing import Any

from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server.types import State

from examples.wordle.environment import WordleAction, WordleObservation


class WordleEnv(EnvClient[WordleAction, WordleObservation, State]):
    """A session with the environment.

    >>> with WordleEnv(base_url="http://localhost:8000").sync() as session:  # doctest: +SKIP
    ...     result = session.reset(seed=1, games=2)
    ...     result = session.step(WordleAction(guesses=["crane", "slate"]))
    ...     result.observation.boards[0].marks
    ['..?.!']
    """

    def _step_payload(self, action: WordleAction) -> dict[str, Any]:
        return {"guesses": action.guesses}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[WordleObservation]:
        done, reward = payload.get("done", False), payload.get("reward")
        observation = WordleObservation(**payload["observation"], done=done, reward=reward)
        return StepResult(observation=observation, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)
