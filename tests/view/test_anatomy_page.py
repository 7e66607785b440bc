"""The page of `analyze` in a real Chromium."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from anatomies import MASTERS, publish
from anatomy import recorded
from chromium import PHONE, WIDE, Browser, violations
from cli_world import run

import weightcast as wc

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "layers.0.w\x1b]0;x\x07\u202eevil\u200b",
)
DRAWN = "document.querySelectorAll('figure svg path').length > 20"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a recorded training."""
    home = tmp_path_factory.mktemp("anatomy")
    publish(home / "channel", recorded(MASTERS))
    assert run("analyze", home / "channel", "-o", home / "page.html").code == 0
    return home / "page.html"


def test_page_shows_what_was_found_and_asks_nobody(page: Path, browser: Browser) -> None:
    with browser.tab(page.as_uri()) as tab:
        tab.until(DRAWN)
        shown = tab.text().replace("\u00a0", " ")
        for text in ("1.3 %", "one of 75 elements", "15.2 kB", "1 : 173", "versions 0 to 6", "5.3 · 10⁻⁷", "4.5 %"):
            assert text in shown
        assert "masters of higher precision" in shown
        assert "every 16, 128" in shown
        assert set(tab.requests) <= {page.as_uri(), "data:,"}
        assert tab.problems == []


def test_values_of_a_plot_can_be_read_with_keys_and_as_a_table(page: Path, browser: Browser) -> None:
    with browser.tab(page.as_uri()) as tab:
        tab.until(DRAWN)
        card = tab.page.locator("section", has_text="Flips by exponent").first
        card.locator(".plot").focus()
        tab.page.keyboard.press("End")
        assert "predicted: masters" in card.locator("[role=status]").inner_text()
        card.locator("summary").click()
        card.locator("tbody tr").nth(10).wait_for()
        assert tab.problems == []


@pytest.mark.parametrize(("size", "dark"), [(WIDE, False), (WIDE, True), (PHONE, False)])
def test_page_is_accessible_and_fits(page: Path, browser: Browser, size: tuple[int, int], dark: bool) -> None:
    with browser.tab(page.as_uri(), size=size, dark=dark) as tab:
        tab.until(DRAWN)
        assert violations(tab) == []
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert tab.problems == []


def mixed(seed: int) -> wc.Arrays:
    """Weights of several dtypes under hostile names."""
    rng = np.random.default_rng(seed)
    arrays = {name: rng.standard_normal(512).astype(np.float32) for name in HOSTILE}
    return wc.Arrays({**arrays, "half": rng.standard_normal(64).astype(np.float16), "int": rng.integers(0, 9, 32)})


def test_hostile_names_are_text_and_every_dtype_can_be_chosen(tmp_path: Path, browser: Browser) -> None:
    url = tmp_path / "<b>channel"
    publish(url, [mixed(0), mixed(1)])
    written = tmp_path / "page.html"
    assert run("analyze", url, "-o", written).code == 0
    with browser.tab(written.as_uri()) as tab:
        tab.until("document.querySelectorAll('figure svg path').length > 5")
        assert "<b>channel" in tab.text("#top")
        tab.page.locator("section[aria-label=Tensors] summary").click()
        listed = tab.text("section[aria-label=Tensors]")
        assert all(name in listed for name in HOSTILE[:2])
        assert r"\u{1b}]0;x\u{7}\u{202e}evil\u{200b}" in listed
        choice = tab.page.locator("[role=radiogroup] input[value=F16]")
        choice.check(force=True)
        assert choice.is_checked()
        assert tab.page.locator("script:not([type])").count() == 1
        assert violations(tab) == []
        assert tab.problems == []


def test_page_of_integers_and_of_nothing_changed_is_drawn(tmp_path: Path, browser: Browser) -> None:
    publish(tmp_path / "ints", [wc.Arrays({"w": np.full(64, value, np.int32)}) for value in (0, 1)])
    same = MASTERS / "anchor.safetensors"
    for arguments, said in (
        ((tmp_path / "ints",), "No tensor is one of floats"),
        ((same, same), "Nothing of BF16 flipped"),
    ):
        written = tmp_path / "page.html"
        assert run("analyze", *arguments, "-o", written, "--force").code == 0
        with browser.tab(written.as_uri()) as tab:
            tab.until("document.querySelectorAll('section').length > 2")
            assert said in tab.text()
            assert tab.problems == []
