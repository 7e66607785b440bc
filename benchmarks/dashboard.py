"""How long the dashboard takes to open for a long channel, against a short one, in a real Chromium.

    python benchmarks/dashboard.py [--versions 50 5000] [--replicas 50] [--rounds 5]

Makes a channel of each length in a temporary folder (`tests/support/watched.py`), and in turns measures of each:
``look_s``, the first look at the bucket, after which the page can be drawn; ``read_s``, until everything that is read
was; ``open_s``, from the address to a drawn page; ``longest_task_s``, the longest time in which the page did not answer
while it opened; ``all_s``, drawing all versions instead of the newest; ``point_s``, reading 50 points with arrow keys.
Prints one JSON object with medians, the bytes of the first answer, and the elements of the page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from chromium import Browser, browsing
from watched import make_long, watching

from weightcast.channel.chain import Chain
from weightcast.store import open_store
from weightcast.view.dashboard import Dashboard
from weightcast.view.observer import Observer

DRAWN = "document.querySelector('#heat figure:not([hidden]) svg path') !== null"
OBSERVED = """new Promise((done) => { let most = 0;
  new PerformanceObserver((list) => { for (const one of list.getEntries()) most = Math.max(most, one.duration); })
    .observe({type: "longtask", buffered: true});
  setTimeout(() => done(most / 1000), 200); })"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--versions", type=int, nargs=2, default=(50, 5000))
    options.add_argument("--replicas", type=int, default=50)
    options.add_argument("--rounds", type=int, default=5)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder, browsing() as browser:
        channels = {n: make_long(Path(folder) / str(n), n, chosen.replicas).url for n in chosen.versions}
        found: dict[int, list[dict[str, float]]] = {n: [] for n in chosen.versions}
        for _ in range(chosen.rounds):
            for versions, url in channels.items():
                found[versions].append(measure(url, browser))
    medians = {
        n: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]} for n, rounds in found.items()
    }
    few, many = (medians[n] for n in chosen.versions)
    ratios = {key: round(many[key] / few[key], 2) for key in few if few[key]}
    shown = {n: {key: round(value, 4) for key, value in one.items()} for n, one in medians.items()}
    print(
        json.dumps(
            {
                "chromium": browser.version,
                "replicas": chosen.replicas,
                "rounds": chosen.rounds,
                "medians": shown,
                "ratios": ratios,
            }
        )
    )


def measure(url: Path, browser: Browser) -> dict[str, float]:
    seconds = looks(url)
    with watching(url, every=2.0) as server:
        while server.journal.since()["parts"].get("checks", {}).get("objects", 0) < 32:
            time.sleep(0.01)
        state = json.dumps(server.journal.since(), separators=(",", ":"))
        return {**seconds, **opened(server, browser), "answer_bytes": len(state)}


def looks(url: Path) -> dict[str, float]:
    began = time.monotonic()
    chain = Chain.open(open_store(str(url)))
    observer = Observer(lambda: chain, chain)
    more = observer.look()
    first = time.monotonic() - began
    while more:
        more = observer.look()
    whole = time.monotonic() - began
    observer.close()
    return {"look_s": first, "read_s": whole}


def opened(server: Dashboard, browser: Browser) -> dict[str, Any]:
    began = time.monotonic()
    with browser.tab(server.url) as tab:
        tab.until(DRAWN)
        found: dict[str, Any] = {"open_s": time.monotonic() - began}
        found["longest_task_s"] = tab.page.evaluate(OBSERVED)
        found["elements"] = tab.page.evaluate("document.querySelectorAll('*').length")
        began = time.monotonic()
        tab.page.locator("#versions input[value=all]").check(force=True)
        found["all_s"] = time.monotonic() - began
        tab.page.locator("#versions .plot").focus()
        began = time.monotonic()
        for _ in range(50):
            tab.page.keyboard.press("ArrowLeft")
        found["point_s"] = time.monotonic() - began
        assert tab.problems == [], tab.problems
    return found


if __name__ == "__main__":
    main()
