"""A middleware of vLLM's server for tests: notes which version each answer says it is of."""

import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

FILE = "WEIGHTCAST_RECORD"


class Recorded:
    """Writes a line of JSON for every completion to the file that the environment names."""

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self._app = app
        self._file = Path(os.environ[FILE])

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        async def noted(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                version = dict(message["headers"])[b"x-weight-version"].decode()
                with self._file.open("a") as file:
                    print(json.dumps(version), file=file)
            await send(message)

        completion = scope["type"] == "http" and scope["path"] == "/v1/completions"
        await self._app(scope, receive, noted if completion else send)
