"""A plug-in of vLLM for tests: updates that take their time, and a way to flip a bit of a live parameter."""

import os
import time
from pathlib import Path
from typing import Any

SLOW = "WEIGHTCAST_TEST_SLOW"
"""Names a file: while it is there, a worker sleeps for as many seconds as it says behind every write."""


def slow_down() -> None:
    """Every process of vLLM calls this."""
    if SLOW not in os.environ:
        return
    from weightcast.torch.live import LiveParameters, Scatter

    switch = Path(os.environ[SLOW])

    def slowly(write: Any) -> Any:
        def written(*args: Any) -> None:
            write(*args)
            if switch.exists():
                Path(f"{switch}.begun").touch()
                time.sleep(float(switch.read_text()))

        return written

    if not hasattr(LiveParameters, "is_slow"):
        LiveParameters.is_slow = True
        Scatter.apply, LiveParameters.write = slowly(Scatter.apply), slowly(LiveParameters.write)


class Flipping:
    """What `--worker-extension-cls faults.Flipping` adds to a worker."""

    def flip(self, name: str, index: int, bit: int) -> None:
        """Flip a bit of an element of a parameter of 16 bits, which is counted as it lies in memory."""
        import torch

        words = self.model_runner.model.get_parameter(name).data.view(torch.int16).view(-1)
        words[index] ^= 1 << bit
