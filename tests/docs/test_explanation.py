"""The interactive explanation in a real Chromium: it computes what it shows, as the library does, and asks nobody."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from chromium import PHONE, WIDE, Browser, Tab, violations

import weightcast as wc

ROOT = Path(__file__).parents[2]
RESULTS = (ROOT / "benchmarks/RESULTS.md").read_text()
FIGURES = json.loads((ROOT / "docs/site/explain/figures.json").read_text())


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page as the site has it."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/site/hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    written = tmp_path_factory.mktemp("site") / "explain.html"
    written.write_text(hooks.explanation())
    return written.as_uri()


@pytest.fixture
def tab(address: str, browser: Browser) -> Iterator[Tab]:
    """The page, in which nothing may go wrong and which may ask for nothing but itself."""
    with browser.tab(address) as tab:
        tab.until("document.querySelectorAll('#phases svg rect').length > 6")
        yield tab
        assert tab.problems == []
        assert set(tab.requests) <= {address, "data:,"}


def text_of(tab: Tab, selector: str) -> str:
    """What is shown, without the blanks at which no line breaks."""
    return tab.text(selector).replace("\u00a0", " ")


def computed(tab: Tab, function: str, values: np.ndarray) -> np.ndarray:
    """What a function of the page gives for each value."""
    return np.array(tab.page.evaluate(f"(all) => all.map({function})", values.tolist()), np.float64)


# -- it computes as the library does -----------------------------------------------------------------------------------


def test_rounding_is_the_librarys_own(tab: Tab) -> None:
    rng = np.random.default_rng(3)
    halves = rng.integers(0, 1 << 16, 4000, np.uint32) << 16
    near_ties = (halves[:, None] + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).ravel()
    denormal = rng.integers(0, 1 << 23, 2000, np.uint32) | rng.choice([0, 1 << 31], 2000).astype(np.uint32)
    special = [0, 1 << 31, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00000, 0x7FFFFFFF]
    anything = rng.integers(0, 1 << 32, 6000, np.uint32)
    bits = np.concatenate([near_ties, denormal, np.array(special, np.uint32), anything])
    expected = wc.round_to("BF16", bits.view(np.float32))
    assert np.array_equal(computed(tab, "weights.rounded", bits), expected)
    numbers = ~np.isnan(bits.view(np.float32))
    with np.errstate(over="ignore"):
        assert np.array_equal(
            expected[numbers], bits.view(np.float32)[numbers].astype(ml_dtypes.bfloat16).view(np.uint16)
        )


def test_values_and_steps_are_those_of_bfloat16(tab: Tab) -> None:
    bits = np.arange(0x7F7F, dtype=np.uint16)  # all that are positive, but the last
    values, following = (some.view(ml_dtypes.bfloat16).astype(np.float64) for some in (bits, bits + np.uint16(1)))
    assert np.array_equal(computed(tab, "weights.valueOf", bits), values)
    assert np.array_equal(computed(tab, "weights.ulp", values), following - values)


@pytest.mark.parametrize("masters", [True, False])
def test_population_is_published_as_it_is_rounded(tab: Tab, masters: bool) -> None:
    """Ten steps: what the page counts as flips are the differences of the bits, and those are the rounded weights."""
    states = tab.page.evaluate(
        """(masters) => {
          const crowd = weights.population(3000, 5, {masters}), all = [];
          for (let i = 0; i < 10; i += 1) {
            const before = Array.from(crowd.half), flips = crowd.step(1e-4);
            all.push({before, flips, half: Array.from(crowd.half), weight: Array.from(crowd.weight)});
          }
          return all;
        }""",
        masters,
    )
    for state in states:
        weight, half = np.array(state["weight"], np.float32), np.array(state["half"], np.uint16)
        assert np.array_equal(wc.round_to("BF16", weight), half)
        assert state["flips"] == np.count_nonzero(half != np.array(state["before"], np.uint16))
        on_grid = np.count_nonzero(weight == half.view(ml_dtypes.bfloat16).astype(np.float32))
        assert (on_grid == weight.size) is not masters
    assert sum(state["flips"] for state in states) > 0


def test_same_seed_gives_the_same_training(tab: Tab) -> None:
    once, again, other = (
        tab.page.evaluate(f"weights.measured(1e-5, {{size: 500, seed: {seed}}}).flips") for seed in (1, 1, 2)
    )
    assert once == again != other


# -- what people move --------------------------------------------------------------------------------------------------


def shares(tab: Tab) -> list[float]:
    """Flipped in a step, with and without masters, as the page shows it."""
    shown = tab.page.locator("#crowd .tile dd:not(.under)").all_inner_texts()
    return [float(text.removesuffix("\u00a0%")) for text in shown[:2]]


def test_learning_rate_changes_what_is_computed(tab: Tab) -> None:
    before, walk = shares(tab), text_of(tab, "#grid .found")
    slider = tab.page.locator("#rate-2")
    slider.focus()
    for _ in range(20):
        slider.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext") == "10⁻⁴"
    assert tab.page.locator("#rate-1").get_attribute("aria-valuetext") == "10⁻⁴", "one learning rate for all cards"
    raised = shares(tab)
    assert all(now > then for now, then in zip(raised, before, strict=True))
    assert text_of(tab, "#grid .found") != walk
    measured = tab.page.evaluate("weights.measured(1e-4).share")
    assert raised[0] == pytest.approx(100 * measured, abs=0.5)
    slider.press("Home")
    assert shares(tab)[1] == 0
    assert "none of the weights" in text_of(tab, "#crowd")


def test_without_masters_small_steps_are_lost(tab: Tab) -> None:
    assert "flipped 3 times" in text_of(tab, "#grid .found")
    tab.page.locator("#grid input[value=masters]").focus()
    tab.page.keyboard.press("ArrowRight")
    assert tab.page.locator("#grid input[value=direct]").is_checked()
    said = text_of(tab, "#grid .found")
    assert "flipped 0 times" in said
    assert "forgotten" in said
    assert "4.45" in text_of(tab, "#delta table")


def test_delta_is_the_share_of_the_chosen_model(tab: Tab) -> None:
    tab.page.locator("#model").select_option(label="1 T parameters")
    assert "A full copy is 2 TB" in text_of(tab, "#delta")
    share = tab.page.evaluate("weights.measured(1e-6).share")
    row = tab.page.locator("#delta tr", has_text="banded").inner_text()
    found = re.search(r"([\d.]+)\sGB", row)
    assert found is not None
    assert float(found[1]) == pytest.approx(1e12 * share * FIGURES["codecs"]["masters"]["banded"] / 8 / 1e9, rel=0.01)


def test_timeline_says_where_a_broadcast_is_better(tab: Tab) -> None:
    slow, fast = "Live after 173 ms instead of 954 ms", "broadcast is there sooner"
    assert slow in text_of(tab, "#phases")
    assert fast not in text_of(tab, "#phases")
    tab.page.locator("#link").select_option(label="a fabric, 400 GB/s")
    assert fast in text_of(tab, "#phases")


# -- for everybody -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "dark"), [(WIDE, False), (WIDE, True), (PHONE, False), (PHONE, True)])
def test_page_is_accessible_and_fits(address: str, browser: Browser, size: tuple[int, int], dark: bool) -> None:
    with browser.tab(address, size=size, dark=dark) as tab:
        tab.until("document.querySelectorAll('#phases svg rect').length > 6")
        assert violations(tab) == []
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert tab.problems == []


def numbers_of(value: Any) -> Iterator[float]:
    for inner in value.values() if isinstance(value, dict) else ():
        yield from numbers_of(inner)
    if isinstance(value, (int, float)):
        yield value


@pytest.mark.parametrize("part", ["phases", "codecs"])
def test_every_recorded_figure_is_in_the_results(part: str) -> None:
    section = re.search(rf"^## {FIGURES[part]['section']}\n(.*?)(?=^## )", RESULTS, re.MULTILINE | re.DOTALL)
    assert section is not None
    for number in numbers_of(FIGURES[part]):
        written = {f"{number:,}", f"{number:.2f}", f"{number:g}"}
        assert any(re.search(rf"(?<![\d.,]){re.escape(text)}(?![\d,])", section[1]) for text in written), number
