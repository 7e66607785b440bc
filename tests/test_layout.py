"""The tests' own order: folders that mirror the packages, files that can be read, and no test that imports another."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import weightcast

TESTS = Path(__file__).parent
SOURCE = Path(weightcast.__file__).parent
BESIDE = {"docs", "faults", "support", "vectors", "vllm", "wordle"}
"""Folders of tests that mirror no package: tests/support/README.md and CONTRIBUTING.md say what they hold."""


def test_every_folder_mirrors_a_package() -> None:
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir()}
    folders = {path.name for path in TESTS.iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders <= packages | BESIDE


def test_no_file_is_over_500_lines() -> None:
    sizes = {path.relative_to(TESTS): len(path.read_text().splitlines()) for path in TESTS.rglob("*.py")}
    assert not {str(path): size for path, size in sizes.items() if size > 500}


def test_no_test_module_imports_another() -> None:
    importing = re.compile(r"^\s*(from|import) (\w+\.)*test_", re.MULTILINE)
    assert [str(path) for path in TESTS.rglob("*.py") if importing.search(path.read_text())] == []


def test_every_helper_is_in_the_readme() -> None:
    described = (TESTS / "support" / "README.md").read_text()
    assert [path.name for path in (TESTS / "support").glob("*.py") if f"`{path.name}`" not in described] == []


TORCHS = {"_parameters", "_version"}
"""Private names that torch's classes have too: tests of models read torch's own."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def privates() -> set[str]:
    """Private attributes and methods of the package's classes."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(value=ast.Name(id="self"), attr=name):
                    found.add(name)
                case ast.ClassDef(body=body):
                    found |= {member.name for member in body if isinstance(member, ast.FunctionDef)}
    return set(filter(is_private, found)) - TORCHS


def test_no_test_uses_a_private_or_patches_a_constant_of_the_package() -> None:
    """Attributes by their names, since types are not known here: a helper's own need names that the package lacks."""
    known, found = privates(), []
    for path in TESTS.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and str(node.module)[:10] == "weightcast"]
        names = {alias.asname or alias.name for node in imports for alias in node.names}
        for node in nodes:
            match node:
                case ast.Attribute(value=ast.Name(id="self" | "cls")):
                    continue
                case ast.Attribute(attr=name) if name in known:
                    pass
                case ast.Attribute(value=ast.Name(id=module), attr=name) if module in names and is_private(name):
                    pass
                case ast.Call(ast.Attribute(attr="setattr"), [ast.Name(id=module), ast.Constant(str(name)), *_]) if (
                    module in names and (name.isupper() or is_private(name))
                ):
                    pass
                case ast.Call(ast.Attribute(attr="setattr"), [ast.Constant(str(path_)), *_]) if path_.startswith(
                    "weightcast."
                ) and re.search(r"\.(_\w+|[A-Z_]+)$", path_):
                    pass
                case _:
                    continue
            found.append(f"{path.relative_to(TESTS)}:{node.lineno}: {ast.unparse(node)}")
        found += [f"{path.relative_to(TESTS)}: {name}" for name in names if is_private(name)]
    assert found == []
