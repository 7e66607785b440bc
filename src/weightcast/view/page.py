"""One HTML page that needs nothing else: styles, scripts and data are inside it.

A page is assembled from files in ``assets/``. `kit.css` and `kit.js` (elements, numbers, text) and `charts.js` are in
every page, and their comments say how to use them. A page's own script begins with ``"use strict";``, makes its
elements with ``kit.el`` and ``charts.…``, and puts them into ``document.getElementById("page")``::

    page("Anatomy of a delta", scripts=["analyze.js"], data={"run": found}).html

    const run = kit.data("run");
    document.getElementById("page").append(
      kit.card("Sizes", {size: "half"}, charts.lines({title: "Bytes by version", y: {scale: "log"}, series: […]})));

The page's policy (`Content-Security-Policy`) allows exactly these scripts and styles, by their hashes. So handlers are
added in scripts and never written as attributes, and inline styles are set as properties (``element.style.left``),
never as the attribute ``style``. Data is embedded as JSON, in which no text can end its element. What is read from a
channel is shown through ``kit.name`` or ``kit.plain`` alone: they spell out characters that cannot be seen, and cut
what is long.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent / "assets"

_SHARED_STYLES = ("kit.css",)
_SHARED_SCRIPTS = ("kit.js", "charts.js")

_UNSAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&"}


@dataclass(frozen=True)
class Page:
    """A page, and the policy for it that a server sends as a header; the page has it inside, too."""

    html: str
    policy: str


def page(
    title: str,
    *,
    scripts: Sequence[str],
    styles: Sequence[str] = (),
    data: Mapping[str, Any] | None = None,
    live: bool = False,
) -> Page:
    """A page made by ``scripts``, files of ``assets/``, from ``data`` by name. A ``live`` one may ask its server."""
    style = "\n".join(_asset(name) for name in (*_SHARED_STYLES, *styles))
    code = "\n".join(_asset(name) for name in (*_SHARED_SCRIPTS, *scripts))
    policy = _policy(style, code, live)
    blocks = "".join(
        f'<script type="application/json" id="{html.escape(name)}">{embedded(value)}</script>\n'
        for name, value in (data or {}).items()
    )
    return Page(
        f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#page">Skip to the content</a>
<header class="top" id="top"></header>
<main class="grid" id="page" tabindex="-1"></main>
<footer class="foot" id="foot"></footer>
<noscript>This page is drawn by its own script, which is switched off.</noscript>
{blocks}<script>{code}</script>
</body>
</html>
""",
        policy,
    )


def embedded(value: Any) -> str:
    """JSON that may stand inside an element: no text in it ends the element or begins another."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False).translate(_UNSAFE)


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _policy(style: str, code: str, live: bool) -> str:
    own = "'self'" if live else "'none'"
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(code)}",
            f"style-src {_hash(style)}",
            "img-src data:",
            f"connect-src {own}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
