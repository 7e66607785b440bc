"""Numba compilation: cached on disk if a folder is writable, and never silent.

Compiling all kernels takes about 40 seconds, once per machine. `warm_up` does it when the caller chooses. A kernel
that is compiled in the middle of other work announces it with a `CompileWarning`.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from numba import njit
from numba.core import event


class CompileWarning(RuntimeWarning):
    """A kernel is being compiled inside another call: call `weightcast.warm_up()` first to avoid it."""


_F = TypeVar("_F", bound=Callable[..., Any])
_kernels: set[Any] = set()
_announced = False

# Numba's cache checks only a function's own file, but kernels call kernels of other files.
_SOURCES = hashlib.sha256(b"".join(f.read_bytes() for f in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()[:12]


def kernel(function: _F) -> _F:
    """Compile ``function`` at first use, without the interpreter lock; cached on disk if possible."""
    function.__qualname__ += f"_{_SOURCES}"
    try:
        compiled = njit(function, nogil=True, cache=True, error_model="numpy")
    except RuntimeError:  # no folder is writable for the cache
        compiled = njit(function, nogil=True, error_model="numpy")
    _kernels.add(compiled)
    return compiled  # type: ignore[no-any-return]


class _Announce(event.Listener):
    def on_start(self, started: Any) -> None:
        global _announced
        if not _announced and started.data["dispatcher"] in _kernels:
            _announced = True
            warnings.warn(
                "compiling weightcast's kernels inside a call (seconds, once per machine); "
                "weightcast.warm_up() does it beforehand",
                CompileWarning,
                stacklevel=2,
            )

    def on_end(self, ended: Any) -> None:
        pass


event.register("numba:compile", _Announce())


@contextmanager
def expecting_compilation() -> Iterator[None]:
    """Do not announce kernels that are compiled in here: the caller asked for it."""
    global _announced
    before, _announced = _announced, True
    try:
        yield
    finally:
        _announced = before
