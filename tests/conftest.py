"""Set up once for all tests: compiled kernels, and Hypothesis without deadlines (machines are noisy)."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from liars import World

# Before torch is imported anywhere: some virtual machines advertise AMX and die in the first bf16 product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

settings.register_profile("weightcast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("weightcast")


@pytest.fixture(scope="session", autouse=True)
def _kernels() -> None:
    import weightcast

    weightcast.warm_up()


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A small model on disk and in memory, and honest patches of it."""
    return World(tmp_path)
