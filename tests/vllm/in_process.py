"""A vLLM of this very process that follows a channel: `python in_process.py MODEL CHANNEL MIRROR`, prints JSON."""

import json
import sys

import on_cpu  # noqa: F401 -- before vLLM
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, channel, mirror = sys.argv[1:]
    llm = LLM(
        model, dtype="bfloat16", max_model_len=256, enforce_eager=True, weight_transfer_config={"backend": "weightcast"}
    )
    from weightcast.engine.agent import Agent  # not before: vLLM on a CPU cannot start once numba is imported
    from weightcast.engine.proof import prove
    from weightcast.engine.vllm.host import InProcess

    greedy, long = SamplingParams(max_tokens=8, temperature=0), {"prompt_token_ids": list(range(1, 201))}

    def cached() -> int:
        """Tokens of a long prompt whose keys and values vLLM still had."""
        return llm.generate(long, greedy, use_tqdm=False)[0].num_cached_tokens

    before = [cached() > 0, cached() > 0]
    with Agent(channel, InProcess(llm), mirror) as agent:
        update = agent.step()
        proof = prove(agent.engine, agent.subscriber.chain)
        after = [cached() > 0, cached() > 0]
        (answer,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, greedy, use_tqdm=False)
        spans = [span.version for span in getattr(answer.outputs[0], "weight_versions", ())]
        told = {"reloaded": update.reloaded, "version": proof.version, "holds": proof.holds, "spans": spans}
        print(json.dumps({**told, "cached": [before, after]}))
