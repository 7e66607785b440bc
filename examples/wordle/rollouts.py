"""Playing games: the environment marks, an engine guesses, and every guess carries the version that made it."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from examples.wordle.client import WordleEnv
from examples.wordle.environment import WordleAction
from examples.wordle.game import LENGTH, TURNS
from examples.wordle.policy import BEGIN, CONTEXT, TOKENS, TURN, mark_ids, text_of

ANSWER_SECONDS = 60.0
FINAL = (400, 401, 403, 404, 405, 422)
"""Statuses of requests that will never be answered."""


@dataclass(frozen=True)
class Games:
    """Which games to play: different words, each several times."""

    seed: int
    words: int
    repeats: int


@dataclass(frozen=True)
class Rollouts:
    """Games that were played to their end. Rows are games; the games of one word stand together."""

    games: Games
    tokens: np.ndarray
    """[game, token]: begin, then guess and marks of each turn; zeros after the end."""
    logprobs: np.ndarray
    """[game, letter]: by the policy that wrote the letter."""
    turns: np.ndarray
    rewards: np.ndarray
    won: np.ndarray
    versions: tuple[int, ...]
    """That wrote the guesses, in order; the weights may change while games are played."""
    seconds: float

    @property
    def oldest(self) -> int:
        return min(self.versions)


@dataclass(frozen=True)
class Sample:
    """What an engine writes after all prompts of a turn."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    versions: tuple[int, ...]
    """Of the weights: one, or the first and the last if they changed on the way."""


class RefusedError(Exception):
    """The engine will not answer such requests, however often it is asked: a wrong key, model or address."""


class MalformedError(OSError):
    """What answers is no engine, or one that is about to end."""


class EngineClient:
    """Asks a replica for completions, or a vLLM that has the plug-in and its middleware.

    If the environment has a ``WORDLE_API_KEY``, requests carry it.
    """

    def __init__(self, url: str, on_version: Callable[[int], None] = lambda version: None):
        """``on_version`` is called with the newest version of each answer."""
        self._url, self._on_version = url.rstrip("/"), on_version

    def complete(self, prompts: Sequence[Sequence[int]], count: int = LENGTH) -> Sample:
        """`OSError` if the engine does not answer, or has no weights yet; `RefusedError` if it never will."""
        body = {
            "model": "wordle",
            "prompt": prompts,
            "max_tokens": count,
            "temperature": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("WORDLE_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self._url + "/v1/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
                header, answer = response.headers["x-weight-version"], response.read()
        except urllib.error.HTTPError as error:
            with error:
                if error.code in FINAL:
                    raise RefusedError(f"{self._url} answers {error.code}: {error.read(200)!r}") from error
            raise
        sample = _sample(header, answer, len(prompts), count)
        self._on_version(sample.versions[-1])
        return sample

    def version(self) -> int:
        """Which version it serves now."""
        return self.complete([[BEGIN]], count=1).versions[-1]


def _sample(header: str | None, answer: bytes, prompts: int, count: int) -> Sample:
    """What an engine answered, if it is what was asked for."""
    try:
        versions = tuple(map(int, (header or "").split("-")))
        choices = sorted(json.loads(answer)["choices"], key=lambda choice: choice["index"])
        tokens = [list(map(int, choice["token_ids"])) for choice in choices]
        logprobs = [list(map(float, choice["logprobs"]["token_logprobs"])) for choice in choices]
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedError(f"the engine's answer is malformed: {error!r}") from error
    if len(choices) != prompts or {*map(len, tokens), *map(len, logprobs)} != {count}:
        raise MalformedError("the engine's answer has another shape than was asked for")
    if not (np.isin(tokens, range(len(TOKENS))).all() and np.isfinite(logprobs).all()):  # NaN would reach the weights
        raise MalformedError("the engine's answer has tokens or probabilities that there are none of")
    return Sample(tokens, logprobs, versions)


def play(environment: str, engine: EngineClient, games: Games) -> Rollouts:
    """Play all games, side by side. Raises what either box raises when it is lost on the way."""
    began = time.monotonic()
    count = games.words * games.repeats
    tokens = np.full((count, CONTEXT), BEGIN, np.int64)
    logprobs = np.zeros((count, TURNS * LENGTH), np.float32)
    turns = np.zeros(count, np.int64)
    versions: list[int] = []
    with WordleEnv(base_url=environment).sync() as session:
        observation = session.reset(seed=games.seed, games=games.words, repeats=games.repeats, strict=False).observation
        for turn in range(TURNS):
            playing = [place for place, board in enumerate(observation.boards) if not board.done]
            if not playing:
                break
            end = 1 + TURN * turn
            sample = engine.complete(tokens[playing, :end].tolist())
            versions.extend(sample.versions)
            tokens[playing, end : end + LENGTH] = sample.tokens
            logprobs[playing, turn * LENGTH : (turn + 1) * LENGTH] = sample.logprobs
            turns[playing] = turn + 1
            guesses = [text_of(ids) for ids in sample.tokens]
            observation = session.step(WordleAction(guesses=guesses)).observation
            for place in playing:
                board = observation.boards[place]
                if len(board.guesses) > turn:
                    ids = mark_ids(board.guesses[turn], board.marks[turn])
                    tokens[place, end + LENGTH : end + TURN] = ids
    boards = observation.boards
    return Rollouts(
        games,
        tokens,
        logprobs,
        turns,
        np.array([board.reward for board in boards], np.float32),
        np.array([board.won for board in boards]),
        tuple(versions),
        time.monotonic() - began,
    )
