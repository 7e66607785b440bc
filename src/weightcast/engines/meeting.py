"""Meeting an engine: which version its live parameters are, and through which of them patches may be written.

A layout is only trusted for a tensor whose live digest, read through it, was a manifest's: where an engine packs or
quantises weights after loading, the layout that its loader shows is not where they are.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weightcast.bits import TensorTable
from weightcast.digest import Fingerprint, table_json
from weightcast.engines.client import Engine, understood
from weightcast.errors import EngineError
from weightcast.keys import Position
from weightcast.layout import Held, Sum, put_together
from weightcast.manifest import Channel, channel_to_json, position_from_json, position_json

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
    """Tensors that the engine has no use for."""
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
    unknown: dict[str, str] = {}
    absent, trusted = frozenset[str](), frozenset[str]()
    if learned and before is not None and (before.instances, before.lessons) == (instances, lessons):
        unknown, absent, trusted = dict(before.unknown), before.absent, before.trusted
    elif learned:
        told = engine.ask({"do": "names"})
        for answer in told:
            unknown |= answer["unknown"]
        absent, trusted = (
            frozenset.intersection(*(frozenset(answer[key]) for answer in told)) for key in ("absent", "trusted")
        )
        absent -= unknown.keys()
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
        unknown,
        absent,
        trusted,
    )


def teach(engine: Engine, channel: Channel) -> None:
    """Have the workers learn where the tensors of a channel are."""
    engine.ask({"do": "learn", "channel": channel_to_json(channel).decode()})


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


def fingerprint_of(table: TensorTable, sums: Mapping[str, Sum]) -> Fingerprint | None:
    """Where an engine stands, if all tensors could be read."""
    digests = [sums[spec.name].digest for spec in table]
    found = tuple(digest for digest in digests if digest is not None)
    return Fingerprint(table, found) if len(found) == len(digests) else None
