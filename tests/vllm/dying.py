"""`weightcast`, but with something wrong: `python dying.py FAULT ARGUMENTS…`

- `tell:FILE` writes the name of every step to a file: calls to the engine, and what the mirror does.
- `before:K`, `during:K` and `after:K` kill the process (SIGKILL) at its K-th step, counted from 0; `during` is while
  the engine works on it.
- `protocol:N` uses another protocol than the engine's plug-in.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from weightcast.cli import main
from weightcast.engine import protocol
from weightcast.engine.client import HttpEngine
from weightcast.engine.protocol import kind_of
from weightcast.follow.subscriber import Subscriber

DURING_SECONDS = 0.05


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


class Steps:
    """Counts steps."""

    def __init__(self, fault: str, argument: str):
        self._fault, self._argument = fault, argument
        self._count = -1

    def at(self, name: str, step: Callable[[], Any]) -> Any:
        self._count += 1
        if self._fault == "tell":
            with Path(self._argument).open("a") as file:
                file.write(f"{name}\n")
            return step()
        if self._count != int(self._argument):
            return step()
        if self._fault == "before":
            die()
        if self._fault == "during":
            threading.Timer(DURING_SECONDS, die).start()
        step()
        die()


def counted(call: str, real: Callable[..., Any], steps: Steps) -> Callable[..., Any]:
    """A method of the engine's client; requests to workers count under their own names."""

    def step(self: HttpEngine, *given: Any) -> Any:
        name = kind_of(type(given[0])) if call in ("ask", "run") else call
        return steps.at(name, lambda: real(self, *given))

    return step


def count_steps(steps: Steps) -> None:
    poll, apply = Subscriber.poll, Subscriber.apply
    for call in ("meet", "ask", "run", "update", "leave"):
        setattr(HttpEngine, call, counted(call, getattr(HttpEngine, call), steps))
    Subscriber.poll = lambda self: steps.at("poll", lambda: poll(self))  # type: ignore[method-assign]
    Subscriber.apply = lambda self, staged: steps.at("mirror", lambda: apply(self, staged))  # type: ignore[method-assign]


if __name__ == "__main__":
    fault, _, argument = sys.argv.pop(1).partition(":")
    if fault == "protocol":
        protocol.PROTOCOL = int(argument)
    else:
        count_steps(Steps(fault, argument))
    main()
