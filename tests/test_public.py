"""The public names, the order of the modules, and what an import costs."""

from __future__ import annotations

import ast
import doctest
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import weightcast as wc
from weightcast.bench import bench_codecs
from weightcast.cli.bench import SHIPPED

SOURCE = Path(wc.__file__).parent
README = (Path(__file__).parents[1] / "README.md").read_text()

READING_ORDER = [
    "_startup",
    "errors",
    "backoff",
    "files",
    "companions",
    "kernels.compile",
    "kernels.lanes",
    "kernels.bitio",
    "kernels.bands",
    "kernels.ranks",
    "kernels.writer",
    "kernels.reader",
    "kernels.cpu",
    "kernels.places",
    "kernels.ready",
    "workers",
    "bits",
    "digest",
    "layout",
    "patch",
    "codec.ranks",
    "codec.coded",
    "codec.plain",
    "codec.blocks",
    "codec.gap",
    "codec.banded",
    "codec",
    "container",
    "rows",
    "wire",
    "checkpoint",
    "detect",
    "stage",
    "offline",
    "keys",
    "manifest",
    "plan",
    "retention",
    "policy",
    "store.base",
    "store.memory",
    "store.rename",
    "store.file",
    "store.answers",
    "store.calls",
    "store.object",
    "store.refusals",
    "store.hub",
    "store.http",
    "store.patient",
    "store.probe",
    "store",
    "transfer",
    "chain",
    "notes",
    "pulse",
    "avoid",
    "holder",
    "folded",
    "history",
    "mirror",
    "ran",
    "reference",
    "fetch",
    "subscriber",
    "torch.names",
    "torch.batch",
    "torch.host",
    "torch.transit",
    "torch.plain",
    "torch.learn",
    "torch.live",
    "torch.triton",
    "torch.gpu",
    "torch.model",
    "torch.detect",
    "torch.streamed",
    "engines.client",
    "engines.meeting",
    "engines.agent",
    "engines.followers",
    "engines.proof",
    "engines.endpoint",
    "engines.versions",
    "engines.packing",
    "engines.worker",
    "engines.vllm",
    "engines.transfer",
    "begin",
    "receipt",
    "publisher",
    "torch.callback",
    "integrations.trl",
    "integrations",
    "folders",
    "squash",
    "collect",
    "verify",
    "repair",
    "testing",
    "peers",
    "bench",
    "cli.wording",
    "cli.terminal",
    "cli.console",
    "cli.apply",
    "cli.attach",
    "cli.bench",
    "cli.diff",
    "cli.command",
    "cli.held",
    "cli.digest",
    "cli.inspect",
    "cli.heat",
    "cli.init",
    "cli.publish",
    "cli.pull",
    "cli.log",
    "cli.pin",
    "cli.show",
    "cli.plan",
    "cli.verify",
    "cli.squash",
    "cli.forget",
    "cli.gc",
    "cli.repair",
    "cli.reset",
    "cli.status",
    "cli",
    "__main__",
]
"""docs/ARCHITECTURE.md draws it: data walk down this list, and a module imports only what stands above it."""


def module_file(name: str) -> Path:
    path = SOURCE / name.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports_of(name: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(module_file(name).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("weightcast"):
            inner = node.module.removeprefix("weightcast").lstrip(".")
            for alias in node.names:
                full = f"{inner}.{alias.name}".lstrip(".")
                found.add(full if full in READING_ORDER else inner)
    return found - {""}


def test_a_module_imports_only_what_stands_above_it() -> None:
    for i, name in enumerate(READING_ORDER):
        below = imports_of(name) - set(READING_ORDER[:i])
        assert not below, f"{name} imports {below}"


def test_every_module_has_its_place_in_the_order() -> None:
    files = {path for path in SOURCE.rglob("*.py") if path.read_text().strip()}
    assert files - {module_file(name) for name in READING_ORDER} == {
        SOURCE / "__init__.py",
        SOURCE / "kernels/__init__.py",
        SOURCE / "torch/__init__.py",
        SOURCE / "engines/__init__.py",
    }


def test_public_names_are_these() -> None:
    assert set(wc.__all__) == {name for name in vars(wc) if not name.startswith("_")} - {
        "bits", "checkpoint", "codec", "container", "detect", "digest", "kernels", "patch", "rows", "wire", "workers",
        "offline", "bench", "peers", "cli", "files", "stage", "keys", "manifest", "plan", "retention", "policy",
        "store", "transfer", "chain", "notes", "holder", "folded", "mirror", "fetch", "subscriber", "publisher",
        "folders", "squash", "collect", "verify", "testing", "begin", "torch", "receipt", "engines", "layout",
        "integrations", "reference", "companions", "backoff", "pulse", "avoid", "ran", "history", "repair",
    }  # fmt: skip
    assert all(getattr(wc, name).__doc__ for name in wc.__all__)


def test_the_example_in_the_docstring_runs() -> None:
    result = doctest.testmod(wc)
    assert result.attempted > 5
    assert result.failed == 0


def examples_in(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_example_with_arrays_in_the_readme_runs(tmp_path: Path) -> None:
    _, example = examples_in(README)
    arrays, mine = ({"w": np.zeros(1000, np.float32)} for _ in range(2))

    def train(target: wc.Arrays) -> None:
        target.read("w")[7] = 1

    exec(example, {"url": str(tmp_path), "arrays": arrays, "mine": mine, "train": train})
    assert np.array_equal(mine["w"], arrays["w"])
    assert mine["w"].any()


def test_the_examples_with_torch_run(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    guide = (SOURCE.parents[1] / "docs/guides/training.md").read_text()
    in_readme, (in_guide, _, receiving) = examples_in(README)[0], examples_in(guide)
    for i, example in enumerate((in_readme, in_guide)):
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def compute_loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return model(batch).square().sum()

        def train(model: torch.nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            model(batch).square().sum().backward()
            optimizer.step()

        there = {"url": str(tmp_path / str(i)), "model": model, "optimizer": optimizer, "data": torch.randn(3, 2, 4)}
        exec(example, there | {"compute_loss": compute_loss, "train": train})
        follower = torch.nn.Linear(4, 4, dtype=torch.bfloat16)

        def stop(position: wc.Position) -> None:
            raise InterruptedError

        with pytest.raises(InterruptedError):  # else it would follow for ever
            exec(receiving, there | {"model": follower, "print": stop})
        assert torch.equal(follower.weight, model.weight.to(torch.bfloat16))


def test_the_readme_says_what_the_benchmark_measures() -> None:
    """Sizes do not depend on the machine, but for a few bytes of zlib."""
    rows = dict(re.findall(r"^\| \**weightcast `(\w+)`\** \| (.*) \|$", README, re.MULTILINE))
    folders = sorted(path for path in SHIPPED.iterdir() if path.is_dir())
    for column, folder in enumerate(folders):
        result = bench_codecs(folder, (1,), lambda done, total: None)
        for codec, measured in result["codecs"].items():
            stated = float(rows[codec].split(" | ")[column].strip("*"))
            assert measured["bits_per_change"] == pytest.approx(stated, abs=0.05)
            assert measured["bit_exact"]


def test_the_core_imports_neither_torch_nor_any_extra() -> None:
    code = "import sys, weightcast; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "zstandard", "obstore", "cryptography", "safetensors", "huggingface_hub", "typer"} & set(
        loaded
    )


def test_typed() -> None:
    assert (SOURCE / "py.typed").exists()
