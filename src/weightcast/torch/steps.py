"""Optimizers inside their wrappers, and calls around their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from weightcast.errors import UsageError


def optimizers_in(given: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """Those that have step hooks: wrappers, such as accelerate's, do not."""
    every = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
    return [_innermost(one) for one in every]


def _innermost(optimizer: object) -> Optimizer:
    if isinstance(optimizer, Optimizer) and hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return optimizer
    inner = getattr(optimizer, "optimizer", None)
    if inner is None:
        hint = "Pass the torch.optim.Optimizer that steps, or detect='device'."
        raise UsageError(f"expected a torch optimizer, got {type(optimizer).__name__}", hint=hint)
    return _innermost(inner)


@contextmanager
def around_steps(
    optimizers: Sequence[Optimizer], began: Callable[[], None], ended: Callable[[], None]
) -> Iterator[list[RemovableHandle]]:
    """Call ``began`` before each step and ``ended`` after it, outside of all hooks that the block registers.

    Yields a list, which gets the handles of these hooks.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(*_: object) -> None:
        began()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(*_: object) -> None:
        ended()

    handles = [one.register_step_pre_hook(before) for one in optimizers]
    yield handles
    handles += [one.register_step_post_hook(after) for one in optimizers]
