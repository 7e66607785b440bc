"""A vLLM of this very process that is asked about a picture at each version of a channel, and prints JSON:
`python pictures_in_process.py MODEL CHANNEL MIRROR`.

It publishes the versions itself: 0 and 2 are the model's own weights, 1 has another encoder for pictures.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import on_cpu  # noqa: F401 -- before vLLM
from pictures import picture
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, channel, mirror = sys.argv[1:]
    llm = LLM(
        model, dtype="bfloat16", max_model_len=256, enforce_eager=True, weight_transfer_config={"backend": "weightcast"}
    )
    from written import Written

    from weightcast.engine.agent import Agent  # not before: vLLM on a CPU cannot start once numba is imported
    from weightcast.engine.proof import prove
    from weightcast.engine.vllm.host import InProcess

    wanted = SamplingParams(max_tokens=8, temperature=0, logprobs=0, ignore_eos=True)
    seen = {"prompt": "abc", "multi_modal_data": {"image": picture()}}

    def ask() -> list[Any]:
        """What it makes of the picture."""
        (answer,) = llm.generate(seen, wanted, use_tqdm=False)
        told = answer.outputs[0]
        return [list(told.token_ids), told.cumulative_logprob]

    written, said = Written(model, channel), []
    with Agent(channel, InProcess(llm), mirror) as agent:
        for version in (0, 1, 2):
            if version:
                written.flip("vision_model.")
                written.publish()
            agent.step()
            proof = prove(agent.engine, agent.subscriber.chain)
            assert (proof.version, proof.holds) == (version, True), proof
            said.append([ask(), ask()])
    written.close()
    print(json.dumps(said))
