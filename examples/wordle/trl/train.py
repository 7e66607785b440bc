"""Box 2 of the real stack: TRL's AsyncGRPOTrainer plays Wordle in OpenEnv and publishes through weightcast.

    python -m examples.wordle.trl.train --channel hf://buckets/me/wordle \\
        --environment http://env:8000 --vllm http://engine:8000

vLLM serves the same checkpoint with the plug-in, and an agent follows the channel there (docs/guides/wordle.md).
"""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from openenv.core.client_types import StepResult
from openenv.core.env_server.mcp_types import Tool
from openenv.core.harness import (
    HarnessRolloutResult,
    HarnessRunLimits,
    MCPHarnessAdapter,
    Message,
    ModelStep,
    ModelStepResult,
    ResourceSession,
    ResourceSessionFactory,
    StepEnvSessionAdapter,
    ToolResult,
)
from openenv.core.llm_client import LLMResponse, ToolCall
from transformers import AutoTokenizer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker

from examples.wordle.client import WordleEnv
from examples.wordle.environment import WordleAction, WordleObservation
from examples.wordle.events import report
from examples.wordle.game import LENGTH, TURNS, is_guess
from examples.wordle.policy import CHECKPOINT, published
from examples.wordle.trl.on_cpu import use_cpu
from weightcast.integrations.trl import Sync, WeightcastTransfer

GUESS = Tool(
    name="guess",
    description="Guess the word.",
    input_schema={"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
)


class Guesses(MCPHarnessAdapter):
    """OpenEnv's loop of tool calls, for a policy that writes nothing but guesses: five letters are a call."""

    def run_white_box(
        self, model_step: ModelStep, session: ResourceSession, limits: HarnessRunLimits | None = None
    ) -> HarnessRolloutResult:
        def guess(messages: list[Message], tools: list[Tool], sampling: dict[str, Any]) -> ModelStepResult:
            step = model_step(messages, tools, sampling)
            word = step.response.content
            calls = [ToolCall(id="guess", name=GUESS.name, args={"word": word})] if is_guess(word) else []
            return replace(step, response=LLMResponse(content=word, tool_calls=calls))

        return super().run_white_box(guess, session, limits)


class Sessions(ResourceSessionFactory[StepEnvSessionAdapter]):
    """A session with the environment for each game; games of one group have one seed, and so one word."""

    def __init__(self, url: str):
        self._url = url

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> StepEnvSessionAdapter:
        return StepEnvSessionAdapter(
            WordleEnv(base_url=self._url),
            task=task,
            seed=seed,
            episode_id=episode_id,
            tool_specs=[GUESS],
            action_builder=lambda name, arguments: WordleAction(guesses=[arguments["word"]]),
            initial_messages_builder=lambda result, task: [{"role": "user", "content": ""}],
            tool_result_builder=marked,
            reset_kwargs={"strict": False},
        )


def marked(name: str, arguments: dict[str, Any], result: StepResult[WordleObservation], state: Any) -> ToolResult:
    """The last guess with its marks, in the tokenizer's text."""
    (board,) = result.observation.boards
    pairs = zip(board.guesses[-1], board.marks[-1], strict=True)
    return ToolResult(data="".join(letter + mark for letter, mark in pairs), done=bool(result.done))


class Reports(TrainerCallback):
    """Reports steps and their syncs as the demo's own trainer does."""

    def __init__(self, transfer: WeightcastTransfer, elements: int, steps: int):
        self._transfer, self._elements, self._steps = transfer, elements, steps
        self._stepped = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        report("begin", elements=self._elements, nbytes=2 * self._elements, version=0, step=0)

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._stepped = time.time()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        sync = self._transfer.last
        if not logs or "loss" not in logs or sync is None:
            return
        if sync.nbytes:  # else nothing was new, or the bucket did not take it yet
            self._report_commit(state.global_step, sync)
        self._report_step(state.global_step, logs)

    def _report_commit(self, step: int, sync: Sync) -> None:
        committed = self._stepped + sum(sync.seconds.get(phase, 0.0) for phase in ("detect", "upload"))
        report(
            "commit",
            step=step,
            version=sync.version,
            changed=sync.changed / self._elements,
            nbytes=sync.nbytes,
            broadcast=sync.broadcast,
            stepped=self._stepped,
            committed=committed,
            seconds=dict(sync.seconds),
        )

    def _report_step(self, step: int, logs: dict[str, float]) -> None:
        report("rollouts", games=int(logs["batch/samples_per_step"]), reward=logs["reward"])
        report(
            "step",
            step=step,
            of=self._steps,
            staleness=round(logs["sample/staleness_mean"]),
            reward=logs["reward"],
            wins=None,
            kl=logs["kl"],
            seconds=logs["perf/fwd_bwd_s"],
            waited=logs["perf/rollout_wait_s"],
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channel", required=True, help="hf://buckets/OWNER/NAME, s3://…, a folder")
    parser.add_argument("--environment", required=True, metavar="URL")
    parser.add_argument("--vllm", default="http://localhost:8000", help="where rollouts come from")
    parser.add_argument("--model", default=str(CHECKPOINT))
    parser.add_argument("--output", type=Path, default=Path("checkpoints"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--words", type=int, default=8, help="different ones in a step")
    parser.add_argument("--games", type=int, default=8, help="of each")
    parser.add_argument("--lr", type=float, default=2e-4)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if not torch.cuda.is_available():
        use_cpu()
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    transfer = WeightcastTransfer(given.channel)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    batch = given.words * given.games
    config = AsyncGRPOConfig(
        output_dir=str(given.output),
        vllm_server_base_url=given.vllm,
        max_steps=given.steps,
        learning_rate=given.lr,
        adam_beta1=0.97,
        adam_beta2=0.99,
        adam_epsilon=1e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        num_generations=given.games,
        per_device_train_batch_size=batch,
        bf16=torch.cuda.is_available(),  # most CPUs compute in it several times as slowly
        gradient_checkpointing=False,
        token_budget=0,  # so many games a step, however long they are
        max_completion_length=LENGTH,
        max_tool_calling_iterations=TURNS,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        use_cpu=not torch.cuda.is_available(),
    )
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": ""}]}])
    trainer = AsyncGRPOTrainer(
        model=given.model,
        reward_funcs=[],
        args=config,
        train_dataset=dataset,
        processing_class=tokenizer,
        rollout_worker=HarnessRolloutWorker(
            harness_session_factory=partial(Sessions, given.environment),
            harness_adapter=Guesses(),
            model_name="wordle",
            dataset=dataset,
            reward_funcs=[],
            processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id],
            num_generations=given.games,
            max_inflight_tasks=batch // 2,
            queue_maxsize=batch,
            vllm_server_url=given.vllm,
            max_tokens=LENGTH,
            max_tool_calling_iterations=TURNS,
        ),
        weight_transfer=transfer,
    )
    elements = sum(parameter.numel() for parameter in trainer.model.parameters())
    trainer.add_callback(Reports(transfer, elements, given.steps))
    trainer.train()
    assert transfer.last is not None
    report("end", version=transfer.last.version, digest=published(trainer.model).digest)


if __name__ == "__main__":
    main()
