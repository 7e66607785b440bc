"""Threads that play: one for each replica, without end, whatever box is lost meanwhile."""

from __future__ import annotations

import http.client
import queue
import threading
import time
from collections.abc import Callable, Sequence

from websockets.exceptions import WebSocketException

from examples.wordle.evaluation import Evaluation, evaluate
from examples.wordle.events import report
from examples.wordle.game import words
from examples.wordle.rollouts import EngineClient, Games, Rollouts, play

LOST = (OSError, http.client.HTTPException, WebSocketException, RuntimeError)
"""What is raised when a box goes away in the middle: sockets, HTTP, WebSocket, OpenEnv's own."""
AGAIN_AFTER = 0.5
"""Seconds until a box that did not answer is asked again."""


class FirstRollouts:
    """Reports when the first answer of each version arrives."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest = -1

    def seen(self, version: int, url: str) -> None:
        with self._lock:
            if version <= self._newest:
                return
            self._newest = version
        report("first", version=version, replica=url)


class Player(threading.Thread):
    """Plays with one replica, and hands over what was played; waits while nobody takes it."""

    def __init__(
        self,
        environment: str,
        url: str,
        next_games: Callable[[], Games],
        ready: queue.Queue[Rollouts],
        first: FirstRollouts,
    ):
        super().__init__(daemon=True)
        self._environment, self._url, self._next_games, self._ready = environment, url, next_games, ready
        self._client = EngineClient(url, on_version=lambda version: first.seen(version, url))
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Play no more games than those that are under way."""
        self._stopped.set()

    def run(self) -> None:
        told = None
        while not self._stopped.is_set():
            try:
                rollouts = play(self._environment, self._client, self._next_games())
            except LOST as error:
                if type(error) is not told:
                    told = type(error)
                    report("trouble", replica=self._url, text=f"no games with {self._url} now: {error}")
                self._stopped.wait(AGAIN_AFTER)
                continue
            told = None
            report(
                "rollouts",
                replica=self._url,
                games=len(rollouts.won),
                wins=int(rollouts.won.sum()),
                reward=float(rollouts.rewards.mean()),
                oldest=rollouts.oldest,
                newest=max(rollouts.versions),
                seconds=rollouts.seconds,
            )
            self._ready.put(rollouts)


def wait_for(urls: Sequence[str], version: int, patience: float) -> list[str]:
    """The replicas that serve a version: all of them, or those that do when patience ends, at least one."""
    end = time.monotonic() + patience
    while True:
        there = [url for url in urls if version_of(url) == version]
        if len(there) == len(urls) or (there and time.monotonic() > end):
            return there
        time.sleep(0.1)


def version_of(url: str) -> int | None:
    """Which version an engine serves; None if it does not answer."""
    try:
        return EngineClient(url).version()
    except LOST:
        return None


def measure(environment: str, urls: Sequence[str], version: int, repeats: int, greedy: bool = False) -> Evaluation:
    """Play every word so many times with one version of the weights, on all these replicas."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for seed in range(repeats):
        waiting.put(seed)
    played: list[Rollouts] = []

    def play_some(url: str) -> None:
        while len(played) < repeats:
            try:
                seed = waiting.get(timeout=0.1)
            except queue.Empty:
                continue  # another player may give one back
            try:
                rollouts = play(environment, EngineClient(url), Games(seed, len(words()), 1, greedy))
            except LOST:
                waiting.put(seed)
                time.sleep(AGAIN_AFTER)
                continue
            if set(rollouts.versions) == {version}:
                played.append(rollouts)
            else:
                waiting.put(seed)

    threads = [threading.Thread(target=play_some, args=(url,), daemon=True) for url in urls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return evaluate(version, played)
