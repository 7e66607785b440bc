"""The public names, the order of the modules, and what an import costs."""

from __future__ import annotations

import ast
import doctest
import inspect
import json
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import weightcast as wc

SOURCE = Path(wc.__file__).parent

PACKAGES = [
    "errors",
    "format",
    "torch",
    "disk",
    "store",
    "events",
    "channel",
    "follow",
    "publish",
    "interop",
    "engine",
    "integrations",
    "upkeep",
    "analysis",
    "view",
    "estimate",
    "cli",
]
"""docs/ARCHITECTURE.md draws it: a package imports only what stands above it."""

OUTSIDE = {"__init__", "__main__", "_startup"}


def imports_of(path: Path) -> set[str]:
    """The packages of weightcast that a module imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "weightcast":
            inner = node.module.split(".")[1:2]
            found |= set(inner or (alias.name for alias in node.names))
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("weightcast.")}
    return found


def test_package_imports_only_those_above_it() -> None:
    assert {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()} - {"__pycache__"} == {
        *PACKAGES,
        *OUTSIDE,
    }
    for i, package in enumerate(PACKAGES):
        for path in [SOURCE / f"{package}.py", *(SOURCE / package).rglob("*.py")]:
            if path.exists():
                below = imports_of(path) & set(PACKAGES[i + 1 :])
                assert not below, f"{path.relative_to(SOURCE)} imports {below}"


def test_public_names_are_these() -> None:
    aliases = {"CodecChoice", "CodecName", "Detect"}
    assert all(getattr(wc, name).__doc__ for name in set(wc.__all__) - aliases)
    assert set(wc.__all__) == for_type_checkers() | {"WeightcastError", "errors"}
    assert set(wc.__all__) <= set(dir(wc))
    with pytest.raises(AttributeError, match="no attribute 'Publsher'"):
        wc.Publsher  # noqa: B018


def for_type_checkers() -> set[str]:
    """The names that the package imports where only a type checker looks."""
    (block,) = (node for node in ast.parse(Path(wc.__file__).read_text()).body if isinstance(node, ast.If))
    return {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_example_in_the_docstring_runs() -> None:
    result = doctest.testmod(wc)
    assert result.attempted > 5
    assert result.failed == 0


EXAMPLES = (
    "Arrays",
    "Checkpoint",
    "JsonLines",
    "Patch",
    "Publisher",
    "StreamPublisher",
    "Subscriber",
    "decode",
    "diff",
    "encode",
    "init",
    "open_store",
)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_the_main_names_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "StreamPublisher":
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    known = {"wc": wc, "np": np, "json": json, "Path": Path}
    found = [test for test in doctest.DocTestFinder().find(getattr(wc, name), name, globs=known) if test.examples]
    assert found
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in found:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


INTERNAL = {"Subscriber.chain", "Subscriber.mirror", "Staged", "Staged.__init__", "Trust.root"}
"""What is internal of public classes: a `Staged` goes from `poll` to `apply`, and nobody else makes or reads one."""


def test_every_type_in_a_public_signature_is_public() -> None:
    public = [getattr(wc, name) for name in wc.__all__] + [getattr(wc.errors, name) for name in wc.errors.__all__]
    hidden = [
        f"{where}({parameter}: {kind.__name__})"
        for name in wc.__all__
        for where, function in functions_of(name)
        if where not in INTERNAL
        for parameter, hint in hints_of(function).items()
        for kind in types_in(hint)
        if kind.__module__.startswith("weightcast") and kind not in public
    ]
    assert not hidden


def functions_of(name: str) -> Iterator[tuple[str, Any]]:
    """A public function, or a class and its public methods and properties."""
    value = getattr(wc, name)
    if inspect.isfunction(value) or inspect.isclass(value):
        yield name, value
    if not inspect.isclass(value):
        return
    for member, found in vars(value).items():
        function = getattr(found, "fget", None) or getattr(found, "func", None) or getattr(found, "__func__", found)
        if inspect.isfunction(function) and (member == "__init__" or not member.startswith("_")):
            yield f"{name}.{member}", function


def hints_of(function: Any) -> dict[str, Any]:
    found = typing.get_type_hints(
        function,
        localns={
            "np": np,
            "torch": SimpleNamespace(nn=Anything, optim=Anything, distributed=Anything, dtype=object, Tensor=object),
        },
    )
    return {name: hint for name, hint in found.items() if not name.startswith("_")}


class Anything:
    Module = Optimizer = ProcessGroup = object


def types_in(hint: Any) -> Iterator[type]:
    if isinstance(hint, type):
        yield hint
    for inner in typing.get_args(hint):
        yield from types_in(inner)


def test_core_imports_neither_torch_nor_any_extra() -> None:
    code = "import sys, weightcast as wc; [getattr(wc, name) for name in wc.__all__]; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    extras = {"torch", "zstandard", "obstore", "cryptography", "safetensors", "huggingface_hub"}
    assert not (extras | {"typer", "rich"}) & set(loaded)
    assert "numba" in loaded


def test_typed() -> None:
    assert (SOURCE / "py.typed").exists()
