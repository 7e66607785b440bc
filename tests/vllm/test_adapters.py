"""vLLM loads the mirror of an adapter's channel as it loads what PEFT saved."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import peft
from adapters import BF16, adam, lora, pulled, save_adapter, step
from engines import python_path
from transformers import AutoModelForCausalLM

import weightcast as wc


def test_vllm_answers_with_a_mirror_as_with_what_peft_saved(model: Callable[[str], Path], tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(model("qwen3"), dtype=BF16)
    trained = peft.get_peft_model(base, lora(r=8, lora_alpha=64, target_modules="all-linear"))
    optimizer, folders = adam(trained), []
    with wc.Publisher(tmp_path / "channel", trained, optimizer=optimizer) as publisher:
        for number in (1, 2):
            step(trained, optimizer, number)
            publisher.publish(step=number).result(60)
            folders += [
                pulled(str(tmp_path / "channel"), tmp_path / f"mirror-{number}"),
                save_adapter(trained, tmp_path / f"saved-{number}"),
            ]
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("adapter_in_process.py")),
            str(model("qwen3")),
            *map(str, folders),
        ],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    first, first_saved, second, second_saved = told["adapters"]
    assert first == first_saved
    assert second == second_saved
    assert first != second != told["base"]
    assert told["before"] == first
    assert told["renamed"] == second
    assert told["inplace"] != second  # docs/guides/lora.md: what is cached of the prompt is the older version's
