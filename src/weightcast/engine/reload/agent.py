"""The agent of an engine that can only load a folder: a mirror that follows a channel, and an engine that loads it.

    sync (mirror) → fold: the files are the version → [readers' lock: load (engine)] → the version is live

The engine is asked for its version in every round, so one that restarts gets the version again. While it is not known
whether a load has ended, because no answer came or an agent was killed, the engine may still read the files: they stay
as they are, and are loaded again before anything else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightcast.channel.keys import Position
from weightcast.channel.policy import NEWEST, Every, Pinned, Policy
from weightcast.channel.trust import Trust
from weightcast.engine.reload.engine import ReloadEngine
from weightcast.engine.reload.record import LoadRecord
from weightcast.engine.rounds import EngineAgent
from weightcast.errors import ChannelError, EngineError, EngineGoneError, FormatError, StoreError, WeightcastError
from weightcast.events.emitter import Emitter, OnEvent
from weightcast.events.phases import Phases
from weightcast.follow.heartbeat_sender import HeartbeatSender, error_text
from weightcast.follow.mirror_folder import MirrorFolder
from weightcast.follow.subscriber import Subscriber
from weightcast.follow.update import Update
from weightcast.store.backoff import CLOCK, Clock
from weightcast.store.base import Store

_BEAT = 10.0
"""Seconds between two looks whether a heartbeat is due during a load."""

_log = logging.getLogger("weightcast")


@dataclass(frozen=True)
class Reloaded:
    """An engine has loaded a version."""

    position: Position
    nbytes: int
    """Bytes fetched for it in this round."""
    tensors: int
    elements: int
    fetch: float
    """Seconds until the mirror had the version."""
    fold: float
    """Seconds until its files were the version."""
    load: float
    """Seconds that the engine took to load them."""

    @property
    def seconds(self) -> dict[str, float]:
        """By phase."""
        return {"fetch": self.fetch, "fold": self.fold, "load": self.load}

    @property
    def pause(self) -> float:
        """Seconds that the engine may have stood still: the whole load."""
        return self.load

    @property
    def changed(self) -> int:
        """Elements written: all."""
        return self.elements

    def as_json(self) -> dict[str, Any]:
        return {
            "version": self.position.version,
            "digest": self.position.digest,
            "bytes": self.nbytes,
            "tensors": self.tensors,
            "seconds": {phase: round(value, 4) for phase, value in self.seconds.items()},
        }


class ReloadAgent(EngineAgent[Reloaded]):
    """Keeps one engine that loads folders at a channel's versions, through a mirror that the engine can read."""

    def __init__(
        self,
        channel: str | Store,
        engine: ReloadEngine,
        mirror: Path | str,
        *,
        policy: Policy = NEWEST,
        replica: str | None = None,
        clock: Clock = CLOCK,
        on_event: OnEvent = (),
        trust: Trust | str | None = None,
        sign: str | Path | None = None,
    ):
        """With a ``replica`` name the agent sends heartbeats to the bucket, if it may write there.

        ``on_event`` gets an `Event` for each phase of a version: a `Sink`, or several.
        """
        super().__init__(clock)
        self.engine = engine
        # Nothing but a load needs the files, and after one that has no end they must not change: no fold at the end.
        self._emitter = Emitter(on_event, "agent", replica)
        beside = self._emitter.relay("mirror")
        self.subscriber = Subscriber(
            channel, mirror, policy=policy, fold=False, clock=clock, on_event=beside, trust=trust, sign=sign
        )
        self.unproven: None = None
        """It is not known which tensors are live as the version has them: nothing is read back."""
        self.last: Reloaded | None = None
        self.replica = replica
        self._policy = policy
        self._folder = Path(mirror)
        place = MirrorFolder(self._folder)
        self._record = LoadRecord(self._folder, engine.url)
        self._shared = place.shared
        self._heartbeats = HeartbeatSender(replica, place.instance, clock) if replica else None
        self._phases = Phases(clock)
        """Of the round that runs now, or ran last."""

    @property
    def lag(self) -> int | None:
        """Versions from the live one to the newest that the mirror has; None if either is unknown."""
        newest, live = self.subscriber.position, self.position
        return max(0, newest.version - live.version) if newest and live else None

    @property
    def _channel(self) -> str:
        return self.subscriber.chain.channel.id

    # -- a round -----------------------------------------------------------------------------------------------------

    def step(self) -> Reloaded | None:
        """Bring mirror and engine to the version that the policy wants; None if the engine is there already."""
        self._phases, self.short = Phases(self._clock), None
        update: Update | None = None
        errors: list[WeightcastError] = []
        served, error = self._meet()
        if error is not None:
            if self._record.is_unfinished:
                raise error
            errors.append(error)
        try:
            if self._may_advance(served):
                update = self.subscriber.sync()
        except WeightcastError as failed:
            errors.append(failed)  # an engine that has restarted still gets what the mirror has
        self.short = update.short if update else None
        loaded = self._bring(served, update) if error is None else None
        if errors:
            raise errors[-1]
        return loaded

    def _meet(self) -> tuple[str | None, EngineError | None]:
        """The version that the engine names, or why it does not. A load that has no end is done again first."""
        try:
            served = self.engine.version()
            files_at = self.subscriber.mirror.folded
            if self._record.is_unfinished and files_at is not None:
                self._load(files_at)
                served = self.engine.version()
        except EngineError as error:
            self.position = None
            return None, error
        if self.position is not None and not self._serves(self.position, served):
            self.position = None
        return served, None

    def _may_advance(self, served: str | None) -> bool:
        """Whether the mirror may go on although the engine may not have its version: not if none is to be skipped."""
        at = self.subscriber.position
        return not isinstance(self._policy, Every) or at is None or self._serves(at, served)

    def _serves(self, position: Position, served: str | None) -> bool:
        return self._record.loaded(self._channel) == position and served in (None, str(position.version))

    def _bring(self, served: str | None, update: Update | None) -> Reloaded | None:
        target = self.subscriber.position
        if target is None:
            return None
        if self._serves(target, served):
            self.position = target
        else:
            with self._phases.phase("fold"):
                self.subscriber.fold()
            self._load(target)
        took = self._phases.seconds
        if "load" not in took:
            return None
        table, fetched = self.subscriber.chain.channel.table, update.nbytes if update else 0
        for one in self._phases.spans():
            role = "engine" if one.phase == "load" else "mirror"
            self._emitter.emit(self._channel, target.version, target.digest, [one], role=role)
        fetch = update.total_seconds if update else 0.0
        self.last = Reloaded(target, fetched, len(table), table.elements, fetch, took.get("fold", 0.0), took["load"])
        return self.last

    def _load(self, position: Position) -> None:
        """Have the engine load the mirror's files, which are this version and do not change meanwhile."""
        step = self._step_of(position)
        with self._phases.phase("load"), self._shared(), self._beating():
            self._record.begin()
            try:
                self.engine.load(self._folder, position, step)
            except EngineError as error:
                self.position = None
                if not isinstance(error, EngineGoneError):  # else it may still read the files
                    self._record.failed()
                raise
            self._record.succeeded(self._channel, position)
        self.position = position

    def _step_of(self, position: Position) -> int | None:
        with suppress(StoreError, FormatError, ChannelError):  # a load does not need it
            return self.subscriber.chain.manifest(position.version).step
        return None

    # -- heartbeats --------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Send a heartbeat if one is due: of the live version, or else of the mirror's, as one without an engine."""
        error, at = self.trouble, self.position or self.subscriber.position
        if self._heartbeats is None or at is None or isinstance(error, StoreError):
            return
        is_followed = self.position is not None and not isinstance(self._policy, Pinned)
        pause = (self.last.pause if self.last else 0.0) if is_followed else None  # trainers wait for no other
        text = error_text(error) if error else None
        seconds = self.last.seconds if self.last else {}
        self._heartbeats.report(self.subscriber.chain, at, error=text, pause=pause, seconds=seconds, at_once=True)

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Heartbeats go on during a load, from a thread; nothing else uses the channel meanwhile."""
        ended = threading.Event()

        def beat() -> None:
            while True:
                self._clock.wait(ended, _BEAT)
                if ended.is_set():
                    return
                self._beat()

        thread = threading.Thread(target=beat, name="weightcast-heartbeats", daemon=True)
        if self._heartbeats is not None:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if self._heartbeats is not None:
                thread.join()

    # -- close -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the mirror. Nothing is paused that would have to be resumed."""
        self.stop()
        try:
            if self._record.is_unfinished:
                again = "The next agent has it load them again."
                _log.warning("%s may still be loading the files of %s. %s", self.engine.url, self._folder, again)
            if self._heartbeats is not None:
                self._heartbeats.withdraw(self.subscriber.chain)
        finally:
            self.subscriber.close()
