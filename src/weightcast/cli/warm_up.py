"""`weightcast warm-up`"""

import time

from weightcast.cli.console import prepare_kernels, say, tell
from weightcast.cli.wording import span


def warm_up() -> None:
    """Compile the kernels now, so that no later command waits for it."""
    began = time.monotonic()
    prepare_kernels()
    seconds = time.monotonic() - began
    tell({"seconds": round(seconds, 3)})
    say(f"kernels are ready, after {span(seconds)}")
