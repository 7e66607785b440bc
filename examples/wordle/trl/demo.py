"""The real stack on this machine's CPUs: TRL's AsyncGRPO, vLLM with the plug-in and its agent, the same environment.

    make demo-vllm

The engine's box is the start script of its Space: vLLM on an inner port, the agent, and the proxy in front.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import weightcast as wc
from examples.wordle.boxes import PATIENCE, Boxes, free_port
from examples.wordle.demo import add_output_options, module, port, present
from examples.wordle.evaluation import Evaluation
from examples.wordle.players import measure, version_of
from examples.wordle.policy import CHECKPOINT
from examples.wordle.record import Record
from examples.wordle.summary import Proof

ROOT = Path(__file__).parents[3]
START = ROOT / "examples" / "wordle" / "spaces" / "vllm" / "start.sh"
VLLM = (
    # Most CPUs compute in bf16 several times as slowly; the channel's bf16 weights are cast exactly.
    "--dtype float32 --max-model-len 64 --enforce-eager --kv-cache-memory-bytes 67108864 --max-num-seqs 256"
    # A prompt with a seed, as TRL's have, must not be prefilled in pieces on a CPU.
    " --max-num-batched-tokens 16384"
)


class Demo:
    """Starts the boxes, measures the policy before and after, and records what they report."""

    must_learn = False  # in so few steps

    def __init__(self, boxes: Boxes, given: argparse.Namespace, folder: Path):
        self.record = Record()
        self._boxes, self._given = boxes, given
        self._sockets = tempfile.TemporaryDirectory(prefix="weightcast-")  # a socket's path has at most 107 characters
        self._ended = False
        """The trainer has, and well."""
        self._digests: dict[int, str] = {}
        """Of each version that the agent made live; in the end they are compared with the trainer's own."""
        self._channel, self._inner = str(folder / "bucket"), str(free_port())
        self._environment, self._engine = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        boxes.add("environment", module("environment", "--port", port(self._environment)))
        boxes.add("engine", ["bash", str(START)], self._engine_settings(folder))
        trainer = module("trl.train", "--channel", self._channel, "--environment", self._environment)
        options = ["--vllm", self._engine, "--steps", str(given.steps), "--output", str(folder / "checkpoints")]
        boxes.add("trainer", [*trainer, *options], {"OMP_NUM_THREADS": "1"})

    def _engine_settings(self, folder: Path) -> dict[str, str]:
        return {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            # A plug-in of vLLM that hides AMX: some virtual machines advertise it and die in it.
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'vllm' / 'site'}",
            "CHANNEL": self._channel,
            "MODEL": str(CHECKPOINT),
            "MIRROR": str(folder / "mirror"),
            "PORT": port(self._engine),
            "INNER": self._inner,
            "EVERY": "0.05",
            "VLLM_ARGS": VLLM,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "TORCH_COMPILE_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": self._sockets.name,
        }

    def run(self) -> dict[str, Proof]:
        with wc.Checkpoint(CHECKPOINT) as weights:
            wc.init(self._channel, weights)
        for name in ("environment", "engine"):
            self._boxes[name].start()
        self.record.before = self._measure(0)
        self._boxes["trainer"].start()
        while not self._ended:
            self._receive()
        assert self.record.head is not None
        self.record.after = self._measure(self.record.head)
        return {"engine": self._proof()}

    def _check(self) -> None:
        """Ends the demo if a box has ended."""
        for name in ("environment", "engine"):
            if not self._boxes[name].is_running:
                raise SystemExit(self._boxes[name].exit_message(1))

    def _receive(self) -> None:
        """Record what a box reports next, if one does soon."""
        message = self._boxes.receive()
        if message is None:
            return
        fields = message.fields
        if fields["event"] == "version":
            self._digests[fields["version"]] = fields["digest"]
        if fields["event"] != "gone":
            self.record.take(message)
        elif message.box != "trainer" or fields["code"] != 0:
            raise SystemExit(self._boxes[message.box].exit_message(fields["code"]))
        else:
            self._ended = True

    def _measure(self, version: int) -> Evaluation:
        end = time.monotonic() + PATIENCE
        while version_of(self._engine) != version:
            self._check()
            if time.monotonic() > end:
                raise SystemExit(f"the engine is not at version {version} after {PATIENCE:.0f} s")
            time.sleep(0.5)
        return measure(self._environment, [self._engine], version, self._given.evaluate, self._check)

    def _proof(self) -> Proof:
        """What the engine's workers hold, digested in place and compared with the channel's manifest."""
        command = [sys.executable, "-m", "weightcast", "verify", self._channel, "--json"]
        engine = ["--engine", f"http://127.0.0.1:{self._inner}"]
        found = json.loads(subprocess.run([*command, *engine], capture_output=True, text=True, check=True).stdout)
        self.record.exact = not (found["wrong"] or found["unproven"] or found["absent"] or found["uncovered"])
        while found["version"] not in self._digests:  # the agent's line is still on its way
            self._receive()
        return Proof(found["version"], self._digests[found["version"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--evaluate", type=int, default=2, metavar="N", help="games of every word, before and after")
    add_output_options(parser)
    given = parser.parse_args()
    title = "Wordle by TRL and vLLM over one bucket"
    present(title, lambda boxes, folder: Demo(boxes, given, folder), given.folder, given.svg)


if __name__ == "__main__":
    main()
