"""Set up once for the tests of real vLLM: no warning is an error here, since vLLM and what it imports emit them."""

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

# Before torch is imported anywhere: some virtual machines advertise AMX and die in the first bf16 product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).parents[1] / "support"))  # a Hub and an S3 to test with

LONGEST = ("test_trl", "test_follow", "test_wordle")
"""They begin first: no process then waits for the other's last test."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of a kind that `models.KINDS` names, made on the first call; not to be changed."""
    import models

    @cache
    def made(kind: str) -> Path:
        return models.make(kind, tmp_path_factory.mktemp("models") / kind)

    return made


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a module that share an engine run in one process; every other test goes to whichever is free."""
    for item in items:
        if {"engine", "shared"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
