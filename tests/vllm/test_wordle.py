"""`make demo-vllm` in a short run: TRL, vLLM with its agent and proxy, and the environment; the same files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_trl_and_vllm_play_wordle_and_the_engine_ends_with_the_trainers_bits(tmp_path: Path) -> None:
    folder, steps = tmp_path / "run", 4
    command = [sys.executable, "-m", "examples.wordle.trl.demo", "--folder", str(folder), "--steps", str(steps)]
    done = subprocess.run([*command, "--evaluate", "1"], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stderr) == (0, "")
    found = re.search(r"Every replica is bit-identical: engine\s+holds\s+version (\d+)", done.stdout)
    assert found is not None
    assert int(found[1]) >= steps - 1, "TRL's first step has a learning rate of 0"
    assert re.search(r"after\s+\d+\s+256 ", done.stdout), "256 games were played with the last version"
