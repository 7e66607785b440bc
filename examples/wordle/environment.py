"""Box 1, the environment: Wordle behind OpenEnv's interfaces, many games to a session.

    python -m examples.wordle.environment --port 8000

Open it in a browser to play. `examples.wordle.client` plays from Python, and so does any other client of OpenEnv.
"""

from __future__ import annotations

import argparse
import os
import random
import uuid
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, ConcurrencyConfig, EnvironmentMetadata, Observation, State
from pydantic import BaseModel, Field

from examples.wordle.events import report
from examples.wordle.game import Game, is_guess, words

MOST_GAMES = 1024
"""Of a session."""

SESSIONS = 256
"""At once."""
IDLE_SECONDS = 600.0
"""After which a session's place is given to another."""


class WordleAction(Action):
    """The next guess of every game that is not over, in the order of the boards."""

    guesses: list[Annotated[str, Field(max_length=32)]] = Field(max_length=MOST_GAMES)


class Board(BaseModel):
    """What a player sees of one game."""

    guesses: list[str]
    marks: list[str]
    """For each guess: ``!`` at its place, ``?`` at another place, ``.`` not in the word."""
    won: bool
    done: bool
    reward: float | None = None
    """Once it is over."""
    target: str | None = None
    """Once it is over."""
    refused: str | None = None
    """Why the last guess was not taken."""


class WordleObservation(Observation):
    """All games of the session. ``reward`` is their mean, once all are over."""

    boards: list[Board] = Field(default_factory=list)


class WordleEnvironment(Environment[WordleAction, WordleObservation, State]):
    """Games that are played side by side, one turn of each to a step."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._games: list[Game] = []
        self._refused: dict[int, str] = {}
        self._strict = True
        self._state = State()

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        games: int = 1,
        repeats: int = 1,
        strict: bool = True,
        **_: Any,
    ) -> WordleObservation:
        """Begin ``games`` games of different words, each ``repeats`` times in a row; the same ones for the same seed.

        A guess that is not in the list is refused and costs no turn. Unless ``strict``: then every five letters are a
        guess, and anything else ends the game, so that a policy that is still learning to spell is marked too.
        """
        if not (1 <= games <= len(words()) and repeats >= 1 and games * repeats <= MOST_GAMES):
            raise ValueError(f"1 to {len(words())} games are possible, and {MOST_GAMES} with their repeats")
        targets = random.Random(seed).sample(words(), games)
        self._games = [Game(target) for target in targets for _ in range(repeats)]
        self._refused = {}
        self._strict = strict
        self._state = State(episode_id=episode_id or uuid.uuid4().hex)
        return self.observe()

    def step(self, action: WordleAction, timeout_s: float | None = None, **_: Any) -> WordleObservation:
        """Take a turn of every game that is not over."""
        if not self._games:
            raise ValueError("no game has begun: reset first")
        playing = [place for place, game in enumerate(self._games) if not game.over]
        if len(action.guesses) != len(playing):
            raise ValueError(f"{len(playing)} games are not over, but there are {len(action.guesses)} guesses")
        self._refused = {}
        for place, guess in zip(playing, action.guesses, strict=True):
            self._take(place, guess)
        self._state.step_count += 1
        return self.observe()

    def _take(self, place: int, guess: str) -> None:
        game = self._games[place]
        if not self._strict:
            if is_guess(guess):
                game.guess(guess)
            else:
                game.forfeited = True
        elif not is_guess(guess):
            self._refused[place] = "a guess has five letters, a to z"
        elif guess not in words():
            self._refused[place] = f"{guess} is not in the word list"
        else:
            game.guess(guess)

    def observe(self) -> WordleObservation:
        """What a player sees now."""
        boards = [
            Board(
                guesses=game.guesses,
                marks=game.marks,
                won=game.won,
                done=game.over,
                reward=game.reward if game.over else None,
                target=game.target if game.over else None,
                refused=self._refused.get(place),
            )
            for place, game in enumerate(self._games)
        ]
        done = all(board.done for board in boards)
        reward = sum(game.reward for game in self._games) / len(boards) if done and boards else None
        return WordleObservation(boards=boards, done=done, reward=reward)

    @property
    def state(self) -> State:
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(
            name="wordle", description=f"Wordle with {len(words())} words, many games to a session.", version="1.0.0"
        )


def make_app() -> FastAPI:
    """OpenEnv's server: sessions over WebSocket at /ws, and a page to play on at /web."""
    os.environ.setdefault("ENABLE_WEB_INTERFACE", "true")
    page: Any = None
    if os.environ["ENABLE_WEB_INTERFACE"] == "true":
        from examples.wordle.page import build_page as page
    return create_app(
        WordleEnvironment,
        WordleAction,
        WordleObservation,
        env_name="wordle",
        concurrency_config=ConcurrencyConfig(max_concurrent_envs=SESSIONS, session_timeout=IDLE_SECONDS),
        gradio_builder=page,
        show_default_tab=False,
        title_override="Wordle",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    report("begin", words=len(words()), address=f"http://{given.host}:{given.port}")
    uvicorn.run(make_app(), host=given.host, port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
