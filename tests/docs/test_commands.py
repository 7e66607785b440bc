"""Commands of all pages, also of those that need a GPU, vLLM or the Hub: verbs and options exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from cli_world import run
from guides import ROOT, Page

from weightcast.cli.verbs import PANELS

PAGES = sorted({*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")} - {ROOT / "docs/SPEC.md"})  # which has no commands
VERBS = {verb for verbs in PANELS.values() for verb in verbs}
COMMAND = re.compile(r"^(?:\$ | *)weightcast ([a-z-]+)\b(.*(?:\\\n.*)*)$", re.MULTILINE)
SCRIPT = re.compile(r"python (?:-m (examples[\w.]+)|(examples[\w./]+\.py))(.*(?:\\\n.*)*)")


@cache
def options_of(verb: str) -> set[str]:
    return set(re.findall(r"--[a-z][\w-]*", run(verb, "--help").out)) | {"--help"}


def options_in(text: str) -> set[str]:
    return set(re.findall(r"(?<=[ \[])--[a-z][\w-]*", re.sub(r"'[^']*'", "", text.partition(" # ")[0])))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_verbs_and_options_that_a_page_names_exist(path: Path) -> None:
    wrong = []
    for verb, rest in COMMAND.findall(Page.of(str(path)).code):
        if verb not in VERBS:
            wrong.append(verb)
        elif unknown := options_in(rest) - options_of(verb):
            wrong.append(f"{verb} {unknown}")
    assert wrong == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_options_of_the_examples_that_a_page_starts_exist(path: Path) -> None:
    for module, file, rest in SCRIPT.findall(Page.of(str(path)).code):
        source = (ROOT / (file or module.replace(".", "/") + ".py")).read_text()
        assert options_in(rest) <= set(re.findall(r'"(--[\w-]+)"', source)), rest
