"""GRPO with TRL on this machine, vLLM on another, a bucket between them and nothing else.

    python examples/trl_vllm/train.py --model Qwen/Qwen3-0.6B --channel hf://buckets/me/run-42 --vllm http://engine:8000

docs/guides/trl.md has the commands for the other side. What is learned here is to answer in vowels: a reward that any
model earns a little of from the first step on, and that takes no data.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from weightcast.integrations.trl import WeightcastTransfer
from weightcast.integrations.trl_sharded import ShardedSync

SUBJECTS = ("the sea", "a train", "an owl", "rain", "a house", "iron", "tea", "the moon")


def vowels(completions: list[Any], **_: Any) -> list[float]:
    """The share of vowels in each answer."""
    texts = [completion[-1]["content"] for completion in completions]
    return [sum(letter in "aeiou" for letter in text.lower()) / max(1, len(text)) for text in texts]


class Trainer(ShardedSync, AsyncGRPOTrainer):
    """Where several processes share the model (`accelerate launch --use_fsdp`), each publishes its shards."""


class TellSyncs(TrainerCallback):
    """Prints what each step's sync came to."""

    def __init__(self, transfer: WeightcastTransfer):
        self._transfer = transfer

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if logs and "loss" in logs and state.is_world_process_zero:
            print(f"step {state.global_step}: {self._transfer.last}", flush=True)


def newest_checkpoint(output: Path) -> str | None:
    """The last one that was written to its end: a trainer that is killed may leave half of another."""
    whole = [state.parent for state in output.glob("checkpoint-*/trainer_state.json")]
    return str(max(whole, key=lambda folder: int(folder.name.partition("-")[2]))) if whole else None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--channel", required=True, help="hf://buckets/OWNER/NAME, s3://…, a folder")
    parser.add_argument("--vllm", default="http://localhost:8000", help="where rollouts come from")
    parser.add_argument("--engine", help="the same vLLM, if it is on this host and no agent follows the channel")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds that a sync waits for engines")
    parser.add_argument("--output", type=Path, default=Path("checkpoints"), help="training resumes from what is there")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--lr", type=float, default=1e-6)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    structure = AutoModelForCausalLM.from_pretrained(given.model, device_map="meta")  # no weights; mixtures need it
    transfer = WeightcastTransfer(given.channel, model=structure, engine=given.engine, patience=given.patience)
    trainer = Trainer(
        model=given.model,
        reward_funcs=vowels,
        args=AsyncGRPOConfig(
            output_dir=str(given.output),
            vllm_server_base_url=given.vllm,
            max_steps=given.steps,
            save_steps=given.save_every,
            learning_rate=given.lr,
            num_generations=given.generations,
            per_device_train_batch_size=given.generations,
            max_completion_length=given.tokens,
            report_to="none",
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": f"Write a line about {subject}."}]} for subject in SUBJECTS]
        ),
        callbacks=[TellSyncs(transfer)],
        weight_transfer=transfer,
    )
    trainer.train(resume_from_checkpoint=newest_checkpoint(given.output))


if __name__ == "__main__":
    main()
