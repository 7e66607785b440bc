"""Many architectures follow a channel in one process: at every version they answer as a fresh engine does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm
from architectures import ARCHITECTURES
from engines import python_path

Run = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Has an architecture follow a channel; what it tells is described in `architectures_in_process`."""
    folder = tmp_path_factory.mktemp("architectures")
    script = Path(__file__).with_name("architectures_in_process.py")
    log = (folder / "log").open("w+")
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        env={**os.environ, "PYTHONPATH": python_path(), "VLLM_LOGGING_LEVEL": "ERROR"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )

    def ask(name: str) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        print(name, file=process.stdin, flush=True)
        line = process.stdout.readline()
        assert line, log.seek(0) or log.read()[-3000:]
        return dict(json.loads(line))

    yield ask
    process.stdin.close()
    process.wait(60)


NOT_IN_31 = {
    "phi": "vLLM 0.31 itself does not load it with this transformers",
    "qwen3-next": "on a CPU this model is refused when vLLM 0.31 starts",
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_answers_as_a_fresh_engine_and_is_proven(name: str, run: Run) -> None:
    if name in NOT_IN_31 and vllm.__version__.startswith("0.31."):
        pytest.skip(NOT_IN_31[name])
    told, refused = run(name), ARCHITECTURES[name].refused
    if refused is not None:
        assert refused in told["error"]
        return
    assert "error" not in told, told["error"]
    updates, proofs = told["updates"], told["proofs"]
    assert updates == [{"reloaded": 0, "unproven": []}] * len(updates)
    derived = ARCHITECTURES[name].derived
    made = sorted(one for ones in derived.values() for one in ones)
    nothing: dict[str, Any] = {"wrong": {}, "unproven": {}, "absent": [], "uncovered": {}}
    assert proofs == [{"version": 1 + i, "holds": True, **nothing} for i in range(len(proofs))]
    assert told["after"] != told["before"]
    assert told["after"] == told["again"] == told["fresh"]
    assert told["derived"] == {"of": list(derived), "made": made, "reload": {}, "unsupported": None}
