"""Engines as they are named on the command line."""

from __future__ import annotations

import socket
from pathlib import Path

from weightcast.engine.address import START, engines_here
from weightcast.engine.client import HttpEngine
from weightcast.errors import UsageError

_SHORTEST_TOKEN, _LONGEST_SECRET = 16, 4096


def engine_named(engine: str | None, token: Path | None = None, mirror: Path | None = None) -> HttpEngine:
    """The engine at an address, or the only one of this host.

    An agent is known by its ``mirror``, which no two processes keep at the same time.
    """
    identity = f"{socket.gethostname()}:{mirror.resolve()}" if mirror else None
    if engine is not None:
        return HttpEngine(engine, read_token(token) if token else None, identity)
    here = engines_here()
    if not here:
        hint = f"Start it with `{START}`, or name it with --engine."
        raise UsageError("no engine of this host can be controlled", hint=hint)
    if len(here) > 1:
        raise UsageError(f"this host has {len(here)} engines: {', '.join(here)}", hint="Name one with --engine.")
    return HttpEngine(here[0], None, identity)


def read_token(file: Path) -> str:
    """A token that others must not guess."""
    token = read_secret(file)
    if len(token) < _SHORTEST_TOKEN:
        raise UsageError("the token is too short", file=str(file), hint=f"{_SHORTEST_TOKEN} characters at least.")
    return token


def read_secret(file: Path) -> str:
    """A token or a key that a file holds."""
    try:
        with file.open() as opened:
            return opened.read(_LONGEST_SECRET).strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the token: {error}", file=str(file)) from error
