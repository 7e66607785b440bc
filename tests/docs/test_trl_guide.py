"""docs/guides/trl.md, as far as it runs without TRL and vLLM; tests/vllm/test_trl.py has the whole set-up."""

from __future__ import annotations

import inspect
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from cases import gaussian, write_folder
from guides import ROOT, Page, nothing, play

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

import weightcast as wc  # noqa: E402
from weightcast.integrations.trl import WeightcastTransfer  # noqa: E402

PAGE = Page.of("trl.md")
ONE_ARGUMENT, MIXTURE, SHARDED = PAGE.python
BUCKET = "hf://buckets/me/run-42"


class Trainer:
    """What the examples need of TRL's trainer."""

    def __init__(self, *_: Any, weight_transfer: WeightcastTransfer):
        self.weight_transfer = weight_transfer

    def _streaming_iter(self) -> None:
        raise NotImplementedError


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The examples' imports; a class for TRL's trainer."""
    for name in ("trl", "trl.experimental", "trl.experimental.async_grpo"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["trl.experimental.async_grpo"].AsyncGRPOTrainer = Trainer  # type: ignore[attr-defined]
    return {}


def test_commands_on_the_trainers_side_print_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    from hub import found

    monkeypatch.chdir(tmp_path)
    weights = wc.Arrays({"w": gaussian(np.random.default_rng(0), 144_320)}, dtypes={"w": "BF16"})
    write_folder(tmp_path / "model", weights, shards=1)
    elsewhere = ("pip", "hf auth", "vllm", "weightcast attach", "python", "weightcast verify")  # tests/vllm/test_trl.py
    with found(tmp_path / "hub") as hub:
        hub.models["Qwen/Qwen3-0.6B"] = tmp_path / "model"

        def make_bucket(words: list[str]) -> str:
            hub.buckets[words[3]] = {}
            return ""

        play(PAGE, instead=dict.fromkeys(elsewhere, nothing) | {"hf buckets create": make_bucket})


def test_transfer_is_one_argument_and_a_mixin(known: dict[str, Any], tmp_path: Path) -> None:
    exec(ONE_ARGUMENT.replace(BUCKET, str(tmp_path / "channel")), known)
    exec(SHARDED.replace(BUCKET, str(tmp_path / "channel")), known)
    assert isinstance(known["trainer"].weight_transfer, WeightcastTransfer)
    known["trainer"].weight_transfer.destroy()


def test_fused_experts_are_published_as_the_checkpoint_has_them(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from families import built

    model = built("qwen3_moe")
    model.save_pretrained(tmp_path / "saved")
    example = MIXTURE.replace(BUCKET, str(tmp_path / "channel")).replace("Qwen/Qwen3-30B-A3B", str(tmp_path / "saved"))
    exec(example, known := {"WeightcastTransfer": WeightcastTransfer})
    transfer = known["transfer"]
    transfer.patience = 0.0  # no engine follows
    transfer.init_weight_transfer()
    transfer.send_weights(iter(model.state_dict().items()))
    transfer.destroy()
    with wc.Subscriber(str(tmp_path / "channel"), tmp_path / "replica") as subscriber:
        subscriber.sync()
    with wc.Checkpoint(tmp_path / "replica") as replica, wc.Checkpoint(tmp_path / "saved") as saved:
        assert [spec.name for spec in replica.table] == [spec.name for spec in saved.table]


def test_table_has_the_options_of_the_transfer() -> None:
    named = {name for row in PAGE.table("`WeightcastTransfer(channel, …)`") for name in re.findall(r"`(\w+)=`", row[0])}
    known = set(inspect.signature(WeightcastTransfer).parameters)
    assert named <= known
    assert known - named == {"channel", "retry_after", "cut", "on_event", "sign", "trust"}, "other pages have these"


def test_script_takes_the_options_of_the_page() -> None:
    script = (ROOT / "examples/trl_vllm/train.py").read_text()
    (command,) = (command for command in PAGE.commands if "examples/trl_vllm/train.py" in command.text)
    assert {word for word in command.words if word.startswith("--")} <= set(re.findall(r'"(--[\w-]+)"', script))
