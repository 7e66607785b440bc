"""Numba compilation: cached on disk where a folder can be written, and never silent.

Compiling all kernels takes some ten seconds, once per machine. `warm_up` does it at a moment of the caller's choosing;
a kernel that has to be compiled in the middle of other work says so first, as a `CompileWarning`.
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
    """A kernel is being compiled inside a call that did not expect it: call `weightcast.warm_up()` first."""


_F = TypeVar("_F", bound=Callable[..., Any])
_kernels: set[Any] = set()
_announced = False

# Numba's cache looks only at a function's own file; kernels call kernels of other files.
_SOURCES = hashlib.sha256(b"".join(f.read_bytes() for f in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()[:12]


def kernel(function: _F) -> _F:
    """Compile ``function`` at first use, without the interpreter lock, cached on disk if that is possible."""
    function.__qualname__ += f"_{_SOURCES}"
    try:
        compiled = njit(function, nogil=True, cache=True, error_model="numpy")
    except RuntimeError:  # no folder for the cache can be written
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
    """Kernels compiled in here were asked for and are not announced."""
    global _announced
    before, _announced = _announced, True
    try:
        yield
    finally:
        _announced = before
