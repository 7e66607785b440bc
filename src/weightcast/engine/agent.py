"""The agent: a mirror that follows a channel, and an engine that follows the mirror.

    poll → fetch, decode, prove (mirror) → stage (workers) → [pause → apply → finish → resume]

All but what is in brackets goes on while the engine serves. Whatever state an engine is found in, it is brought to the
mirror's version: by patches if it stands where they begin, by comparing it with the mirror if its layout is trusted, by
its own loader if not. An update that broke off leaves it paused until one of them has worked. A channel that does not
fit the engine is refused before anything is fetched for it, and before the engine is paused.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from weightcast.channel.keys import Position
from weightcast.channel.policy import NEWEST, Pinned, Policy
from weightcast.channel.records import position_json
from weightcast.engine.client import Engine
from weightcast.engine.meeting import (
    Met,
    MisfitError,
    Told,
    carry_out,
    compare_files,
    counted,
    doubt,
    hold,
    joined_fingerprint,
    listed,
    live_digests,
    meet,
    refuse_reload,
    stand,
    teach,
    trust,
)
from weightcast.errors import EngineError, StoreError, WeightcastError
from weightcast.follow.heartbeat_sender import HeartbeatSender, error_text
from weightcast.follow.loop import OnError
from weightcast.follow.mirror import Mirror
from weightcast.follow.mirror_folder import MirrorFolder
from weightcast.follow.replica import Staged
from weightcast.follow.subscriber import Subscriber
from weightcast.format.digest import Fingerprint
from weightcast.format.spec import TensorTable
from weightcast.store.backoff import CLOCK, Backoff, Clock
from weightcast.store.base import Store

_LONGEST = 30.0
"""Seconds between two attempts at most: an engine that restarts serves old weights until it is met again."""

_MIXED = "updating"
"""The version of an engine that holds none."""
_log = logging.getLogger("weightcast")


@dataclass(frozen=True)
class Update:
    """What brought an engine to a version: ``seconds`` by phase, of which only some were a pause."""

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
        return sum(self.seconds.get(phase, 0.0) for phase in ("pause", "apply", "prove", "resume"))


@dataclass
class Phases:
    """Adds up seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began


@dataclass(frozen=True)
class _Ready:
    """A job that was staged, and the reload beside it."""

    job: str | None
    told: Told
    reload: tuple[str, ...]


class Agent:
    """Keeps one engine at a channel's versions, through a mirror on the engine's host."""

    def __init__(
        self,
        channel: str | Store,
        engine: Engine,
        mirror: Path | str,
        *,
        policy: Policy = NEWEST,
        prove: bool = False,
        clear_cache: bool = True,
        replica: str | None = None,
        clock: Clock = CLOCK,
    ):
        """``prove`` digests all live parameters after every apply, while the engine is still paused.

        With a ``replica`` name, heartbeats are left in the bucket, as far as that is permitted.
        """
        self.engine = engine
        instance = MirrorFolder(Path(mirror)).instance
        self._heartbeats = HeartbeatSender(replica, instance, clock) if replica else None
        self.subscriber = Subscriber(channel, mirror, policy=policy, clock=clock)
        self._policy, self._prove, self._clear_cache, self._clock = policy, prove, clear_cache, clock
        self._stopped = threading.Event()
        self.position: Position | None = None
        """Where the engine stands, as far as we know."""
        self._met: Met | None = None
        self._held = False
        """Whether the engine is paused because of us, or of an agent before us."""
        self._proven: tuple[str, ...] = ()
        """The workers whose word is taken for where they stand, if all is to be proven."""
        self.unproven: tuple[str, ...] = ()
        self.last: Update | None = None
        self.trouble: WeightcastError | None = None
        """What the last round of `follow` ended with."""
        self.short: WeightcastError | None = None
        """Why the last round went to an older version than is wanted, if it did."""

    @property
    def behind(self) -> int | None:
        """Versions from the one that is live to the newest that the mirror has."""
        newest = self.subscriber.position
        return None if newest is None or self.position is None else max(0, newest.version - self.position.version)

    @property
    def mirror(self) -> Mirror:
        return self.subscriber.mirror

    @property
    def _table(self) -> TensorTable:
        return self.subscriber.chain.channel.table

    # -- a round -----------------------------------------------------------------------------------------------------

    def step(self) -> Update | None:
        """Bring mirror and engine to the version that the policy wants; None if they are there."""
        clock = Phases()
        staged, outage, met, away = None, None, None, None
        self.short = None
        try:
            met = self._meet(clock)
            self._resume_what_was_left(met)
        except MisfitError:
            raise
        except EngineError as error:
            self.position, away = None, error
        try:
            with clock.phase("fetch"):
                staged = self.subscriber.poll()
        except WeightcastError as error:
            outage = error  # an engine that has restarted is brought to what the mirror has
        update = self._follow_mirror(met, staged, clock)
        self.short = staged.reason if staged is not None else None
        if outage is not None:
            raise outage
        if away is not None:
            raise away
        return update

    def _follow_mirror(self, met: Met | None, staged: Staged | None, clock: Phases) -> Update | None:
        try:
            ready = self._stage_patches(met, staged, clock) if met and staged else None
        finally:
            if staged is not None:  # whatever the engine does, the mirror goes on
                self.subscriber.apply(staged)
        target, fingerprint = self.subscriber.position, self.mirror.fingerprint
        if met is None or target is None or fingerprint is None:
            return None
        if met.position is None and not met.changing:
            met = self._recognise(met, fingerprint, target, clock)
        update = None
        self._resume_what_was_left(met)
        if met.position != target or met.changing:
            self.position = None
            update = self._bring(met, ready, target, fingerprint, clock)
            self.last, self.unproven = update, update.unproven
        self.position, self._proven = target, met.instances
        return update

    def _meet(self, clock: Phases) -> Met:
        met = meet(self.engine, self._table, self._met)
        if not met.learned:
            with clock.phase("learn"):
                teach(self.engine, self.subscriber.chain.channel)
            met = meet(self.engine, self._table)
            self._name_what_does_not_fit(met)
        self._held = met.held
        if met.changing:
            # Whatever is there is mixed, and must not be served.
            self._pause()
        self.position, self._met = met.position, met
        return replace(met, position=None) if self._prove and met.instances != self._proven else met

    def _name_what_does_not_fit(self, met: Met) -> None:
        """Once for each engine that is met: nobody shall believe that all of a version is in it if it is not."""
        for name, reason in met.unknown.items():
            _log.warning("%s is reloaded whole when it changes: %s", name, reason)
        if met.absent:
            names = f"{counted(met.absent, 'tensor')} of the channel: {listed(met.absent)}"
            _log.warning("the engine has no place for %s", names)
        if met.uncovered:
            names = f"{counted(met.uncovered, 'parameter')} of the engine: {listed(met.uncovered)}"
            _log.warning("neither the channel nor the engine's own checkpoint covers %s", names)

    def _recognise(self, met: Met, fingerprint: Fingerprint, target: Position, clock: Phases) -> Met:
        """Find out by live digests which version an engine is that does not say so, and which layouts hold."""
        with clock.phase("recognise"):
            sums = live_digests(self.engine, self._table)
        same = {name for name, total in sums.items() if total.digest == fingerprint[name]}
        found = joined_fingerprint(self._table, sums)
        position = target if len(same | met.absent) == len(self._table) else None
        if position is None and found is not None:
            position = self._find(found)
        trusted = sums.keys() - met.absent if position else same | met.trusted
        if position is None and not met.updates:
            with clock.phase("compare"):
                loaded, other = compare_files(self.engine)
            packed = other - met.trusted  # else it was changed since
            doubt(self.engine, packed)
            trusted = (trusted | loaded) - packed
        trust(self.engine, trusted)
        if position is not None:
            stand(self.engine, position)
            self.engine.name_version(str(position.version))
        return replace(met, position=position, trusted=frozenset(trusted))

    def _find(self, fingerprint: Fingerprint) -> Position | None:
        """The version of the channel that has these bits; None in an outage."""
        chain, version = self.subscriber.chain, None
        with suppress(StoreError):
            head = chain.head()
            version = chain.find(fingerprint.digest, head) if head else None
        return None if version is None else Position(version, fingerprint.digest)

    # -- stage -------------------------------------------------------------------------------------------------------

    def _stage_patches(self, met: Met, staged: Staged, clock: Phases) -> _Ready | None:
        """Have the workers prepare what was fetched, if the engine stands where it begins."""
        if met.position is None or met.changing or met.position != staged.start or staged.folder is not None:
            return None
        touched = {
            spec.name
            for spec, before, after in zip(self._table, self._digests_now(), staged.fingerprint.digests, strict=True)
            if before != after
        }
        reload = self._to_reload(met, touched)
        request = {"do": "stage_patches", "paths": [str(patch.path) for patch in staged.patches]}
        with clock.phase("stage"):
            job, told = carry_out(self.engine, self._table, request)
        self._refuse_other_sums(told, staged.fingerprint)
        return _Ready(job, told, reload)

    def _to_reload(self, met: Met, names: Collection[str]) -> tuple[str, ...]:
        """What must go through the engine's own loader, so that some tensors get there; `MisfitError` if it cannot."""
        missing = set(names) - met.trusted - met.absent
        refuse_reload(missing, met.cannot_reload, self.engine.url)
        return self._whole_layers(missing)

    def _digests_now(self) -> tuple[int, ...]:
        fingerprint = self.mirror.fingerprint
        assert fingerprint is not None
        return fingerprint.digests

    def _stage_weights(self, met: Met, fingerprint: Fingerprint, clock: Phases) -> _Ready:
        """Have the workers compare what they hold with the mirror; what cannot be compared is reloaded."""
        reload = self._to_reload(met, {spec.name for spec in self._table})
        names = sorted(met.trusted - set(reload))
        with clock.phase("stage"):
            job, told = carry_out(self.engine, self._table, {"do": "stage_weights", **self._source(), "names": names})
        self._refuse_other_sums(told, fingerprint)
        return _Ready(job, told, reload)

    def _source(self) -> dict[str, Any]:
        """The mirror, for workers to read."""
        return {"folder": str(self.mirror.folder.absolute())}

    def _refuse_other_sums(self, told: Told, fingerprint: Fingerprint) -> None:
        for name, total in told.sums.items():
            if total.digest != fingerprint[name] and not total.rounded:
                problem = total.problem or "what is staged would not be the version's bits"
                hint = "The engine's memory was changed by somebody else; the agent compares it with the mirror now."
                raise _StagedWrongError(problem, url=self.engine.url, tensor=name, hint=hint)

    def _whole_layers(self, names: Collection[str]) -> tuple[str, ...]:
        """All tensors of the layers that some tensors are in: a loader that is given half a layer fills up the rest."""
        groups = {_layer_of(name) for name in names}
        return tuple(spec.name for spec in self._table if _layer_of(spec.name) in groups)

    # -- apply -------------------------------------------------------------------------------------------------------

    def _bring(
        self, met: Met, ready: _Ready | None, target: Position, fingerprint: Fingerprint, clock: Phases
    ) -> Update:
        if ready is None:
            try:
                ready = self._stage_weights(met, fingerprint, clock)
            except _StagedWrongError:
                live_digests(self.engine, self._table)  # what the workers remember of themselves is wrong
                ready = self._stage_weights(met, fingerprint, clock)
        unproven = self._write(ready, target, fingerprint, clock)
        if unproven is None:
            self.engine.finish(_MIXED)
            _log.warning("the update failed; the engine stays paused while all of it is loaded again")
            everything = tuple(spec.name for spec in self._table)
            ready = _Ready(None, ready.told, everything)
            unproven = self._write(ready, target, fingerprint, clock)
            if unproven is None:
                self.engine.finish(_MIXED)
                failed = meet(self.engine, self._table).failed or "its live bits are not the version's"
                hint = "It stays paused. Restart it; the agent brings it to the newest version."
                raise EngineError(f"the engine cannot be updated: {failed}", url=self.engine.url, hint=hint)
        with clock.phase("resume"):
            self.engine.finish(str(target.version))
            self._resume()
        told = ready.told
        return Update(target, told.changed, told.nbytes, len(ready.reload), unproven, clock.seconds)

    def _write(
        self, ready: _Ready, target: Position, fingerprint: Fingerprint, clock: Phases
    ) -> tuple[str, ...] | None:
        """Pause and write; the tensors that cannot be proven, or None if it failed. The engine is paused behind it."""
        info = {"job": ready.job, "position": position_json(target), "mirror": self._source(), "reload": ready.reload}
        with clock.phase("pause"):
            self._pause()
        with clock.phase("apply"):
            self.engine.update(info)
            met = meet(self.engine, self._table, self._met)
        if met.failed and not met.changing:  # nothing was written
            self.engine.finish(str(met.position.version) if met.position else None)
            self._resume()
            raise EngineError(
                f"what was staged is of no use: {met.failed}", url=self.engine.url, hint="It is tried again."
            )
        if met.failed:
            return None
        with clock.phase("prove"):
            return self._prove_now(ready, fingerprint)

    def _prove_now(self, ready: _Ready, fingerprint: Fingerprint) -> tuple[str, ...] | None:
        """Read back what was loaded, or all: a tensor that is right is trusted from now on."""
        if not ready.reload and not self._prove:
            return self.unproven
        met = meet(self.engine, self._table)
        names = None if self._prove else ready.reload
        sums = live_digests(self.engine, self._table, names)
        wrong = {name for name, total in sums.items() if total.digest != fingerprint[name]} - met.absent
        if any(not sums[name].rounded for name in wrong & met.trusted):
            stand(self.engine, None)
            return None
        trust(self.engine, sums.keys() - wrong - met.absent)
        known = set(self.unproven) - sums.keys()
        return tuple(sorted(known | wrong))

    def _pause(self) -> None:
        if not self._held and not self.engine.is_paused():
            self._held = True  # first: whoever interrupts us here must not leave the engine paused
            hold(self.engine, True)
        self.engine.pause(self._clear_cache)  # again, if it is paused already: for the cache

    def _resume(self) -> None:
        """Let it go on, unless it was somebody else who had paused it."""
        if self._held:
            self.engine.resume()
            hold(self.engine, False)
            self._held = False

    def _resume_what_was_left(self, met: Met) -> None:
        """An agent before us may have been killed in a pause; an engine that is not mixed need not wait any longer."""
        if not self._held or met.changing:
            return
        if met.position is not None:
            self.engine.name_version(str(met.position.version))
            self._resume()
        elif not self._prove:  # else it is digested first
            self._resume()

    def _let_go(self) -> None:
        """Resume an engine whose weights are whole before we leave it; one whose weights are mixed must not serve."""
        again = "Start the agent again, which brings it to a version and resumes it, or restart the engine."
        try:
            met = meet(self.engine, self._table)
            if met.changing:
                _log.warning("%s stays paused: an update broke off, and its weights are mixed. %s", self._url, again)
                return
            if met.position is not None:
                self.engine.name_version(str(met.position.version))
            self._resume()
        except EngineError as error:
            _log.warning("%s may be left paused: %s. %s", self._url, error.problem, again)

    @property
    def _url(self) -> str:
        return self.engine.url

    # -- follow ------------------------------------------------------------------------------------------------------

    def follow(self, every: float = 1.0, trouble: OnError | None = None) -> Iterator[Update]:
        """Go on until `stop`, giving out each update. An error ends it, unless ``trouble`` is told.

        ``trouble`` is also told if the newest version cannot be reached, and the engine follows the newest that can.
        """
        backoff = Backoff(every, _LONGEST)
        while not self._stopped.is_set():
            update, error = None, None
            try:
                update = self.step()
                error = self.short
            except WeightcastError as found:
                if trouble is None:
                    raise
                error = found
            if error is not None and trouble is not None:
                trouble(error)
            self.trouble = error
            self._beat(error)
            if error is None:
                backoff.succeeded()
            pause = backoff.idle() if error is None else backoff.failed()
            if update is not None:
                yield update
            else:
                self._clock.wait(self._stopped, pause)

    def stop(self) -> None:
        """End `follow`, from any thread."""
        self._stopped.set()

    def _beat(self, error: WeightcastError | None) -> None:
        """Tell the channel how the engine does: when it moved, and now and then."""
        if self._heartbeats is None or self.position is None or isinstance(error, StoreError):
            return
        held = isinstance(self._policy, Pinned)  # no follower: nobody shall wait for it
        pause = None if held else self.last.pause if self.last else 0.0
        text = error_text(error) if error else None
        self._heartbeats.report(self.subscriber.chain, self.position, error=text, pause=pause, at_once=True)

    def close(self) -> None:
        """Resume the engine if it is paused because of us and its weights are whole, and let the mirror go."""
        self.stop()
        try:
            if self._held:
                self._let_go()
            if self._heartbeats is not None:
                self._heartbeats.withdraw(self.subscriber.chain)
        finally:
            self.subscriber.close()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _StagedWrongError(EngineError):
    """What workers prepared is not what it should be: nothing was written."""


def _layer_of(name: str) -> str:
    """The layer that a tensor is in, by the first number of its name."""
    found = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", name)
    return found.group() if found else ""
