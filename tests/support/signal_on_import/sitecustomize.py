"""First on PYTHONPATH of a child process: it signals itself as soon as it has imported the module `$SIGNAL_MOMENT`."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class SignalOnImport:
    """Finds one module, once; another process could only guess when the import ends."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != os.environ["SIGNAL_MOMENT"]:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_signal(module: ModuleType) -> None:
            execute(module)
            os.kill(os.getpid(), int(os.environ["SIGNAL_NUMBER"]))

        spec.loader.exec_module = execute_and_signal  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, SignalOnImport())
