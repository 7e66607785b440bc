"""Set up once for the tests of real vLLM: no warning is an error here, since vLLM and what it imports emit them."""

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported anywhere: some virtual machines advertise AMX and die in the first bf16 product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).parents[1] / "support"))  # a Hub and an S3 to test with

LONGEST = ("test_trl", "test_trl_sharded", "test_follow", "test_wordle")
"""They begin first: no process then waits for the other's last test."""
ONE_ENGINE = ("test_architectures", "test_faults", "test_live", "test_refusals")
"""Their tests share an engine, and so a process."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of a kind that `models.KINDS` names, made on the first call; not to be changed."""
    import models

    @cache
    def made(kind: str) -> Path:
        return models.make(kind, tmp_path_factory.mktemp("models") / kind)

    return made


@pytest.fixture(scope="session")
def chatting(model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 whose tokenizer has the chat template that TRL knows for it."""
    from trl_deployment import with_template

    return with_template(model("qwen3"), tmp_path_factory.mktemp("chatting") / "qwen3")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from groups import ModulesTogether

    return ModulesTogether(config, log, ONE_ENGINE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
