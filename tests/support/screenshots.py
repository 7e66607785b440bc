"""Pictures of a dashboard or a report, for the documents.

    python tests/support/screenshots.py build/demo.html docs/images

Writes `dashboard.webp` (the upper part, light), `dashboard-dark.webp` (replicas and phases, dark) and
`dashboard-phone.webp` into the folder. Those in docs/images are of the report of a `make demo`.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from chromium import PHONE, Browser, Tab, browsing
from PIL import Image

SIZE = (1180, 900)


def main(source: str, folder: Path) -> None:
    address = source if "://" in source else Path(source).resolve().as_uri()
    with browsing() as browser:
        save(folder / "dashboard.webp", upper(browser, address, "heat"))
        save(folder / "dashboard-dark.webp", lower(browser, address))
        with browser.tab(address, size=PHONE) as tab:
            drawn(tab)
            save(folder / "dashboard-phone.webp", tab.page.screenshot(clip=box(0, 0, PHONE[0], 900), full_page=True))


def upper(browser: Browser, address: str, last: str) -> bytes:
    """From the top of the page to the end of a card."""
    with browser.tab(address, size=SIZE) as tab:
        drawn(tab)
        end = tab.page.locator(f"#{last}").bounding_box()
        assert end is not None
        return tab.page.screenshot(clip=box(0, 0, SIZE[0], end["y"] + end["height"] + 14), full_page=True)


def lower(browser: Browser, address: str) -> bytes:
    with browser.tab(address, size=SIZE, dark=True) as tab:
        drawn(tab)
        first, last = (tab.page.locator(one).bounding_box() for one in ("#replicas", "#checks"))
        assert first is not None
        assert last is not None
        height = last["y"] + last["height"] - first["y"] + 28
        return tab.page.screenshot(clip=box(0, first["y"] - 14, SIZE[0], height), full_page=True)


def drawn(tab: Tab) -> None:
    tab.until("document.querySelector('#heat figure:not([hidden]) svg path') !== null")


def box(x: float, y: float, width: float, height: float) -> dict[str, float]:
    return {"x": x, "y": y, "width": width, "height": height}


def save(file: Path, png: bytes) -> None:
    Image.open(io.BytesIO(png)).save(file, "WEBP", quality=82, method=6)
    print(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
