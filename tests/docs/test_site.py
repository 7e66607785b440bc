"""The documentation site: `make docs` builds it, and docs/site/hooks.py refuses what would not work offline."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import weightcast as wc

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/site/hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_in_the_reference() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs/reference").glob("*.md"))
    shown = set(re.findall(r"^::: weightcast\.(\w+)$", pages, re.MULTILINE))
    assert shown <= set(wc.__all__)
    assert shown | set(wc.errors.__all__) >= set(wc.__all__)


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://unpkg.com/iframe-worker/shim"></script>',
        "<script defer src=//cdn.example/x.js></script>",
        '<link rel="stylesheet" href="https://fonts.example/css?family=Roboto">',
        '<link href="https://fonts.example" rel="preconnect">',
        '<img alt="badge" src="https://badges.example/b.svg">',
        "@font-face { src: url(https://fonts.example/roboto.woff2) }",
        '@import "https://styles.example/a.css";',
    ],
)
def test_load_from_another_host_is_found(hooks: ModuleType, text: str) -> None:
    assert hooks.loads_from_elsewhere(text)


@pytest.mark.parametrize(
    "text",
    [
        '<a href="https://example.org">a link to follow</a>',
        '<script src="../assets/bundle.js"></script>',
        '<link rel="canonical" href="https://example.org/">',
        "body { background: url(../images/a.png) }",
    ],
)
def test_links_and_local_files_are_allowed(hooks: ModuleType, text: str) -> None:
    assert not hooks.loads_from_elsewhere(text)


def test_links_lead_to_where_files_are_in_the_site(hooks: ModuleType) -> None:
    source = ROOT / "docs/guides/channel.md"
    text = "[a](../../README.md) [b](trl.md#options) [c](../../src/weightcast/errors.py) [d](https://example.org)"
    assert hooks.relinked(text, source, "guides/channel.md") == (
        "[a](../index.md) [b](trl.md#options) c (`src/weightcast/errors.py`) [d](https://example.org)"
    )


def test_images_of_documents_are_in_the_site(hooks: ModuleType) -> None:
    text, source = "![a](../docs/images/demo.svg)", ROOT / "benchmarks/RESULTS.md"
    assert hooks.relinked(text, source, "benchmarks/RESULTS.md") == "![a](../images/demo.svg)"


def test_link_to_a_missing_file_fails(hooks: ModuleType) -> None:
    with pytest.raises(Exception, match=r"links to no\.md, which does not exist"):
        hooks.relinked("[a](no.md)", ROOT / "docs/SPEC.md", "SPEC.md")


@pytest.mark.parametrize("page", ["README.md", "SECURITY.md", "CONTRIBUTING.md", "docs/ARCHITECTURE.md"])
def test_files_that_documents_name_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(r"`((?:src/weightcast/|[a-z_]+/)[\w/.-]*\.(?:py|md|js|yml|txt))`", text)
    places = (ROOT, ROOT / "src/weightcast")
    assert not [name for name in named if not any((place / name).exists() for place in places)]


@pytest.mark.parametrize("path", sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md"]), ids=lambda path: path.stem)
def test_public_names_that_a_page_uses_exist(path: Path) -> None:
    assert set(re.findall(r"\bwc\.([A-Za-z_]+)", path.read_text())) <= {*wc.__all__, "errors", "warm_up"}


def test_architecture_draws_the_packages_in_their_order() -> None:
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    drawn = re.findall(r"^\| `(\w+)/?` \|", text, re.MULTILINE)
    assert set(drawn) == {path.stem for path in (ROOT / "src/weightcast").iterdir() if path.name[0] not in "_."} - {
        "py"
    }
    order = re.search(r"PACKAGES = \[(.*?)\]", (ROOT / "tests/test_public.py").read_text(), re.DOTALL)
    assert order is not None
    assert drawn == re.findall(r'"(\w+)"', order[1])
