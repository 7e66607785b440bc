"""What the site needs beyond docs/: pages from the repository's root, the help of every verb, and a check that the
site works without a network. And one page that is no Markdown, the interactive explanation.

A link to a file that is no page of the site (source, tests) becomes its path as text. A link to nothing, and a page
that would load a script, a style sheet, a font or an image from elsewhere, fail the build.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from typer.testing import CliRunner

from weightcast.cli import app
from weightcast.cli.verbs import PANELS
from weightcast.view.page import page as page_in_one_file

ROOT = Path(__file__).parents[2]

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "benchmarks/RESULTS.md": "benchmarks/RESULTS.md",
}
"""Files outside docs/ that are pages of the site, and what they are called there."""

COMMAND = "reference/command.md"

EXPLANATION = "docs/site/explain/explain.js", "explain.html"
"""The script of the interactive explanation, and the page that is made of it; a link to the one leads to the other."""

_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc\s*=\s*[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preload|icon|preconnect))[^>]*\bhref\s*=\s*[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|(?:url\(\s*[\"']?|@import\s+[\"'])((?:https?:)?//[^\"')\s]+)",
    re.IGNORECASE,
)


def loads_from_elsewhere(text: str) -> list[str]:
    """Addresses on other hosts that a page or a style sheet makes a browser load; links to follow are none."""
    return [next(filter(None, found)) for found in _LOADED.findall(text)]


def page_of(path: Path) -> str | None:
    """What a file of the repository is called in the site; None if it is no page or image of it."""
    name = path.relative_to(ROOT).as_posix()
    if name in PAGES:
        return PAGES[name]
    if name == EXPLANATION[0]:
        return EXPLANATION[1]
    return name.removeprefix("docs/") if name.startswith("docs/") and name.endswith((".md", ".svg", ".png")) else None


def relinked(text: str, source: Path, page: str) -> str:
    """Markdown of ``source`` with links that lead where the files are in the site, seen from ``page``."""

    def link(found: re.Match[str]) -> str:
        label, target, anchor = found[1], found[2], found[3] or ""
        if ":" in target:
            return found[0]
        path = (source.parent / target).resolve()
        if not path.exists() or ROOT not in path.parents:
            raise PluginError(f"{source.relative_to(ROOT)} links to {target}, which does not exist")
        there = page_of(path)
        if there is None:
            return label if label.startswith("`") else f"{label} (`{path.relative_to(ROOT).as_posix()}`)"
        return f"[{label}]({os.path.relpath(there, Path(page).parent)}{anchor})"

    return _LINK.sub(link, text)


def command_page() -> str:
    """The help of every verb, as the command prints it."""
    text = ["# The command line", "`weightcast VERB --help` prints the same."]
    for panel, verbs in PANELS.items():
        text.append(f"## {panel}")
        for verb in verbs:
            printed = CliRunner(env={"COLUMNS": "90", "TERM": "dumb"}).invoke(
                app, [verb, "--help"], prog_name="weightcast"
            )
            if printed.exit_code:
                raise PluginError(f"weightcast {verb} --help failed: {printed.output}")
            text.append(f"### {verb}\n\n```text\n{printed.output.strip()}\n```")
    return "\n\n".join(text)


def explanation() -> str:
    """The interactive explanation, in one file."""
    here = Path(__file__).parent / "explain"
    scripts = [str(here / name) for name in ("weights.js", "explain.js")]
    figures = json.loads((here / "figures.json").read_text())
    return page_in_one_file(
        "Why so few weights change", scripts=scripts, styles=[str(here / "explain.css")], data={"figures": figures}
    ).html


def on_files(files: Files, config: Any, **_: Any) -> Files:
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    files.append(File.generated(config, COMMAND, content=command_page()))
    files.append(File.generated(config, EXPLANATION[1], content=explanation()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    name = page.file.src_uri
    if name == COMMAND:
        return markdown
    source = next((ROOT / at for at, there in PAGES.items() if there == name), ROOT / "docs" / name)
    return relinked(markdown, source, name)


def on_post_build(config: Any, **_: Any) -> None:
    for path in Path(config["site_dir"]).rglob("*"):
        if path.suffix in (".html", ".css"):
            text = path.read_text()
            if elsewhere := loads_from_elsewhere(text):
                raise PluginError(f"{path.name} loads {elsewhere[0]}: the site must work without a network")
            if 'class="mermaid"' in text:
                raise PluginError(f"{path.name} has a mermaid drawing, whose script comes from another host")
