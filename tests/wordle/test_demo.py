"""The whole picture in a short run: all boxes, a late replica, and each box killed once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from wordle_boxes import ROOT

import weightcast as wc

TOO_SHORT = "the policy did not get measurably better\n"


@pytest.mark.parametrize("chaos", [False, True], ids=["calm", "chaos"])
def test_every_replica_ends_with_the_trainers_bits(tmp_path: Path, chaos: bool) -> None:
    folder, steps = tmp_path / "run", 12
    command = [sys.executable, "-m", "examples.wordle.demo", "--folder", str(folder), "--steps", str(steps)]
    done = subprocess.run(
        [*command, "--evaluate", "1", *(["--chaos"] if chaos else [])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.stderr in ("", TOO_SHORT), "twelve steps may be too few to show it"
    assert re.search(r"Every replica is bit-identical: replica-a and\s+replica-b hold version \d+", done.stdout)
    assert ("was killed" in done.stdout) == chaos
    with wc.Subscriber(folder / "bucket", tmp_path / "mirror") as subscriber:
        update = subscriber.sync()
    assert update is not None
    assert update.position.version >= steps
    assert update.position.digest in re.sub(r"\s", "", done.stdout)
