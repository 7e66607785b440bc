"""How long versions pause a vLLM server that is asked all the time, and what they cost it.

    python benchmarks/engine_server.py [--versions 50] [--every 1] [--clients 2] [--changed 0.01]

In vLLM's environment, on the CPU: a tiny Qwen3 (`--hidden`, `--layers` for a larger one) behind vLLM's own server, an
agent, a publisher and clients, each in processes of their own but the last two. First the clients ask alone, then with
one version per ``--every`` seconds. Prints JSON: the pause and its parts, the times from the call of `publish` to the
commit and from there to live, tokens per second with and without versions; and a table to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from statistics import median, quantiles
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "OMP_NUM_THREADS": "1"}

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import weightcast as wc

VOCABULARY = 512
SERVER = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--dtype", "bfloat16", "--enforce-eager"]
SERVER += ["--max-model-len", "256", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20)]
SERVER += ["--skip-tokenizer-init", "--weight-transfer-config", '{"backend": "weightcast"}']
SERVER += ["--middleware", "weightcast_vllm.Middleware"]


def make_model(folder: Path, hidden: int, layers: int) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=256,
        tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)


def free_port() -> int:
    """One that no outgoing connection takes meanwhile."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(12_000, 30_000)))
            return int(probe.getsockname()[1])


@contextmanager
def running(command: list[str], log: Path, **more: Any) -> Iterator[subprocess.Popen[str]]:
    """A process of a session of its own, killed with all that it started."""
    with log.open("w") as errors:
        started = subprocess.Popen(command, stderr=errors, text=True, start_new_session=True, **more)
    try:
        yield started
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


class Clients:
    """Requests that are always in flight; ``tokens`` were answered."""

    def __init__(self, url: str, model: str, many: int):
        self._url, self._model = url, model
        self.tokens = 0
        self.ended = False
        """Whether the server may be gone."""
        for seed in range(many):
            threading.Thread(target=self._ask, args=(seed,), daemon=True).start()

    def _ask(self, seed: int) -> None:
        while True:
            body = {"model": self._model, "prompt": [seed + 1, 5, 9], "max_tokens": 32, "ignore_eos": True}
            request = urllib.request.Request(
                f"{self._url}/v1/completions", json.dumps(body | {"temperature": 0, "detokenize": False}).encode(),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            try:
                with urllib.request.urlopen(request, timeout=120) as answer:
                    json.load(answer)
            except (OSError, HTTPException):
                if self.ended:
                    return
                raise
            self.tokens += 32

    def rate(self, seconds: float) -> float:
        before, began = self.tokens, time.monotonic()
        time.sleep(seconds)
        return (self.tokens - before) / (time.monotonic() - began)


def answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def spread(seconds: list[float]) -> dict[str, float]:
    cut = quantiles(seconds, n=100, method="inclusive")
    return {"p50_ms": 1000 * cut[49], "p99_ms": 1000 * cut[98], "longest_ms": 1000 * max(seconds)}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--versions", type=int, default=50)
    arguments.add_argument("--every", type=float, default=1.0, help="seconds from one version to the next")
    arguments.add_argument("--clients", type=int, default=2)
    arguments.add_argument("--changed", type=float, default=0.01)
    arguments.add_argument("--hidden", type=int, default=64)
    arguments.add_argument("--layers", type=int, default=2)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="wc-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        make_model(folder / "model", options.hidden, options.layers)
        found = measured(folder, options)
    print(json.dumps(found))
    for name, values in found.items():
        print(f"{name}: {values}", file=sys.stderr)


def measured(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    port, channel, model = free_port(), str(folder / "channel"), str(folder / "model")
    url = f"http://127.0.0.1:{port}"
    environment = os.environ | {
        "WEIGHTCAST_RUNTIME_DIR": str(folder / "run"),
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with wc.Checkpoint(model) as files:
        weights = wc.Arrays(
            {spec.name: files.read(spec.name).reshape(spec.shape).copy() for spec in files.table},
            dtypes={spec.name: spec.dtype for spec in files.table},
        )
    rng, live, published = np.random.default_rng(0), dict[int, dict[str, Any]](), dict[int, float]()
    committed: dict[int, float] = {}
    arrived: dict[int, float] = {}
    server = [*SERVER, "--model", model, "--host", "127.0.0.1", "--port", str(port)]
    attach = [sys.executable, "-m", "weightcast", "attach", channel, "--engine", url, "--every", "0.05", "--json"]
    attach += ["--mirror", str(folder / "mirror")]
    log = {"stdout": subprocess.DEVNULL, "env": environment}
    with wc.Publisher(channel, weights) as publisher, running(server, folder / "server.log", **log) as engine:
        while not answers(url):
            if engine.poll() is not None:
                raise SystemExit((folder / "server.log").read_text()[-4000:])
            time.sleep(0.2)
        with suppress(FileNotFoundError):  # its ranks spin: let agent and publisher run beside them
            Path(f"/proc/{engine.pid}/autogroup").write_text("19")
        with running(attach, folder / "agent.log", stdout=subprocess.PIPE, env=environment) as agent:

            def listen() -> None:
                assert agent.stdout is not None
                for line in agent.stdout:
                    event = json.loads(line)
                    if event["event"] == "version":
                        arrived[event["version"]], live[event["version"]] = time.monotonic(), event

            threading.Thread(target=listen, daemon=True).start()
            clients = Clients(url, model, options.clients)
            while clients.tokens < 200:
                time.sleep(0.1)
            alone = clients.rate(options.versions * options.every / 2)
            before, began = clients.tokens, time.monotonic()
            for version in range(1, options.versions + 1):
                for spec in weights.table:
                    bits = weights.read(spec.name)
                    bits[rng.choice(bits.size, max(1, int(bits.size * options.changed)), replace=False)] ^= 1
                published[version] = time.monotonic()
                publisher.publish().result(60)
                committed[version] = time.monotonic()
                time.sleep(max(0.0, published[version] + options.every - time.monotonic()))
            busy = (clients.tokens - before) / (time.monotonic() - began)
            while options.versions not in live:
                time.sleep(0.05)
            clients.ended = True
    events = list(live.values())
    phases = {phase for event in events for phase in event["seconds"]}
    return {
        "parameters": sum(spec.elements for spec in weights.table),
        "versions_live": len(events),
        "pause": spread([event["pause"] for event in events]),
        "publish_to_commit": spread([committed[version] - published[version] for version in published]),
        "commit_to_live": spread([arrived[version] - committed[version] for version in live if version in committed]),
        "phases_ms": {one: 1000 * median(event["seconds"].get(one, 0.0) for event in events) for one in sorted(phases)},
        "tokens_per_second": {"alone": alone, "with_versions": busy},
    }


if __name__ == "__main__":
    main()
