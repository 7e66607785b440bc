"""A minute in the life of a channel: real processes, upkeep meanwhile, and nothing that grows or is left behind."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "soak.py"
FOLLOWERS = ("newest", "mirror", "every")


def test_all_end_at_the_head_and_nothing_grows(tmp_path: Path) -> None:
    small = ["--versions", "60", "--minutes", "0.25", "--params", "60000", "--slack", "32"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--url", str(tmp_path / "bucket"), *small], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["faults"] == []
    roles = {process["role"]: process for process in facts["processes"]}
    assert {roles[name]["result"]["version"] for name in ("publisher", *FOLLOWERS)} == {60}
    assert len({roles[name]["result"]["digest"] for name in ("publisher", *FOLLOWERS)}) == 1
    assert roles["every"]["result"]["gaps"] == 0
    assert roles["squash"]["runs"] >= 1
    assert roles["gc"]["runs"] >= 1


def test_what_fails_is_told(tmp_path: Path) -> None:
    """Here: memory may not grow at all, and everything does at first."""
    small = ["--versions", "8", "--minutes", "0.05", "--params", "60000", "--slack", "-1000000"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--url", str(tmp_path / "bucket"), *small], capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    assert "memory grew" in done.stderr
