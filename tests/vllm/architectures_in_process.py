"""Real vLLM follows a channel, one architecture after the other: `python architectures_in_process.py FOLDER`.

Reads names of `architectures.ARCHITECTURES`, a line each, and answers each with a line of JSON. vLLM is imported once;
each engine lives in a fork of this process, since no second one starts where numba was imported.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import on_cpu  # noqa: F401 -- before vLLM
from architectures import ARCHITECTURES, make
from vllm import LLM, SamplingParams
from vllm.model_executor.models import registry

PROMPTS = ([1, 2, 3], [40, 41, 42, 43, 44, 45], [500, 7])
VERSIONS = 3


@contextmanager
def following(llm: LLM, channel: Path, mirror: Path) -> Iterator[tuple[Callable[[], Any], Callable[[], Any]]]:
    """Two functions: one brings the engine to the head, the other proves it. All of agents that is known here."""
    from weightcast.engine.agent import Agent
    from weightcast.engine.proof import prove
    from weightcast.engine.vllm.host import InProcess

    with Agent(str(channel), InProcess(llm), mirror) as agent:

        def step() -> dict[str, Any] | None:
            update = agent.step()
            return update and {"reloaded": update.reloaded, "unproven": list(update.unproven)}

        def check() -> dict[str, Any]:
            proof = prove(agent.engine, agent.subscriber.chain)
            return {"version": proof.version, "holds": proof.holds, **proof.as_json()}

        yield step, check
        agent.catch_up()
        agent.subscriber.mirror.fold()


def follow(name: str, folder: Path) -> dict[str, Any]:
    """An engine that starts at version 0, and what it is at each later version."""
    began = time.monotonic()
    model, mirror, channel = make(name, folder / "model"), folder / "mirror", folder / "channel"
    llm = engine(model)
    if ARCHITECTURES[name].apart:
        hold_apart(llm, [one for made in ARCHITECTURES[name].derived.values() for one in made])
    import numpy as np

    import weightcast as wc  # not before: vLLM on a CPU cannot start once numba is imported

    with wc.Checkpoint(model) as files:
        arrays = {spec.name: files.read(spec.name).reshape(spec.shape).copy() for spec in files.table}
        weights = wc.Arrays(arrays, dtypes={spec.name: spec.dtype for spec in files.table})
        wc.init(str(channel), files)
    rng = np.random.default_rng(0)
    told: dict[str, Any] = {"before": answers(llm), "updates": [], "proofs": []}
    with wc.Publisher(str(channel), weights) as publisher, following(llm, channel, mirror) as (step, check):
        step()
        for _ in range(VERSIONS):
            for spec in weights.table:
                change(weights.read(spec.name), spec.dtype, rng)
            publisher.publish().result(60)
            told["updates"].append(step())
            told["proofs"].append(check())
    for path in model.iterdir():
        if path.suffix != ".safetensors" and not (mirror / path.name).exists():
            shutil.copy(path, mirror)
    told |= {"after": answers(llm), "derived": derived(llm), "again": answers(llm)}
    return {**told, "seconds": time.monotonic() - began}


def hold_apart(llm: LLM, parameters: list[str]) -> None:
    """Turn parameters that are views of others into copies."""

    def copy(worker: Any) -> None:
        for name in parameters:
            parameter = worker.get_model().get_parameter(name)
            parameter.data = parameter.data.clone()

    llm.llm_engine.collective_rpc(copy)


def derived(llm: LLM) -> dict[str, Any]:
    """What vLLM derived from parameters after loading; it is derived again, which must change nothing."""
    from weightcast.engine.vllm.derived import derived_in_vllm

    def look(worker: Any) -> dict[str, Any]:
        found = derived_in_vllm(worker.get_model(), worker.vllm_config)
        found.derive_again(found.again)
        names = [name for name, _ in worker.get_model().named_parameters()]
        read = [name for name in names if name in found.again and name not in found.made]
        return {"of": read, "made": sorted(found.made), "reload": dict(found.reload), "unsupported": found.unsupported}

    (told,) = llm.llm_engine.collective_rpc(look)
    return dict(told)


def change(bits: Any, dtype: str, rng: Any) -> None:
    """Change some of a tensor's bits, so that all values stay finite and about as big."""
    mantissa = {"BF16": 7, "F16": 10, "F32": 23}[dtype]
    which = rng.choice(bits.size, max(1, bits.size // 20), replace=False)
    bits[which] ^= rng.integers(1, 1 << mantissa, which.size).astype(bits.dtype)


def start(_: str, folder: Path) -> dict[str, Any]:
    """What a fresh engine answers that loads the mirror."""
    began = time.monotonic()
    return {"fresh": answers(engine(folder / "mirror")), "seconds_fresh": time.monotonic() - began}


def engine(folder: Path) -> LLM:
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=4,
        enforce_eager=True,
        weight_transfer_config={"backend": "weightcast"},
    )


def answers(llm: LLM) -> list[Any]:
    """Greedy continuations of each prompt, and how likely the likeliest tokens are at each place."""
    wanted = SamplingParams(max_tokens=6, temperature=0, logprobs=4, ignore_eos=True, detokenize=False)
    found = []
    for prompt in PROMPTS:
        (answer,) = llm.generate({"prompt_token_ids": prompt}, wanted, use_tqdm=False)
        told = answer.outputs[0]
        likely = [sorted((token, one.logprob) for token, one in at.items()) for at in told.logprobs]
        found.append([list(told.token_ids), likely])
    return found


def forked(run: Callable[[str, Path], dict[str, Any]], name: str, folder: Path) -> dict[str, Any]:
    """What a function returns in a process of its own; ``error`` if it raises, or the process dies."""
    told = folder / "told.json"
    told.unlink(missing_ok=True)
    process = os.fork()
    if not process:
        try:
            answer = run(name, folder)
        except BaseException as error:  # noqa: BLE001 -- told by the process that waits
            answer = {"error": f"{type(error).__name__}: {error}"}
        told.write_text(json.dumps(answer))
        os._exit(0)
    _, status = os.waitpid(process, 0)
    answer = json.loads(told.read_text()) if told.exists() else {"error": f"the engine died: status {status}"}
    return dict(answer)


if __name__ == "__main__":
    # vLLM looks at each architecture's class in a process of its own, which imports all of vLLM once more.
    registry._run_in_subprocess = lambda look: look()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    for line in sys.stdin:
        folder = Path(sys.argv[1]) / line.strip()
        folder.mkdir()
        told = forked(follow, line.strip(), folder)
        if "error" not in told:
            told |= forked(start, line.strip(), folder)
        print(json.dumps(told), file=out, flush=True)
