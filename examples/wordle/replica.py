"""Box 3, a rollout replica: answers completions while a thread keeps its weights at the channel's newest version.

    python -m examples.wordle.replica --channel hf://buckets/me/wordle --name tokyo --port 8001

Small on purpose, and for a network that is trusted: it asks for no key. For real work use vLLM with the plug-in
(docs/guides/engines.md).
"""

from __future__ import annotations

import argparse
import copy
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Literal

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Response
from pydantic import BaseModel, Field
from transformers import DynamicCache, Qwen3ForCausalLM

import weightcast as wc
from examples.wordle.events import report
from examples.wordle.policy import CONTEXT, TOKENS, config, text_of
from weightcast.torch import TorchTarget

LARGEST = 1024
"""Prompts that are sampled at a time: no more are taken once there are so many."""
POLL_EVERY = 0.05
"""Seconds between two polls of the channel."""

Token = Annotated[int, Field(ge=0, lt=len(TOKENS))]
Prompt = Annotated[list[Token], Field(min_length=1, max_length=CONTEXT)]


class CompletionRequest(BaseModel):
    """As OpenAI's, with prompts as token numbers. Other fields of theirs are ignored."""

    model: str = "wordle"
    prompt: Annotated[list[Prompt], Field(min_length=1, max_length=1024)]
    max_tokens: Annotated[int, Field(ge=1, le=CONTEXT)] = 5
    temperature: Literal[0] | Annotated[float, Field(ge=0.01, le=10)] = 1.0


class Logprobs(BaseModel):
    token_logprobs: list[float]
    """Before any temperature."""


class Choice(BaseModel):
    index: int
    text: str
    token_ids: list[int]
    logprobs: Logprobs


class Completion(BaseModel):
    model: str
    choices: list[Choice]


@dataclass(frozen=True)
class Sampled:
    tokens: list[list[int]]
    logprobs: list[list[float]]
    version: int


@dataclass(frozen=True)
class _Waiting:
    request: CompletionRequest
    answer: Future[Sampled]

    @property
    def kind(self) -> tuple[int, int, float]:
        """What may be sampled in one batch: the same lengths, the same temperature."""
        return len(self.request.prompt[0]), self.request.max_tokens, self.request.temperature


class Replica:
    """A model that is sampled from by one thread and kept up to date by another; a lock lies between the two."""

    def __init__(self, channel: str, name: str, on_event: Sequence[wc.Sink] = ()):
        self._published = Qwen3ForCausalLM(config()).bfloat16()
        """What the channel writes into."""
        self._model = copy.deepcopy(self._published).float()
        """The same numbers, for sampling: most CPUs compute in bf16 several times as slowly."""
        self._weights = threading.Lock()
        """Held while a batch is sampled, and while an update is written."""
        self._waiting: SimpleQueue[_Waiting] = SimpleQueue()
        self._channel, self._name, self._on_event = channel, name, on_event
        self.version: int | None = None

    def start(self) -> None:
        for target in (self._sample_forever, self._follow_forever):
            threading.Thread(target=target, daemon=True).start()

    # -- the weights ---------------------------------------------------------------------------------------------------

    def _follow_forever(self) -> None:
        """Bring the weights to each new version; whatever goes wrong, those that are there stay and are served."""
        told = None
        while True:
            try:
                with wc.Subscriber(
                    self._channel, self._published, replica=self._name, on_event=self._on_event
                ) as subscriber:
                    while True:
                        if not self._update(subscriber):
                            time.sleep(POLL_EVERY)
                        told = None
            except Exception as error:  # noqa: BLE001 - it is reported; the weights that are there go on being served
                waiting = self.version is None and isinstance(error, wc.errors.ChannelError)
                text = "waits for the channel to begin" if waiting else str(error)
                if text != told:  # an outage is told once
                    told = text
                    report("trouble", replica=self._name, text=told)
                time.sleep(1)

    def _update(self, subscriber: wc.Subscriber) -> bool:
        """Fetch, decode and verify while sampling goes on; then write in a pause. False if nothing is new."""
        began = time.monotonic()
        staged = subscriber.poll()
        if staged is None:
            return False
        ready = time.monotonic()
        with self._weights:
            paused = time.monotonic()
            self.version = subscriber.apply(staged).version
            self._model.load_state_dict(self._published.state_dict())
            pause = time.monotonic() - paused
        report(
            "version",
            replica=self._name,
            version=self.version,
            nbytes=staged.nbytes,
            stage=ready - began,
            wait=paused - ready,
            pause=pause,
        )
        return True

    def proof(self) -> tuple[int | None, str]:
        """The version, and the digest of the weights that are sampled with, as they are in memory now."""
        with self._weights:
            sampled = copy.deepcopy(self._model).bfloat16()
            pairs = zip(sampled.parameters(), self._model.parameters(), strict=True)
            if not all(torch.equal(rounded.float(), exact) for rounded, exact in pairs):
                raise RuntimeError("the weights that are sampled with are not bf16")
            return self.version, wc.fingerprint(TorchTarget(sampled)).digest

    # -- sampling ------------------------------------------------------------------------------------------------------

    def complete(self, request: CompletionRequest) -> Sampled:
        """Sample, together with whatever else is waiting."""
        waiting = _Waiting(request, Future())
        self._waiting.put(waiting)
        return waiting.answer.result()

    def _sample_forever(self) -> None:
        while True:
            taken = [self._waiting.get()]
            while not self._waiting.empty() and sum(len(one.request.prompt) for one in taken) < LARGEST:
                taken.append(self._waiting.get())
            for _, alike in groupby(sorted(taken, key=lambda one: one.kind), key=lambda one: one.kind):
                self._sample_batch(list(alike))

    def _sample_batch(self, batch: Sequence[_Waiting]) -> None:
        request = batch[0].request
        prompts = torch.tensor([prompt for one in batch for prompt in one.request.prompt])
        try:
            with self._weights:
                version = self.version
                assert version is not None
                tokens, logprobs = sample(self._model, prompts, request.max_tokens, request.temperature)
        except Exception as error:  # noqa: BLE001 - whoever waits for an answer is told
            for one in batch:
                one.answer.set_exception(error)
            return
        first = 0
        for one in batch:
            rows = slice(first, first := first + len(one.request.prompt))
            one.answer.set_result(Sampled(tokens[rows].tolist(), logprobs[rows].tolist(), version))


@torch.inference_mode()
def sample(
    model: Qwen3ForCausalLM, prompts: torch.Tensor, count: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample ``count`` tokens after each prompt, greedily at temperature 0; they and their log-probabilities."""
    cache, tokens, logprobs, step = DynamicCache(), [], [], prompts
    for _ in range(count):
        logits = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        if temperature == 0:
            step = logits.argmax(-1, keepdim=True)
        else:
            step = torch.multinomial(torch.softmax(logits / temperature, -1), 1)
        tokens.append(step)
        logprobs.append(torch.log_softmax(logits, -1).gather(1, step))
    return torch.cat(tokens, 1), torch.cat(logprobs, 1)


def make_app(replica: Replica) -> FastAPI:
    app = FastAPI(title="A rollout replica")

    @app.post("/v1/completions")
    def completions(request: CompletionRequest, response: Response) -> Completion:
        """Every answer names the version of the weights that all of it was made with, as vLLM with the plug-in does."""
        if replica.version is None:
            raise HTTPException(503, "no version has arrived yet")
        if len({len(prompt) for prompt in request.prompt}) > 1:
            raise HTTPException(422, "prompts of one request have one length")
        if len(request.prompt[0]) + request.max_tokens > CONTEXT:
            raise HTTPException(422, f"prompt and answer have at most {CONTEXT} tokens together")
        sampled = replica.complete(request)
        response.headers["x-weight-version"] = str(sampled.version)
        choices = [
            Choice(index=index, text=text_of(ids), token_ids=ids, logprobs=Logprobs(token_logprobs=logprobs))
            for index, (ids, logprobs) in enumerate(zip(sampled.tokens, sampled.logprobs, strict=True))
        ]
        return Completion(model=request.model, choices=choices)

    @app.get("/health")
    def health() -> dict[str, int | None]:
        return {"version": replica.version}

    @app.get("/proof")
    def proof() -> dict[str, int | str | None]:
        version, digest = replica.proof()
        return {"version": version, "digest": digest}

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--channel", required=True, help="where the trainer publishes: a folder, s3://…, hf://buckets/…"
    )
    parser.add_argument("--name", default="replica", help="in heartbeats and reports")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--threads", type=int, default=1, help="that compute")
    parser.add_argument("--events", type=Path, metavar="FILE", help="append what phases took")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    wc.warm_up()
    replica = Replica(given.channel, given.name, [wc.JsonLines(given.events)] if given.events else [])
    replica.start()
    report("begin", replica=given.name, address=f"http://{given.host}:{given.port}")
    uvicorn.run(make_app(replica), host=given.host, port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
