"""`weightcast warm-up`"""

import time

from weightcast.cli.console import AsJson, say, tell, working
from weightcast.cli.wording import span


def warm_up(as_json: AsJson = False) -> None:
    """Compile the kernels now, so that no later command waits for it."""
    began = time.monotonic()
    with working(1, as_json):
        seconds = time.monotonic() - began
        tell({"seconds": round(seconds, 3)}) if as_json else say(f"kernels are ready, after {span(seconds)}")
