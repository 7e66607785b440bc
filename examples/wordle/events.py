"""What boxes report: a JSON object a line on standard output, for people, log collectors and the demo's view."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

_one_line_at_a_time = threading.Lock()


def report(event: str, **fields: Any) -> None:
    line = json.dumps({"time": round(time.time(), 6), "event": event, **fields})
    with _one_line_at_a_time:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
