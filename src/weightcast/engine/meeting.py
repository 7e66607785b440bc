"""Meeting an engine: which version its live parameters are, and through which of them patches may be written.

A layout is only trusted for a tensor whose live digest, read through it, was a manifest's: where an engine packs or
quantises weights after loading, the layout that its loader shows is not where they are.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weightcast.channel.keys import Position
from weightcast.channel.records import Channel, channel_to_json, position_from_json, position_json
from weightcast.engine.client import Engine, understood
from weightcast.engine.layout import Held, Sum, put_together
from weightcast.errors import EngineError
from weightcast.format.digest import Fingerprint, table_json
from weightcast.format.spec import TensorTable

_NAMED = 8
"""Names in a message."""

PROTOCOL = 1
"""Of requests and answers: an agent and a worker that do not speak the same refuse each other."""

_WAIT = 0.002, 0.2


@dataclass(frozen=True)
class Met:
    """What an engine's workers say, put together."""

    instances: tuple[str, ...]
    """Of the workers' processes: others after a restart."""
    position: Position | None
    """Where all of them stand; None if they do not know, or not the same."""
    changing: bool
    """Whether an update broke off, so that what is there is mixed."""
    failed: str | None
    held: bool
    """Whether it was an agent, perhaps one that is dead, who paused the engine."""
    updates: int
    """Since it began; before the first it holds what it loaded."""
    learned: bool
    """Whether they know the layout of this channel's tensors,"""
    taught: bool
    """or of some others'."""
    lessons: tuple[int, ...]
    unknown: Mapping[str, str]
    """Tensors that cannot be followed into the parameters, and why."""
    absent: frozenset[str]
    """Tensors that have no place in the engine."""
    uncovered: Mapping[str, int]
    """Parameters that no tensor covers, and how many elements of each; the engine's own checkpoint does neither."""
    cannot_reload: str | None
    """Why the engine's own loader must not be used, if so."""
    trusted: frozenset[str]
    """Those that may be written through the layout."""


@dataclass(frozen=True)
class Told:
    """What came of a job of all workers."""

    sums: Mapping[str, Sum]
    remembered: Mapping[str, Sum]
    """What the workers thought they held, for a `verify`."""
    changed: int
    nbytes: int


def meet(engine: Engine, table: TensorTable, before: Met | None = None) -> Met:
    """Ask the workers how they stand; nothing is computed. What was known of names ``before`` is asked once only."""
    with understood(engine.url):
        return _meet(engine, table, before)


def _meet(engine: Engine, table: TensorTable, before: Met | None) -> Met:
    answers = engine.ask({"do": "hello"})
    for answer in answers:
        if answer.get("protocol") != PROTOCOL:
            hint = "Install the same weightcast beside the agent and beside the engine, and restart both."
            spoken = f"protocol {answer.get('protocol')}, this agent {PROTOCOL}"
            raise EngineError(f"the engine's plug-in speaks {spoken}", url=engine.url, hint=hint)
    if {answer["rank"] for answer in answers} != set(range(answers[0]["world"])):
        raise EngineError("not all workers answer", url=engine.url)
    positions = {json.dumps(answer["position"]) for answer in answers}
    first = answers[0]["position"]
    agreed = len(positions) == 1 and first is not None
    ours = hashlib.sha256(table_json(table).encode()).hexdigest()
    instances = tuple(answer["instance"] for answer in answers)
    lessons = tuple(answer["lessons"] for answer in answers)
    learned = all(answer["table"] == ours for answer in answers)
    fit, trusted = _Fit(), frozenset[str]()
    if learned and before is not None and (before.instances, before.lessons) == (instances, lessons):
        fit = _Fit(before.unknown, before.absent, before.uncovered, before.cannot_reload)
        trusted = before.trusted
    elif learned:
        told = engine.ask({"do": "names"})
        fit, trusted = _fit_of(told), frozenset.intersection(*(frozenset(answer["trusted"]) for answer in told))
    return Met(
        instances,
        position_from_json(first) if agreed else None,
        any(answer["changing"] for answer in answers) or len(positions) > 1,
        next((answer["failed"] for answer in answers if answer["failed"]), None),
        any(answer["held"] for answer in answers),
        max(answer["updates"] for answer in answers),
        learned,
        any(answer["table"] for answer in answers),
        lessons,
        fit.unknown,
        fit.absent,
        fit.uncovered,
        fit.cannot_reload,
        trusted,
    )


# -- does a channel fit an engine? -------------------------------------------------------------------------------------


class MisfitError(EngineError):
    """The channel is of another model than the engine's, or of one that cannot be updated there: no retry helps."""


@dataclass(frozen=True)
class _Fit:
    """How the tensors of a channel fit the parameters of all workers."""

    unknown: Mapping[str, str] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()
    uncovered: Mapping[str, int] = field(default_factory=dict)
    cannot_reload: str | None = None


def _fit_of(answers: list[dict[str, Any]]) -> _Fit:
    unknown: dict[str, str] = {}
    uncovered: dict[str, int] = {}
    for answer in answers:
        unknown |= answer["unknown"]
        uncovered |= answer["uncovered"]
    absent = frozenset.intersection(*(frozenset(answer["absent"]) for answer in answers))
    cannot = next((answer["cannot_reload"] for answer in answers if answer["cannot_reload"]), None)
    return _Fit(unknown, absent - unknown.keys(), uncovered, cannot)


def teach(engine: Engine, channel: Channel) -> None:
    """Have the workers learn where the tensors of a channel are.

    `MisfitError` if the channel does not fit; then the workers know what they knew before.
    """
    request = {"channel": channel_to_json(channel).decode()}
    with understood(engine.url):
        answers = engine.ask({"do": "survey", **request})
        _refuse_misfit(answers, engine.url)
    engine.ask({"do": "learn", **request})


def _refuse_misfit(answers: list[dict[str, Any]], url: str) -> None:
    other = "Name the channel of the model that the engine serves, or start the engine with the channel's model."
    for answer in answers:
        if answer["broken"]:
            raise MisfitError(f"the channel does not fit the engine: {answer['broken']}", url=url, hint=other)
    strange: dict[str, int] = {}
    for answer in answers:
        strange |= answer["strange"]
    if strange:
        problem = f"no tensor of the channel covers {counted(strange, 'parameter')} of the engine"
        hint = f"{other} If it is the right one, start the engine from a local folder of its checkpoint."
        raise MisfitError(f"{problem}: {listed(strange)}", url=url, hint=hint)
    fit = _fit_of(answers)
    refuse_reload(fit.unknown, fit.cannot_reload, url)


def refuse_reload(names: Iterable[str], reason: str | None, url: str) -> None:
    """`MisfitError` if there are tensors that only a reload could bring into the engine, and it cannot reload."""
    names = [*names]
    if names and reason is not None:
        problem = f"the engine can neither place nor reload {counted(names, 'tensor')}: {listed(names)}; {reason}"
        hint = "Restart vLLM from the mirror for a new version, or serve this model on a GPU."
        raise MisfitError(problem, url=url, tensor=min(names), hint=hint)


def counted(things: Collection[object], noun: str) -> str:
    return f"{len(things):,} {noun}{'' if len(things) == 1 else 's'}"


def listed(names: Iterable[str]) -> str:
    """The first of some names, for a message of one line."""
    ordered = sorted(names)
    return ", ".join(ordered[:_NAMED]) + (f" and {len(ordered) - _NAMED:,} more" if len(ordered) > _NAMED else "")


# -- what is asked of the workers --------------------------------------------------------------------------------------


def trust(engine: Engine, names: Iterable[str]) -> None:
    engine.ask({"do": "trust", "names": sorted(names)})


def doubt(engine: Engine, names: Iterable[str]) -> None:
    reason = "the engine changes it after loading"
    engine.ask({"do": "doubt", "names": sorted(names), "reason": reason})


def stand(engine: Engine, position: Position | None) -> None:
    engine.ask({"do": "stand", "position": position_json(position)})


def hold(engine: Engine, held: bool) -> None:
    engine.ask({"do": "hold", "held": held})


def carry_out(engine: Engine, table: TensorTable, request: Mapping[str, Any]) -> tuple[str, Told]:
    """Have all workers do a job, and wait for it; its name, and the digests of what they hold, or will hold, then."""
    with understood(engine.url):
        job, answers = _done(engine, request)
        sums, remembered = (_sums(table, answers, key) for key in ("held", "remembered"))
        changed, nbytes = (sum(answer.get(key, 0) for answer in answers) for key in ("changed", "nbytes"))
    return job, Told(sums, remembered, changed, nbytes)


def _sums(table: TensorTable, answers: list[dict[str, Any]], key: str) -> dict[str, Sum]:
    held: dict[str, list[Held]] = {}
    for answer in answers:
        for name, boxes in answer.get(key, {}).items():
            held.setdefault(name, []).extend(Held.from_json(box) for box in boxes)
    return {name: put_together(table[name], boxes) for name, boxes in held.items()}


def compare_files(engine: Engine) -> tuple[set[str], set[str]]:
    """Tensors that are, read through the layout, what the engine loaded when it began; and those that are not."""
    with understood(engine.url):
        _, answers = _done(engine, {"do": "compare_files"})
        same, other = (set[str]().union(*(answer[key] for answer in answers)) for key in ("same", "other"))
    return same - other, other


def _done(engine: Engine, request: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    job, wait = uuid.uuid4().hex, _WAIT[0]
    engine.ask({**request, "job": job})
    while True:
        answers = engine.ask({"do": "job", "job": job})
        states = {answer["state"] for answer in answers}
        for rank, answer in enumerate(answers):
            if answer["state"] not in ("running", "done"):
                problem = answer.get("error") or f"the job is {answer['state']}"
                raise EngineError(f"worker {rank}: {problem}", url=engine.url)
        if states == {"done"}:
            return job, answers
        time.sleep(wait)
        wait = min(2 * wait, _WAIT[1])


def live_digests(engine: Engine, table: TensorTable, names: Iterable[str] | None = None) -> Mapping[str, Sum]:
    """The digests of the live parameters of all workers, of some tensors or all."""
    request = {"do": "digest", "names": None if names is None else sorted(names)}
    return carry_out(engine, table, request)[1].sums


def joined_fingerprint(table: TensorTable, sums: Mapping[str, Sum]) -> Fingerprint | None:
    """Where an engine stands, if all tensors could be read."""
    digests = [sums[spec.name].digest for spec in table]
    found = tuple(digest for digest in digests if digest is not None)
    return Fingerprint(table, found) if len(found) == len(digests) else None
