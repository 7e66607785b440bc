"""`LLM(…)` follows a channel without any server, and keeps no prefixes that old weights have computed."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import vllm
from engines import python_path
from world import training


@pytest.mark.parametrize("kind", ["llama", "moe"])
def test_llm_in_this_process_follows(kind: str, model: Callable[[str], Path], tmp_path: Path) -> None:
    script = Path(__file__).with_name("in_process.py")
    with training(model(kind), tmp_path / "channel") as trainer:
        for _ in range(3):
            version = trainer.step()
        done = subprocess.run(
            [sys.executable, str(script), str(model(kind)), trainer.channel, str(tmp_path / "mirror")],
            env={**os.environ, "PYTHONPATH": python_path()},
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    spans = [] if vllm.__version__.startswith("0.31.") else [str(version)]  # vLLM names them from 0.32 on
    expected = {"reloaded": 0, "version": version, "holds": True, "spans": spans}
    assert told == {**expected, "cached": [[False, True], [False, True]]}
