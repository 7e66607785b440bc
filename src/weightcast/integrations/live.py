"""Wait until the engines that follow a channel serve a version; update one from here while no agent does."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position
from weightcast.channel.trust import Trust
from weightcast.engine.agent import Agent
from weightcast.engine.client import Engine
from weightcast.engine.followers import Followers
from weightcast.errors import EngineError, MisfitError, UsageError, WeightcastError
from weightcast.events.emitter import OnEvent
from weightcast.follow.mirror_folder import default_mirror
from weightcast.store.backoff import Backoff

_log = logging.getLogger("weightcast")

_SOON = 5.0
"""Seconds after which the log says what the first sync waits for, unless the usual patience is shorter."""

_CHECK_EVERY, _LONGEST = 0.03, 2.0
"""Seconds between two checks whether the engines are live: half the first pause, and the longest."""


@dataclass(frozen=True)
class _Live:
    """Whether a version is live: ``pause`` is what it cost; if that is None, ``problem`` says what is missing."""

    pause: float | None
    problem: str = ""
    no_engine: bool = False
    """Whether the problem is that no engine follows the channel."""


class LiveEngines:
    """The engines of a channel, as the trainer knows them: by heartbeats, and ``engine`` if it updates that itself."""

    def __init__(
        self,
        engine: Engine | None,
        mirror: Path | str | None,
        on_event: OnEvent = (),
        trust: Trust | str | None = None,
    ):
        """``on_event`` is for the engine that is updated from here."""
        if trust is not None and engine is not None and mirror is None:
            problem = "an engine that follows a signed channel from here needs a mirror"
            hint = "Name it with mirror=…: the bucket names the default one, and must not choose what is trusted."
            raise UsageError(problem, hint=hint)
        self._engine, self._mirror, self._on_event, self._trust = engine, mirror, on_event, trust
        self._driving = ExitStack()
        self._chain: Chain | None = None
        self._followers: Followers | None = None
        self._agent: Agent | None = None

    @property
    def has_own(self) -> bool:
        """Whether there is an engine that is updated from here."""
        return self._engine is not None

    def follow(self, chain: Chain) -> None:
        """From now on the engines of this channel are meant."""
        self._chain = chain

    def close(self) -> None:
        """Update no engine any more."""
        self._chain = self._followers = self._agent = None
        self._driving.close()

    def make_live(
        self, position: Position, began: float, patience: float, *, usual: float, first: bool
    ) -> float | None:
        """Wait until a version is live; the pause that it took, or None if it took longer than ``patience``.

        The ``first`` time that is an `EngineError`, and the log soon says what is waited for: after the ``usual``
        patience at the latest.
        """
        deadline, backoff, warned = began + patience, Backoff(_CHECK_EVERY, _LONGEST), False
        while True:
            cause = None
            try:
                live = self._check(position)
            except WeightcastError as error:  # training need not end because of an engine or its mirror
                if first and isinstance(error, MisfitError):
                    raise  # waiting does not help
                live, cause = _Live(None, str(error)), error
            if live.pause is not None:
                return live.pause
            if time.monotonic() >= deadline:
                break
            if first and not warned and time.monotonic() >= began + min(usual, _SOON):
                warned = True
                _log.warning("waiting for version %s to be live: %s", position.version, live.problem)
            time.sleep(min(backoff.failed(), max(0.0, deadline - time.monotonic())))
        problem = f"version {position.version} is not live after {patience:g} s: {live.problem}"
        if first:
            raise EngineError(
                problem, url=self._engine.url if self._engine else self._url, hint=self._remedy(live)
            ) from cause
        _log.warning("%s; training goes on", problem)
        return None

    @property
    def _url(self) -> str:
        assert self._chain is not None
        return self._chain.store.url

    def _check(self, position: Position) -> _Live:
        """Whether all engines are at a position. Updates ``engine`` itself if no agent follows the channel."""
        assert self._chain is not None
        self._followers = self._followers or Followers(self._chain)
        engines = self._followers.now()
        if not engines and self._engine is not None:
            return self._drive(self._engine, position)
        if self._agent is not None:
            self._step_aside()
        if not engines:
            return _Live(None, "no engine follows the channel", no_engine=True)
        late = [
            f"{beat.replica} is at {beat.position.version}" + (f" ({beat.error})" if beat.error else "")
            for beat in engines
            if beat.position != position  # not numbers: a channel that was reset uses a number again
        ]
        return _Live(None, ", ".join(late)) if late else _Live(max(beat.pause or 0.0 for beat in engines))

    def _drive(self, engine: Engine, position: Position) -> _Live:
        """Do what an agent would do."""
        if self._agent is None:
            assert self._chain is not None
            mirror = self._mirror or default_mirror(self._chain.channel.id)
            agent = Agent(self._chain.store, engine, mirror, on_event=self._on_event, trust=self._trust)
            self._agent = self._driving.enter_context(agent)
            _log.info("no agent follows %s: this trainer updates %s itself", self._url, engine.url)
        self._agent.step()
        at, last = self._agent.position, self._agent.last
        if at != position:  # the same number may be another writer's, or of a channel that was reset
            return _Live(None, f"the engine is at {at}, not at {position}")
        return _Live(last.pause if last is not None else 0.0)

    def _step_aside(self) -> None:
        """An agent follows now: two of them must not update one engine."""
        self._agent = None
        self._driving.close()
        _log.info("an agent follows %s now: this trainer no longer updates the engine itself", self._url)

    def _remedy(self, live: _Live) -> str:
        if self._agent is not None:
            return "Is it on this host? If not, run `weightcast attach` next to it instead of passing engine=…."
        if live.no_engine:
            return f"Run `weightcast attach {self._url} --engine http://127.0.0.1:8000` next to vLLM."
        return "If it only takes longer, pass a longer patience=…."
