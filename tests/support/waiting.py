"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(is_so: Callable[[], object], patience: float = 120.0) -> None:
    """Return once it is so; the patience bounds a test that fails, and decides nothing else."""
    deadline = time.monotonic() + patience
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so after {patience:g} s")
        time.sleep(0.001)
