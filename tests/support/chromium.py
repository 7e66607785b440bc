"""Pages in a real Chromium: the one that is installed, or else Debian's, unpacked and never installed.

`make test` needs no display and no network for it, after packages were fetched once. Playwright drives it.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from debian import CACHE, UnavailableError, run, unpacked
from playwright.sync_api import Browser as Playwright
from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import Page, sync_playwright

AXE = "axe-core@4.10.3"
"""What checks pages for contrast, labels and structure, from the npm registry."""

_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
PATIENCE = 30.0
WIDE, PHONE = (1360, 900), (360, 740)


@dataclass
class Tab:
    """A page, and what went wrong in it."""

    page: Page
    problems: list[str] = field(default_factory=list)
    """What the console said, errors that nobody caught, requests that failed and dialogs."""
    requests: list[str] = field(default_factory=list)
    """Addresses that were asked for."""

    def text(self, selector: str = "body") -> str:
        return self.page.locator(selector).inner_text()

    def until(self, condition: str) -> None:
        """Wait until an expression of JavaScript is true; the patience bounds a test that fails."""
        deadline = time.monotonic() + PATIENCE
        # Not `wait_for_function`: it evaluates the expression inside the page, whose policy forbids that.
        while not self.page.evaluate(condition):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not so after {PATIENCE:g} s: {condition}; {self.problems}")
            self.page.wait_for_timeout(20)


class Browser:
    """Opens tabs, each in a profile of its own."""

    def __init__(self, driven: Playwright):
        self._driven = driven
        self.version = driven.version

    @contextmanager
    def tab(self, url: str, *, size: tuple[int, int] = WIDE, dark: bool = False) -> Iterator[Tab]:
        width, height = size
        with self._driven.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        ) as context:
            page = context.new_page()
            tab = Tab(page)
            page.on("console", lambda said: tab.problems.append(f"{said.type}: {said.text}"))
            page.on("pageerror", lambda error: tab.problems.append(f"not caught: {error}"))
            page.on("requestfailed", lambda asked: tab.problems.append(f"failed: {asked.url}"))
            page.on("dialog", lambda shown: (tab.problems.append(f"dialog: {shown.message}"), shown.dismiss()))
            page.on("request", lambda asked: tab.requests.append(asked.url))
            page.goto(url)
            yield tab


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser for as long as the context lasts; `UnavailableError` if there can be none."""
    _axe()  # what a test cannot be without is found missing before it begins
    program, environment = _chromium()
    with sync_playwright() as playwright:
        try:
            driven = playwright.chromium.launch(executable_path=program, args=_FLAGS, env=environment)
        except PlaywrightError as error:
            raise UnavailableError(str(error)[:2000]) from error
        try:
            yield Browser(driven)
        finally:
            driven.close()


def _chromium() -> tuple[str, dict[str, str | float | bool]]:
    """The program, and its environment."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found:
            return found, dict(os.environ)
    # A page without any font has no text that could be measured.
    files = unpacked("chromium", ["chromium", "fontconfig-config", "fonts-dejavu-core"])
    environment = {**os.environ, "LD_LIBRARY_PATH": files.library_path}
    if not Path("/etc/fonts/fonts.conf").exists():
        environment["FONTCONFIG_FILE"] = str(_fonts(files.root))
    return str(files.root / "usr/lib/chromium/chromium"), environment


def _fonts(root: Path) -> Path:
    """A configuration for the fonts among the packages."""
    written = root.parent / "fonts.conf"
    fonts, cache = root / "usr/share/fonts", root.parent / "fontconfig"
    written.write_text(f"<fontconfig><dir>{fonts}</dir><cachedir>{cache}</cachedir></fontconfig>\n")
    return written


# -- axe-core ----------------------------------------------------------------------------------------------------------


def violations(tab: Tab) -> list[str]:
    """What axe-core finds against WCAG 2.2, levels A and AA, and its best practices: rule, element and reason."""
    # Into the page's world from outside: its policy holds for its own scripts alone.
    tab.page.evaluate(_axe())
    found = tab.page.evaluate("async () => (await axe.run(document)).violations")
    return [
        f"{rule['id']}: {json.dumps(node['target'])} {node['failureSummary']}"
        for rule in found
        for node in rule["nodes"]
    ]


def _axe() -> str:
    """The source of axe-core; fetched on the first call."""
    folder = CACHE / "axe"
    source = folder / f"{AXE}.js"
    if not source.exists():
        if not shutil.which("npm"):
            raise UnavailableError(f"{AXE} is fetched with npm, which is not here: install it, or Node.js")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as made:
            run("npm", "pack", AXE, "--silent", folder=Path(made))
            (packed,) = Path(made).glob("*.tgz")
            with tarfile.open(packed) as archive:
                script = archive.extractfile("package/axe.min.js")
                assert script is not None
                (Path(made) / "axe.js").write_bytes(script.read())
            (Path(made) / "axe.js").replace(source)
    return source.read_text()
