"""`LLM(…)` follows a channel without any server, and keeps nothing that old weights have computed."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vllm
from engines import python_path
from world import training


def told_by(script: str, *arguments: str) -> Any:
    """What a script prints that has a vLLM in its own process."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *arguments],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_llm_in_this_process_follows_and_computes_prefixes_again(model: Callable[[str], Path], tmp_path: Path) -> None:
    with training(model("moe"), tmp_path / "channel") as trainer:
        for _ in range(3):
            version = trainer.step()
        told = told_by("in_process.py", str(model("moe")), trainer.channel, str(tmp_path / "mirror"))
    spans = [] if vllm.__version__.startswith("0.31.") else [str(version)]  # vLLM names them from 0.32 on
    expected = {"reloaded": 0, "version": version, "holds": True, "spans": spans}
    assert told == {**expected, "cached": [[False, True], [False, True]]}


def test_llm_in_this_process_looks_at_a_picture_again_after_each_update(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its encoder's output is cached by the picture alone."""
    folders = str(tmp_path / "channel"), str(tmp_path / "mirror")
    first, other, back = told_by("pictures_in_process.py", str(model("blip2")), *folders)
    for answer, again in (first, other, back):
        assert answer == again
    assert other != first
    assert back == first
