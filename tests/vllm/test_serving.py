"""The harness itself: vLLM serves a tiny model, loads the plug-in for tests everywhere, and leaves nothing behind."""

from collections.abc import Callable
from pathlib import Path

from engines import serving


def test_tiny_model_is_served_and_its_processes_end(model: Callable[[str], Path]) -> None:
    with serving(model("qwen3"), backend=None) as engine:
        first = engine.generate([5, 6, 7, 8, 9], 8)
        assert len(first.tokens) == len(first.logprobs) == 8
        assert engine.generate([5, 6, 7, 8, 9], 8) == first
        assert len(engine.worker_pids()) == 1
        assert engine.pid in engine.pids()
    assert engine.pids() == []
