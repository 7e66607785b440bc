"""Pausing an engine, and knowing whose pause it is: an agent resumes only what it, or an agent before it, paused."""

from __future__ import annotations

import logging

from weightcast.engine.client import Engine
from weightcast.engine.messages import SetPausedByAgent
from weightcast.engine.state import EngineState, read_state
from weightcast.errors import EngineError
from weightcast.format.spec import TensorTable

_log = logging.getLogger("weightcast")


class Pause:
    """The pause of one engine. ``ours``: an agent paused it, this one or one before it."""

    def __init__(self, engine: Engine, clear_cache: bool):
        self._engine, self._clear_cache = engine, clear_cache
        self.ours = False

    def begin(self) -> None:
        if not self.ours and not self._engine.is_paused():
            self.ours = True  # before the pause: an interruption between the two must not leave the engine paused
            self._engine.ask(SetPausedByAgent(True))
        self._engine.pause(self._clear_cache)  # also if it is paused already: this clears the cache

    def end(self) -> None:
        """Resume the engine, unless another client paused it."""
        if self.ours:
            self._engine.resume()
            self._engine.ask(SetPausedByAgent(False))
            self.ours = False

    def end_leftover(self, state: EngineState, check_first: bool) -> None:
        """End the pause of an agent that was killed, if the engine's weights are whole.

        With ``check_first`` an engine at no known version stays paused until it has been digested.
        """
        if not self.ours or state.changing:
            return
        if state.position is not None:
            self._engine.name_version(str(state.position.version))
            self.end()
        elif not check_first:
            self.end()

    def leave(self, table: TensorTable) -> None:
        """Resume the engine before the agent ends, unless its weights are a mix of versions."""
        if not self.ours:
            return
        url = self._engine.url
        remedy = "Start the agent again, which brings it to a version and resumes it, or restart the engine."
        try:
            state = read_state(self._engine, table)
            if state.changing:
                _log.warning("%s stays paused: an update broke off, and its weights are mixed. %s", url, remedy)
                return
            self.end_leftover(state, check_first=False)
        except EngineError as error:
            _log.warning("%s may be left paused: %s. %s", url, error.problem, remedy)
