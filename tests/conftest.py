"""Set up for all tests: compiled kernels, Hypothesis without deadlines (machines are noisy), a real S3."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import faults
import pytest
from chromium import Browser, browsing
from debian import UnavailableError
from groups import ModulesTogether
from hypothesis import HealthCheck, settings
from liars import World
from rgw import Endpoint, serving

os.environ.pop("COLUMNS", None)  # xdist sets it, and tables are cut to it

# Before torch is imported anywhere: some virtual machines advertise AMX and die in the first bf16 product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# The tensors of tests are tiny: more threads of torch's only spin, and cost four times the CPU.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if not Path("/dev/nvidiactl").exists():  # before Triton is imported anywhere: its kernels run here too, interpreted
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("weightcast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("weightcast")

NO_GATEWAY, NO_BROWSER = "no Ceph gateway", "no Chromium"
TOGETHER = ("test_late_join", "test_rgw", "test_dashboard_page", "test_anatomy_page", "test_explanation")
"""1,000 versions are made once, one gateway takes a gigabyte and 15 seconds, one browser some hundred megabytes: not so
in every process."""


@pytest.fixture(scope="session", autouse=True)
def _kernels() -> None:
    import weightcast

    weightcast.warm_up()


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A small model on disk and in memory, and honest patches of it."""
    return World(tmp_path)


@pytest.fixture(scope="session")
def rgw() -> Iterator[Endpoint]:
    """A real S3, found by all that read AWS_*; where there can be none, its tests are skipped, but never in CI."""
    with ExitStack() as stack:
        try:
            endpoint = stack.enter_context(serving())
        except UnavailableError as error:
            if os.environ.get("CI"):
                pytest.fail(f"{NO_GATEWAY}: {error}")
            pytest.skip(f"{NO_GATEWAY}: {error}")
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in endpoint.environment().items():
            patch.setenv(name, value)
        yield endpoint


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real Chromium; where there can be none, its tests are skipped, but never in CI.

    Not for the session: Playwright keeps an event loop running in this thread, so later tests could not run theirs.
    """
    with ExitStack() as stack:
        try:
            found = stack.enter_context(browsing())
        except UnavailableError as error:
            if os.environ.get("CI"):
                pytest.fail(f"{NO_BROWSER}: {error}")
            pytest.skip(f"{NO_BROWSER}: {error}")
        yield found


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is such a thing: for tests that write thousands of small files."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="weightcast-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ModulesTogether:
    return ModulesTogether(config, log, TOGETHER)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["injected"] = dict(faults.INJECTED)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    faults.INJECTED.update(getattr(node, "workeroutput", {}).get("injected", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = {str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", [])}
    for what, why in (("on a real S3", NO_GATEWAY), ("in a browser", NO_BROWSER)):
        for reason in sorted(reason for reason in skipped if why in reason):
            terminalreporter.write_line(f"every test {what} was skipped: {reason}", red=True)
    if faults.INJECTED:
        counts = ", ".join(f"{operation} {count}" for operation, count in sorted(faults.INJECTED.items()))
        terminalreporter.write_line(f"faults injected: {faults.INJECTED.total()} ({counts})")
