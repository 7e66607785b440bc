"""`weightcast`, but with something wrong: `python dying.py FAULT ARGUMENTS…`

- `tell:FILE` writes the name of every step to a file: calls to the engine, and what the mirror does.
- `before:K`, `during:K` and `after:K` kill the process (SIGKILL) at its K-th step, counted from 0; `during` is while
  the engine works on it.
- `protocol:N` uses another protocol than the engine's plug-in.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from weightcast.cli import main
from weightcast.engine import protocol
from weightcast.engine.client import HttpEngine
from weightcast.follow.subscriber import Subscriber

DURING_SECONDS = 0.05


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def name_of(path: str, body: Mapping[str, Any] | None) -> str:
    """What a call is for: the kind of request to the workers, or the route itself."""
    if path == "/collective_rpc" and body is not None:
        return str(json.loads(body["args"][0])["kind"])
    return path.partition("?")[0]


class Steps:
    """Counts steps; asking again for the same job is not another one."""

    def __init__(self, fault: str, argument: str):
        self._fault, self._argument = fault, argument
        self._count, self._last = -1, ""

    def at(self, name: str, step: Callable[[], Any]) -> Any:
        again, self._last = name == self._last == "read_job", name
        if again:
            return step()
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


def count_steps(steps: Steps) -> None:
    call, poll, apply = HttpEngine.call, Subscriber.poll, Subscriber.apply

    def counted(self: HttpEngine, path: str, body: Any = None, *rest: Any, **options: Any) -> Any:
        return steps.at(name_of(path, body), lambda: call(self, path, body, *rest, **options))

    HttpEngine.call = counted  # type: ignore[method-assign]
    Subscriber.poll = lambda self: steps.at("poll", lambda: poll(self))  # type: ignore[method-assign]
    Subscriber.apply = lambda self, staged: steps.at("mirror", lambda: apply(self, staged))  # type: ignore[method-assign]


if __name__ == "__main__":
    fault, _, argument = sys.argv.pop(1).partition(":")
    if fault == "protocol":
        protocol.PROTOCOL = int(argument)
    else:
        count_steps(Steps(fault, argument))
    main()
