"""docs/guides/estimate.md: its command prints what it says, and its tables are those of the script."""

from __future__ import annotations

import pytest
from cli_world import text
from guides import GUIDES, Page
from published import EXAMPLES, estimated, tables

PAGE = Page.of("estimate.md")
RATES = GUIDES / "rates/h200.json"


def test_command_of_the_guide_prints_what_it_says() -> None:
    (command,) = PAGE.commands
    words = [str(RATES) if word == "h200.json" else word for word in command.words]
    assert text(*words[1:]) == command.shown, "with these rates it is the same anywhere"


def test_tables_of_the_guide_are_what_the_script_prints() -> None:
    for table in tables():
        assert table in PAGE.text


@pytest.mark.parametrize(
    ("name", "stated"), [("0.6B", 27.4e6), ("405B, links of 1 GB/s", 6e9), ("1T, five regions", 15e9)]
)
def test_estimate_of_trls_encoding_is_what_trl_states(name: str, stated: float) -> None:
    (example,) = (one for one in EXAMPLES if one.name == name)
    assert estimated(example)["methods"]["TRL's encoding"]["bytes"] == pytest.approx(stated, rel=0.03)
