"""A short soak: a writer, three followers and upkeep in processes of their own, all at the head in the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "soak.py"


def test_a_writer_three_followers_and_upkeep_end_at_the_head() -> None:
    # Growth is for the long run: in seconds of start-up it says nothing.
    command = [sys.executable, SCRIPT, "--versions", "60", "--minutes", "0.2", "--params", "40000", "--slack", "500"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout)
    assert found
