"""docs/guides/stores.md: a store that is tested as the page says passes, and one that breaks the contract does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from guides import Page

PAGE = Page.of("stores.md")
(SUITE,) = PAGE.python
STORES = {
    "sound": "MemoryStore('mine')",
    "broken": "type('Broken', (MemoryStore,), {'create': lambda self, key, data: self.put(key, data) or True})('mine')",
}


@pytest.mark.parametrize("kind", STORES)
def test_suite_tells_a_store_that_breaks_the_contract(kind: str, tmp_path: Path) -> None:
    before = "from weightcast.store.memory import MemoryStore\n"
    (tmp_path / "test_store.py").write_text(before + SUITE.replace("MyStore(...)", STORES[kind]))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == (0 if kind == "sound" else 1), done.stdout
    assert ("create" in done.stdout) == (kind == "broken")


def test_lifecycle_rule_is_what_s3_takes() -> None:
    (block,) = (block for block in PAGE.blocks("sh") if block.startswith("aws"))
    (rule,) = json.loads(block.split("'")[1])["Rules"]
    assert rule["Status"] == "Enabled"
    assert set(rule["AbortIncompleteMultipartUpload"]) == {"DaysAfterInitiation"}
