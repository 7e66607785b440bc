"""`--listen`: addresses, and what an agent serves there."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from weightcast.cli.engines import read_token
from weightcast.errors import UsageError

if TYPE_CHECKING:
    from weightcast.engine.endpoint import Watch, WatchedAgent


def address_of(listen: str) -> tuple[str, int]:
    """Host and port; a port alone is on the loopback interface. `UsageError` if it is no address."""
    host, _, port = listen.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{listen!r} is not an address", hint="Write a port, or HOST:PORT.")
    return host.strip("[]") or "127.0.0.1", int(port)


class Listener:
    """An address to serve an agent at. The agent is made after this, and sends its events to ``metrics``."""

    def __init__(self, listen: str, token_file: Path | None):
        """`UsageError` if it is no address. Prometheus' library is imported only here."""
        try:
            from weightcast.engine.endpoint import Endpoint, Watch
            from weightcast.events.metrics import Metrics
        except ModuleNotFoundError as error:
            hint = "Install it: pip install prometheus_client."
            raise UsageError(f"--listen needs {error.name}, which is not installed", hint=hint) from error

        self._host, self._port = address_of(listen)
        self._token = read_token(token_file) if token_file else None
        self._watch, self._endpoint = Watch, Endpoint
        self.metrics = Metrics()

    def serve(self, agent: WatchedAgent, opened: ExitStack) -> Watch:
        """Serve the agent until ``opened`` ends."""
        watch = self._watch(agent, self.metrics)
        opened.enter_context(closing(self._endpoint(watch, self._host, self._port, self._token)))
        return watch
