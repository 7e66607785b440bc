"""Pages: one file, nothing from elsewhere, and no text that is taken for markup or for a script."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import pytest

from weightcast.view.page import ASSETS, embedded, page

LIES = ("</script><script>alert(1)</script>", "<!--<script>", "&lt;", "\u2028", "\ud800", "]]>", '"\\')


@pytest.mark.parametrize("text", LIES)
def test_embedded_text_is_itself_again_and_ends_no_element(text: str) -> None:
    written = embedded({text: [text]})
    assert json.loads(written) == {text: [text]}
    assert written.isascii()
    assert not set(written) & set("<>&")


def test_page_is_one_file_that_names_no_other_host() -> None:
    made = page("A page", scripts=[], data={"run": {"name": LIES[0]}})
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", made.html)
    assert not re.findall(r"\b(?:src|href)=(?!\"#page\"|\"data:,\")", made.html)
    assert made.html.count("</script>") == 2


def test_policy_allows_the_scripts_and_styles_of_the_page_and_nothing_else() -> None:
    made = page("A page", scripts=[])
    for element in ("script", "style"):
        (content,) = re.findall(rf"<{element}>(.*?)</{element}>", made.html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in made.policy
    assert "default-src 'none'" in made.policy
    assert "unsafe" not in made.policy
    assert "connect-src 'none'" in made.policy
    assert "connect-src 'self'" in page("A page", scripts=[], live=True).policy


def test_title_is_text() -> None:
    assert "<title>&lt;b&gt;</title>" in page("<b>", scripts=[]).html


def test_assets_make_no_element_of_text() -> None:
    for path in ASSETS.glob("*.js"):
        forbidden = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", path.read_text()
        )
        assert not forbidden, f"{path.name}: {forbidden}"
