"""A plug-in of vLLM for tests: updates that take their time, and a way to flip a bit of a live parameter."""

import importlib.util
import os
import sys
import time
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

SLOW = "WEIGHTCAST_TEST_SLOW"
"""Names a file: while it is there, a worker sleeps for as many seconds as it says after every write."""


LOADED = "WEIGHTCAST_TEST_LOADED"
"""Names a file: it is made once vLLM has loaded its weights, before the plug-in looks at them."""


def slow_down() -> None:
    """Every process of vLLM calls this. What is to be slow is not imported here: vLLM on a CPU stumbles over numba."""
    if {SLOW, LOADED} & os.environ.keys() and not any(isinstance(one, _WhenImported) for one in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported(MetaPathFinder):
    """Acts as soon as somebody imports the module that vLLM's workers write with."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "weightcast.engine.live" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        if LOADED in os.environ:
            Path(os.environ[LOADED]).touch()
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            if SLOW in os.environ:
                _slow_down(module.LiveParameters)

        spec.loader.exec_module = exec_module
        return spec


def _slow_down(live: Any) -> None:
    from weightcast.engine.prepared import Scatter, Whole

    switch = Path(os.environ[SLOW])

    def slowly(write: Any) -> Any:
        def written(*args: Any) -> None:
            write(*args)
            if switch.exists():
                Path(f"{switch}.begun").touch()
                time.sleep(float(switch.read_text()))

        return written

    live.write = slowly(live.write)
    for one in (Scatter, Whole):
        one.apply = slowly(one.apply)


class Flipping:
    """What `--worker-extension-cls faults.Flipping` adds to a worker."""

    def flip(self, name: str, index: int, bit: int) -> None:
        """Flip a bit of an element of a parameter of 16 bits, which is counted as it lies in memory."""
        import torch

        words = self.model_runner.model.get_parameter(name).data.view(torch.int16).view(-1)
        words[index] ^= 1 << bit
