"""README.md: its examples and commands run, its figures are measured, and its table has every guide."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import write_folder
from cli_world import holds, model, run, step
from codec_sizes import SHIPPED, bench_codecs
from guides import GUIDES, ROOT, Page, nothing, play

import weightcast as wc

PAGE = Page.of("README.md")
TORCH, ARRAYS = PAGE.python


def test_example_with_torch_publishes_what_it_trains(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    trained = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)

    def train(model: Any, batch: Any) -> None:
        model(batch).square().sum().backward()
        optimizer.step()

    known = {"url": str(tmp_path), "model": trained, "optimizer": optimizer, "data": torch.randn(3, 2, 4)}
    exec(TORCH, known | {"train": train})
    with wc.Subscriber(str(tmp_path), follower := torch.nn.Linear(4, 4, dtype=torch.bfloat16)) as subscriber:
        subscriber.sync()
    assert torch.equal(follower.weight, trained.weight.to(torch.bfloat16))


def test_example_with_arrays_keeps_both_sides_equal(tmp_path: Path) -> None:
    arrays, mine = ({"w": np.zeros(1000, np.float32)} for _ in range(2))

    def train(target: wc.Arrays) -> None:
        target.read("w")[7] = 1

    exec(ARRAYS, {"url": str(tmp_path), "arrays": arrays, "mine": mine, "train": train, "print": str})
    assert np.array_equal(mine["w"], arrays["w"])
    assert mine["w"].any()


def test_commands_bring_a_checkpoint_to_a_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "checkpoint", model())
    write_folder(tmp_path / "checkpoint-10", trained := step(model(), 1))
    without = ("pip install", "weightcast attach", "weightcast verify --engine")  # tests/test_wheel.py, tests/vllm
    play(PAGE, places={"s3://bucket/run-42": tmp_path / "channel"}, instead=dict.fromkeys(without, nothing))
    assert run("pull", "channel", "replica").out == "version 1 is there already\n"
    assert holds(tmp_path / "replica", trained)


def test_table_has_every_guide_and_every_guide_a_test() -> None:
    guides = {path.relative_to(ROOT).as_posix() for path in GUIDES.glob("*.md")}
    assert set(re.findall(r"\]\((docs/guides/[\w-]+\.md)\) \|", PAGE.text)) == guides
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [path for path in guides if f'of("{Path(path).name}")' not in tests and f'"{path}"' not in tests] == []


def test_sizes_are_what_the_benchmark_measures() -> None:
    """Sizes do not depend on the machine, but for a few bytes of zlib."""
    rows = dict(re.findall(r"^\| \**weightcast `(\w+)`\** \| (.*) \|$", PAGE.text, re.MULTILINE))
    folders = sorted(path for path in SHIPPED.iterdir() if path.is_dir())
    for column, folder in enumerate(folders):
        result = bench_codecs(folder, (1,))
        for codec, measured in result["codecs"].items():
            stated = float(rows[codec].split(" | ")[column].strip("*"))
            assert measured["bits_per_change"] == pytest.approx(stated, abs=0.05)
            assert measured["bit_exact"]
