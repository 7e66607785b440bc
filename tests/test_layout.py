"""The tests' own order: folders that mirror the packages, files that can be read, and no test that imports another."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import weightcast

TESTS = Path(__file__).parent
SOURCE = Path(weightcast.__file__).parent
BESIDE = {"docs", "faults", "support", "vectors", "vllm"}
"""Folders of tests that mirror no package: tests/support/README.md and CONTRIBUTING.md say what they hold."""


def test_every_folder_mirrors_a_package() -> None:
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir()}
    folders = {path.name for path in TESTS.iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders <= packages | BESIDE


def test_no_file_is_over_500_lines() -> None:
    sizes = {path.relative_to(TESTS): len(path.read_text().splitlines()) for path in TESTS.rglob("*.py")}
    assert not {str(path): size for path, size in sizes.items() if size > 500}


def test_no_test_module_imports_another() -> None:
    importing = re.compile(r"^(from|import) (\w+\.)*test_", re.MULTILINE)
    sources = {path: ast.parse(path.read_text()) for path in TESTS.rglob("*.py")}
    found = {path: [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
             for path, tree in sources.items()}  # fmt: skip
    assert [str(path) for path, lines in found.items() if any(map(importing.match, lines))] == []


def test_every_helper_is_in_the_readme() -> None:
    described = (TESTS / "support" / "README.md").read_text()
    assert [path.name for path in (TESTS / "support").glob("*.py") if f"`{path.name}`" not in described] == []
