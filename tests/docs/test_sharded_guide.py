"""docs/guides/sharded.md: its session and its examples run in processes of torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from guides import ROOT, Page, nothing, play

pytest.importorskip("torch")

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.records import Manifest
from weightcast.store.file import FileStore

PAGE = Page.of("sharded.md")
WHOLE, BOXES = PAGE.python

BEFORE = """
import sys
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

distributed.init_process_group("gloo")
rank, url = distributed.get_rank(), sys.argv[1]
torch.manual_seed(0)
"""

BEFORE_WHOLE = """
data = torch.randn(3, 4, 16)

def build_model():
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    model.layers = list(model)
    return model

def train(model, batch):
    model(batch).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

BEFORE_BOXES = """
url = sys.argv[2]
layer, norm = nn.Module(), torch.ones(16)
layer.up, layer.down = nn.Linear(16, 4), nn.Linear(4, 16)
"""

AFTER = "\ndistributed.destroy_process_group()\n"


def together(script: Path, text: str, *urls: Path) -> None:
    """Run a script on two ranks."""
    script.write_text(text)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, script, *urls], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def manifests(channel: Path) -> list[Manifest]:
    chain = Chain.open(FileStore(channel))
    return [chain.manifest(version) for version in chain.versions()]


def test_session_prints_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(ROOT / "examples")
    play(PAGE, instead={"pip install": nothing, "weightcast init": nothing})
    found = manifests(tmp_path / "channel")
    assert [one.step for one in found] == [None, 1, 2, 3, 4, 5, 6, 7]
    assert [one.codec for one in found] == [None, *["banded"] * 7], "no second anchor on three processes"
    assert [len(one.objects) for one in found[1:]] == [2, 2, 2, 2, 2, 3, 3]
    with wc.Checkpoint(tmp_path / "replica") as replica:
        assert wc.fingerprint(replica).digest == found[-1].position.digest


def test_examples_publish_what_all_ranks_hold(tmp_path: Path) -> None:
    whole, boxes = tmp_path / "whole", tmp_path / "boxes"
    script = BEFORE_WHOLE + WHOLE + BEFORE_BOXES + BOXES
    together(tmp_path / "train.py", BEFORE + script + AFTER, whole, boxes)
    assert manifests(whole)[-1].step == 3
    assert {len(one.objects) for one in manifests(whole)[1:]} == {2}
    with wc.Subscriber(boxes, tmp_path / "replica") as subscriber:
        subscriber.sync()
        subscriber.fold()
    with wc.Checkpoint(tmp_path / "replica") as replica:
        shapes = {spec.name.rpartition("mlp.")[2]: spec.shape for spec in replica.table}
    assert shapes == {"up_proj.weight": (8, 16), "down_proj.weight": (16, 8), "model.norm.weight": (16,)}
