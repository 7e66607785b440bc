"""The time that optimizers' steps take: a version's trace begins with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from weightcast.events.phases import Span
from weightcast.store.backoff import CLOCK, Clock

if TYPE_CHECKING:
    import torch


class Stepping:
    """Adds up the steps since the last scan, with what detectors do in their hooks."""

    def __init__(self, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], clock: Clock = CLOCK):
        self._optimizers, self._clock = optimizers, clock
        self._first: float | None = None
        """When the first of the steps began, in seconds since 1970."""
        self._seconds = 0.0
        self._since: float | None = None
        self._handles: Sequence[Any] = ()

    @contextmanager
    def around_hooks(self) -> Iterator[None]:
        """Time steps from now on, outside of all hooks that the block registers."""
        from weightcast.torch.steps import around_steps, optimizers_in

        with around_steps(optimizers_in(self._optimizers), self._began, self._ended) as handles:
            self._handles = handles
            yield

    def _began(self) -> None:
        self._since = self._clock.now()  # a step that raised is not counted
        if self._first is None:
            self._first = self._clock.wall()

    def _ended(self) -> None:
        if self._since is not None:
            self._seconds += self._clock.now() - self._since
            self._since = None

    def take(self) -> tuple[Span, ...]:
        """The steps since this was last called, as one phase."""
        if self._first is None:
            return ()
        span = Span("step", self._first, self._seconds)
        self._first, self._seconds = None, 0.0
        return (span,)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
