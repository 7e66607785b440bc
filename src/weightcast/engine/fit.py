"""Whether a channel fits an engine: what the layout of its tensors leaves out, and what must not be attempted.

A layout is trusted for a tensor only after its live digest, read through the layout, was a version's: where an engine
packs or quantises weights after loading, the layout that its loader shows is not where they are.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence

from weightcast.channel.records import Channel
from weightcast.engine.client import Engine
from weightcast.engine.messages import Fit, Learn, Survey
from weightcast.errors import MisfitError
from weightcast.format.cut import merged_cuts

_NAMED = 8
"""Names in a message."""

_log = logging.getLogger("weightcast")


def combine_fits(fits: Sequence[Fit]) -> Fit:
    """The fit of all workers together."""
    unknown: dict[str, str] = {}
    uncovered: dict[str, int] = {}
    for one in fits:
        unknown |= one.unknown
        uncovered |= one.uncovered
    absent = frozenset.intersection(*(one.absent for one in fits)) - unknown.keys()
    cannot_reload = next((one.cannot_reload for one in fits if one.cannot_reload), None)
    trusted = frozenset.intersection(*(one.trusted for one in fits))
    return Fit(unknown, absent, uncovered, cannot_reload, trusted, merged_cuts(one.cuts for one in fits))


def teach(engine: Engine, channel: Channel, *, allow_absent: bool, allow_uncovered: bool) -> None:
    """Have the workers learn where the tensors of a channel are.

    `MisfitError` if the channel does not fit; the workers then keep what they had learned before. It fits in part if
    the engine has no place for some tensors, or if none covers a parameter that the engine's own checkpoint covers.
    """
    surveys = engine.ask(Survey(channel))
    remedy = "Name the channel of the model that the engine serves, or start the engine with the channel's model."
    strange: dict[str, int] = {}
    for one in surveys:
        if one.broken:
            raise MisfitError(f"the channel does not fit the engine: {one.broken}", url=engine.url, hint=remedy)
        strange |= one.strange
    if strange and not allow_uncovered:
        problem = f"no tensor of the channel covers {counted(strange, 'parameter')} of the engine"
        hint = f"{remedy} If it is the right one, start the engine from a local folder of its checkpoint."
        raise MisfitError(f"{problem}: {listed(strange)}", url=engine.url, hint=hint)
    fit = combine_fits([one.fit for one in surveys])
    if fit.absent and not allow_absent:
        problem = f"the engine has no place for {counted(fit.absent, 'tensor')} of the channel: {listed(fit.absent)}"
        hint = "If that is meant, pass --allow-partial: they are left out, and `weightcast verify` says so."
        raise MisfitError(problem, url=engine.url, tensor=min(fit.absent), hint=hint)
    refuse_reload(fit.unknown, fit.cannot_reload, engine.url)
    engine.ask(Learn(channel))


def refuse_reload(names: Collection[str], reason: str | None, url: str) -> None:
    """`MisfitError` if there are tensors that only a reload can bring into the engine, and it cannot reload."""
    if names and reason is not None:
        problem = f"the engine can neither place nor reload {counted(names, 'tensor')}: {listed(names)}; {reason}"
        hint = "Restart vLLM from the mirror for a new version, or serve this model on a GPU."
        raise MisfitError(problem, url=url, tensor=min(names), hint=hint)


def warn_of_gaps(fit: Fit) -> None:
    """Meant once per engine process: without it a version would seem to be complete in the engine."""
    for name, reason in fit.unknown.items():
        _log.warning("%s is reloaded whole when it changes: %s", name, reason)
    if fit.absent:
        names = f"{counted(fit.absent, 'tensor')} of the channel: {listed(fit.absent)}"
        _log.warning("the engine has no place for %s", names)
    if fit.uncovered:
        names = f"{counted(fit.uncovered, 'parameter')} of the engine: {listed(fit.uncovered)}"
        _log.warning("neither the channel nor the engine's own checkpoint covers %s", names)


def counted(things: Collection[object], noun: str) -> str:
    return f"{len(things):,} {noun}{'' if len(things) == 1 else 's'}"


def listed(names: Iterable[str]) -> str:
    """The first of some names, for a message of one line."""
    ordered = sorted(names)
    return ", ".join(ordered[:_NAMED]) + (f" and {len(ordered) - _NAMED:,} more" if len(ordered) > _NAMED else "")
