"""A vLLM of this very process that loads adapters: `python adapter_in_process.py MODEL FOLDER…`, prints JSON."""

import json
import shutil
import sys
from pathlib import Path

import on_cpu  # noqa: F401 -- before vLLM
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

if __name__ == "__main__":
    model, *folders = sys.argv[1:]
    llm = LLM(
        model, dtype="bfloat16", max_model_len=256, enforce_eager=True, enable_lora=True, max_lora_rank=8, block_size=32
    )
    greedy = SamplingParams(max_tokens=12, temperature=0, logprobs=3)

    def answer(adapter: LoRARequest | None) -> object:
        prompt = {"prompt_token_ids": list(range(20, 120))}
        (given,) = llm.generate(prompt, greedy, use_tqdm=False, lora_request=adapter)
        best = given.outputs[0]
        return [list(best.token_ids), [{token: one.logprob for token, one in at.items()} for at in best.logprobs]]

    answers = [answer(LoRARequest(f"adapter-{i}", i, folder)) for i, folder in enumerate(folders, 1)]
    live = Path(folders[0]).with_name("live")  # a mirror that goes from the first version to the last
    shutil.copytree(folders[0], live)
    before = answer(LoRARequest("live", 10, str(live)))
    shutil.copytree(folders[-1], live, dirs_exist_ok=True)
    inplace = answer(LoRARequest("live", 10, str(live), load_inplace=True))
    renamed = answer(LoRARequest("live-2", 11, str(live)))
    print(
        json.dumps(
            {"base": answer(None), "adapters": answers, "before": before, "inplace": inplace, "renamed": renamed}
        )
    )
