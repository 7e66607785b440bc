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
TELL_AFTER = 20.0
"""Seconds of waiting after which it is said what is waited for."""


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


class Outage:
    """Says once that no games can be played with a replica, however often it is tried."""

    def __init__(self, url: str):
        self._url = url
        self._told: type[BaseException] | None = None

    def met(self, error: BaseException) -> None:
        if type(error) is not self._told:
            self._told = type(error)
            report("trouble", replica=self._url, text=f"no games with {self._url} now: {error}")

    def over(self) -> None:
        self._told = None


class Player(threading.Thread):
    """Plays with one replica, and hands over what was played; waits while nobody takes it.

    An error that asking again will not mend is handed over instead, and ends it.
    """

    def __init__(
        self,
        environment: str,
        url: str,
        next_games: Callable[[], Games],
        ready: queue.Queue[Rollouts | BaseException],
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
        try:
            self._play_on()
        except BaseException as error:  # noqa: BLE001 - raised where the games are taken
            self._ready.put(error)

    def _play_on(self) -> None:
        outage = Outage(self._url)
        while not self._stopped.is_set():
            try:
                rollouts = play(self._environment, self._client, self._next_games())
            except LOST as error:
                outage.met(error)
                self._stopped.wait(AGAIN_AFTER)
                continue
            outage.over()
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
    began, told = time.monotonic(), False
    while True:
        there = [url for url in urls if version_of(url) == version]
        waited = time.monotonic() - began
        if len(there) == len(urls) or (there and waited > patience):
            return there
        if waited > TELL_AFTER and not told:
            told = True
            report("trouble", text=f"version {version} is not yet at {', '.join(set(urls) - set(there))}")
        time.sleep(0.1)


def version_of(url: str) -> int | None:
    """Which version an engine serves; None if it does not answer."""
    try:
        return EngineClient(url).version()
    except LOST:
        return None


def measure(
    environment: str,
    urls: Sequence[str],
    version: int,
    repeats: int,
    check: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Play every word so many times with one version of the weights, on all these replicas.

    ``check`` is called twice a second, and ends it by raising.
    """
    seeds: queue.SimpleQueue[int] = queue.SimpleQueue()
    for seed in range(repeats):
        seeds.put(seed)
    ended: queue.SimpleQueue[Rollouts | BaseException] = queue.SimpleQueue()
    played: list[Rollouts] = []
    for url in urls:
        threading.Thread(target=_play_seeds, args=(environment, url, version, seeds, ended), daemon=True).start()
    while len(played) < repeats:
        check()
        try:
            end = ended.get(timeout=0.5)
        except queue.Empty:
            continue
        if isinstance(end, BaseException):
            raise end
        played.append(end)
    for _ in urls:
        seeds.put(DONE)
    return evaluate(version, played)


DONE = -1
"""A seed that ends a thread of `measure`."""


def _play_seeds(
    environment: str,
    url: str,
    version: int,
    seeds: queue.SimpleQueue[int],
    ended: queue.SimpleQueue[Rollouts | BaseException],
) -> None:
    """Play one game of every word for each seed; what a lost box or another version spoils is played again."""
    outage = Outage(url)
    try:
        while (seed := seeds.get()) != DONE:
            try:
                rollouts = play(environment, EngineClient(url), Games(seed, len(words()), 1))
            except LOST as error:
                outage.met(error)
                seeds.put(seed)
                time.sleep(AGAIN_AFTER)
                continue
            outage.over()
            if set(rollouts.versions) == {version}:
                ended.put(rollouts)
            else:
                seeds.put(seed)
    except BaseException as error:  # noqa: BLE001 - raised by `measure`
        ended.put(error)
