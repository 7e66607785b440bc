"""The whole way by the command line, on a folder, a real S3 and the Hub's client: init, publish, pull, verify, load."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import hub
import pytest
import torch
from rgw import Endpoint
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

import weightcast as wc
from weightcast.cli import app


def run(*arguments: str | Path) -> Any:
    """A command that succeeds, and the JSON it prints."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def tiny() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).to(torch.bfloat16)


def step(model: PreTrainedModel, seed: int) -> None:
    """Move some weights, as a small learning rate does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            moved = torch.rand(parameter.shape, generator=generator) < 0.02
            parameter.view(torch.int16)[moved] += 1


def same(here: PreTrainedModel, there: PreTrainedModel) -> bool:
    mine, theirs = here.state_dict(), there.state_dict()
    return mine.keys() == theirs.keys() and all(
        torch.equal(mine[name].view(torch.int16), theirs[name].view(torch.int16)) for name in mine
    )


def round_trip(url: str, folder: Path) -> None:
    model = tiny()
    model.save_pretrained(folder / "saved")
    assert run("init", url, folder / "saved")["version"] == 0
    for version in range(1, 13):
        step(model, version)
        model.save_pretrained(folder / "saved")
        published = run("publish", url, folder / "saved", "--step", str(10 * version), "--mirror", folder / "head")
        assert (published["version"], published["step"]) == (version, 10 * version)
    pulled = run("pull", url, folder / "replica")
    assert pulled["version"] == 12
    with wc.Checkpoint(folder / "saved") as saved, wc.Checkpoint(folder / "replica") as replica:
        assert saved.table == replica.table
        assert all(saved.read(spec.name).tobytes() == replica.read(spec.name).tobytes() for spec in saved.table)
    assert run("verify", url, "--deep")["findings"] == []
    assert run("verify", folder / "replica", url)["version"] == 12
    loaded = AutoModelForCausalLM.from_pretrained(folder / "replica", dtype=torch.bfloat16)
    assert same(loaded, model)
    earlier = run("pull", url, folder / "replica", "--version", "5")
    assert earlier["version"] == 5


def test_round_trip_through_a_folder_is_exact(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    round_trip(f"file://{tmp_path}/bucket", tmp_path)


def test_round_trip_through_a_real_s3_is_exact(tmp_path: Path, rgw: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in rgw.environment().items():
        monkeypatch.setitem(os.environ, name, value)
    round_trip(f"{rgw.make_bucket('round-trip')}/channel", tmp_path)


def test_round_trip_through_a_bucket_of_the_hub_is_exact(tmp_path: Path) -> None:
    """huggingface_hub and hf_xet are real, the Hub is a stand-in."""
    with hub.found(tmp_path / "hub") as hugging_face:
        round_trip(f"{hugging_face.make_bucket('round-trip')}/channel", tmp_path)
