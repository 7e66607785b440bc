"""The dashboard and the report in a real Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import PHONE, WIDE, Browser, violations
from cli_world import flip, run
from watched import LAYERS, Watched, make_long, make_watched, state_of, watching

from weightcast.view.dashboard import Dashboard
from weightcast.view.journal import Journal

DRAWN = "document.querySelector('#heat figure:not([hidden]) svg path') !== null"
"""The last of what is read is there: what versions changed."""

HEAD_IS = "(document.querySelector('.tile dd') || {{}}).innerText === '{}'"

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "javascript:alert(3)//${alert(4)}",
    "w\x1b]0;owned\x07\u202eevil\u2066\u200b\u2028",
    "Z" + "\u0301" * 300,
    "long" * 900,
)


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    made = make_watched(tmp_path / "channel")
    made.report("rollout-a", 5)
    made.report("rollout-b", 5)
    return made


@pytest.fixture
def server(watched: Watched) -> Iterator[Dashboard]:
    with watching(watched.url) as server:
        yield server


def test_page_loads_and_shows_the_channel(server: Dashboard, browser: Browser) -> None:
    with browser.tab(server.url) as tab:
        tab.until(DRAWN)
        shown = tab.text()
        assert "Newest version\n5\n" in shown
        assert "2 of 2" in shown
        assert "rollout-a" in shown
        assert "nothing damaged was found" in shown
        assert tab.page.title().startswith("5 ")
        assert {address.partition("?")[0] for address in tab.requests} == {server.url, f"{server.url}state"}
    assert tab.problems == []


def test_version_that_is_published_appears_without_a_reload(
    watched: Watched, server: Dashboard, browser: Browser
) -> None:
    with browser.tab(server.url) as tab:
        tab.until(HEAD_IS.format(5))
        watched.publish()
        tab.until(HEAD_IS.format(6))
        tab.until("document.body.innerText.includes('up to date')")
        watched.report("rollout-a", 6)
        tab.until("!document.getElementById('arrivals').hidden")
    assert tab.problems == []


def test_lagging_and_failing_replicas_are_named_first(watched: Watched, server: Dashboard, browser: Browser) -> None:
    with browser.tab(server.url) as tab:
        tab.until("document.querySelectorAll('#replicas tbody tr').length === 2")
        watched.publish(7)
        for name in ("rollout-a", "rollout-b"):
            watched.report(name, 12)
        watched.report("slow", 2)
        watched.report("broken", 12, "the engine does not answer")
        tab.until("document.querySelectorAll('#replicas tbody tr').length === 4")
        tab.until("document.querySelectorAll('#replicas .pill.good').length === 2")
        rows = [row.inner_text() for row in tab.page.locator("#replicas tbody tr").all()]
        assert rows[0].startswith("broken")
        assert "failing" in rows[0]
        assert "the engine does not answer" in rows[0]
        assert rows[1].startswith("slow")
        assert "10 versions behind" in rows[1]
        assert "broken, the engine does not answer" in tab.text(".notices")
        assert "fails: the engine does not answer" in tab.text("#news")
    assert tab.problems == []


def test_corrupt_object_is_named(watched: Watched, browser: Browser) -> None:
    flip(watched.delta(3), 100)
    short = watched.delta(4)
    short.write_bytes(short.read_bytes()[:-1])
    with watching(watched.url) as server, browser.tab(server.url) as tab:
        tab.until("document.querySelectorAll('#checks tbody tr').length === 2")
        found = tab.text("#checks")
        assert "its SHA-256 is not the one in the manifest" in found
        assert short.name[:40] in found
        assert "2 objects damaged or missing" in tab.text(".notices")
    assert tab.problems == []


def test_bucket_that_is_away_is_said_and_the_last_state_stays(
    watched: Watched, server: Dashboard, browser: Browser, tmp_path: Path
) -> None:
    with browser.tab(server.url) as tab:
        tab.until("document.querySelectorAll('#replicas tbody tr').length === 2")
        watched.url.rename(tmp_path / "elsewhere")
        tab.until("document.querySelector('.notices').innerText.includes('cannot be read since')")
        assert "not connected" in tab.text(".top")
        assert "Newest version\n5\n" in tab.text("#page")
        (tmp_path / "elsewhere").rename(watched.url)
        tab.until("document.querySelector('.notices').innerText === ''")
        assert "live" in tab.text(".top")
    assert tab.problems == []


def test_bucket_that_does_not_answer_for_long_is_said(watched: Watched, browser: Browser) -> None:
    now = [1_800_000_000.0]
    journal = Journal(lambda: now[0])
    copy_parts(watched.url, journal)
    journal.looked()
    now[0] += 31
    server = Dashboard(journal, "127.0.0.1", 0)
    try:
        with browser.tab(server.url) as tab:
            tab.until(
                "document.querySelector('.notices').innerText.includes('has not answered since 2027-01-15 08:00')"
            )
            now[0] += 1
            journal.looked()
            tab.until("document.querySelector('.notices').innerText === ''")
    finally:
        server.close()


def copy_parts(url: Path, journal: Journal) -> None:
    """What is seen of a channel, in a journal of another clock."""
    for name, value in state_of(url)["parts"].items():
        journal.put(name, value)


def test_channel_that_was_reset_is_shown_anew(
    watched: Watched, server: Dashboard, browser: Browser, tmp_path: Path
) -> None:
    other = make_watched(tmp_path / "other", 1)
    with browser.tab(server.url) as tab:
        tab.until(HEAD_IS.format(5))
        watched.url.rename(tmp_path / "gone")
        other.url.rename(watched.url)
        tab.until(HEAD_IS.format(1))
        assert "was reset" in tab.text("#news")
        assert tab.page.locator("#replicas tbody tr").count() == 0


def test_server_that_is_gone_is_said(watched: Watched, browser: Browser) -> None:
    with watching(watched.url) as server:
        tab_context = browser.tab(server.url)
        tab = tab_context.__enter__()
        tab.until(HEAD_IS.format(5))
    tab.until("document.querySelector('.notices').innerText.includes('has not answered since')")
    assert "Newest version\n5\n" in tab.text("#page")
    tab_context.__exit__(None, None, None)


def test_hostile_names_do_nothing(tmp_path: Path, browser: Browser) -> None:
    names = tuple(f"{text}.x"[:4000] for text in HOSTILE)
    layers = tuple(f"{text}.layers.{i}.{text}.weight"[:4000] for i, text in enumerate(HOSTILE[:3]))
    watched = make_watched(tmp_path / "channel", 2, (*LAYERS, *names, *layers))
    for i, text in enumerate(HOSTILE):
        printable = "".join(one for one in text if one.isprintable())[:900]
        watched.report(f"r{i}", 2, printable)
    assert run("report", watched.url, "-o", tmp_path / "report.html").code == 0
    for live in (True, False):
        with watching(watched.url) as server:
            address = server.url if live else (tmp_path / "report.html").as_uri()
            with browser.tab(address) as tab:
                tab.until("document.querySelectorAll('#replicas tbody tr').length === 6")
                tab.until(DRAWN)
                for choice in ("kinds", "grid", "layers"):
                    tab.page.locator(f"#heat input[value={choice}]").check(force=True)
                for summary in tab.page.locator("summary:visible").all():
                    summary.click()
                assert "<img src=x onerror=alert(2)>" in tab.text("#replicas")
                assert r"w\u{1b}]0;" in tab.page.locator("#heat").text_content()
                assert tab.page.locator("main img, main script, main iframe, main a").count() == 0
                assert not any(one in tab.page.content() for one in ("\x1b", "\u202e", "\u2066"))
                assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert tab.problems == []


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_contrast_labels_and_structure_satisfy_axe(
    watched: Watched, browser: Browser, size: tuple[int, int], dark: bool
) -> None:
    watched.report("slow", 1)
    watched.report("broken", 5, "the engine does not answer")
    flip(watched.delta(3), 100)
    with watching(watched.url) as server, browser.tab(server.url, size=size, dark=dark) as tab:
        tab.until("document.querySelectorAll('#replicas tbody tr').length === 4")
        tab.until("document.querySelectorAll('#checks tbody tr').length === 1")
        tab.page.locator("#versions summary").click()
        tab.page.locator("#versions .plot").focus()
        tab.page.keyboard.press("End")
        assert violations(tab) == []
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off"
    assert tab.problems == []


def test_everything_is_reached_and_read_with_the_keyboard(server: Dashboard, browser: Browser) -> None:
    with browser.tab(server.url) as tab:
        tab.until(DRAWN)
        keys = tab.page.keyboard
        keys.press("Tab")
        assert tab.page.evaluate("document.activeElement.className") == "skip"
        reached = set()
        for _ in range(60):
            keys.press("Tab")
            reached.add(tab.page.evaluate("(document.activeElement.closest('section') || {}).id"))
        assert {"versions", "ratio", "changed", "heat", "replicas", "news"} <= reached
        tab.page.locator("#versions .plot").focus()
        keys.press("End")
        spoken = tab.page.locator("#versions [role=status]").inner_text()
        assert spoken.startswith("version 5, deltas:")
        keys.press("ArrowLeft")
        assert tab.page.locator("#versions [role=status]").inner_text().startswith("version 4")
        assert tab.page.locator("#versions .tip").is_visible()
        keys.press("Escape")
        assert not tab.page.locator("#versions .tip").is_visible()
        tab.page.locator("#heat .plot").focus()
        keys.press("Home")
        keys.press("Enter")
        assert tab.page.locator("#heat select").is_visible(), "a version of the map was opened"
    assert tab.problems == []


def test_every_chart_is_a_table_too(server: Dashboard, browser: Browser) -> None:
    with browser.tab(server.url) as tab:
        tab.until(DRAWN)
        for figure in tab.page.locator("figure:visible").all():
            assert figure.locator("svg[role=img][aria-label]").count() == 1
            figure.locator("summary").click()
            figure.locator("tbody tr").first.wait_for()
        assert "version" in tab.text("#versions thead")


def test_policy_stops_scripts_that_are_not_of_the_page(server: Dashboard, browser: Browser) -> None:
    with browser.tab(server.url) as tab:
        tab.until(HEAD_IS.format(5))
        tab.page.evaluate(
            """() => {
              const script = document.createElement("script");
              script.textContent = "window.ran = true";
              document.body.append(script);
              document.body.insertAdjacentHTML("beforeend", '<img src="//localhost:1/x" onerror="ran = 1">');
            }"""
        )
        tab.page.wait_for_timeout(100)
        assert tab.page.evaluate("window.ran === undefined")
        refused = tab.page.evaluate("fetch('http://localhost:1/').then(() => '', (error) => String(error))")
        assert "Failed to fetch" in refused
        for directive in ("script-src", "img-src", "connect-src"):
            assert any(directive in problem for problem in tab.problems), directive


def test_report_opens_from_a_file_and_asks_for_nothing(watched: Watched, tmp_path: Path, browser: Browser) -> None:
    file = tmp_path / "report.html"
    assert run("report", watched.url, "-o", file).code == 0
    shutil.rmtree(watched.url)
    with browser.tab(file.as_uri()) as tab:
        tab.until(DRAWN)
        assert "Newest version\n5\n" in tab.text()
        assert "report" in tab.text(".top")
        assert tab.requests == [file.as_uri()]
    assert tab.problems == []


def test_page_has_as_many_elements_for_many_versions_as_for_few(tmp_path: Path, browser: Browser) -> None:
    counts = []
    for versions in (60, 900):
        url = make_long(tmp_path / str(versions), versions, replicas=3).url
        assert run("report", url, "-o", tmp_path / f"{versions}.html").code == 0
        with browser.tab((tmp_path / f"{versions}.html").as_uri()) as tab:
            tab.until(DRAWN)
            tab.page.locator("#versions input[value=all]").check(force=True)
            counts.append(tab.page.evaluate("document.querySelectorAll('*').length"))
            tab.page.locator("#versions summary").click()
            tab.page.locator("#versions tbody tr").first.wait_for()
            assert tab.page.locator("#versions tbody tr").count() <= 200
        assert tab.problems == []
    few, many = counts
    assert many < few + 50, "a chart has as many elements as before, but for ticks and a legend"
