"""The commands of docs/guides/engines.md for a CPU, as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from engines import free_port, running
from world import training

GUIDE = Path(__file__).parents[2] / "docs/guides/engines.md"
OWN = ("VLLM_", "WEIGHTCAST_", "ONEDNN_", "OMP_", "TORCH", "HF_", "PYTEST_", "XDG_")
"""What else a user's environment does not have."""


def block(beginning: str) -> str:
    """The block of commands on the page that begins so."""
    (found,) = (one for one in re.findall(r"```\n(.*?)```", GUIDE.read_text(), re.DOTALL) if one.startswith(beginning))
    return found


def test_commands_of_the_guide_for_a_cpu_work_as_written(model: Callable[[str], Path], tmp_path: Path) -> None:
    begun, port = model("qwen3"), free_port()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OWN)} | {"PATH": path}
    start = block("export ONEDNN").replace("--model MODEL", f"--model {shlex.quote(str(begun))}").rstrip()
    (attach,) = (line for line in block("pip install 'weightcast[vllm]'").splitlines() if "weightcast attach" in line)
    with (
        tempfile.TemporaryDirectory(prefix="wc-") as private,  # sockets have short paths
        training(begun, tmp_path / "channel") as trainer,
    ):
        environment["XDG_RUNTIME_DIR"] = private
        # The page leaves out the port, which is 8000.
        with running(["bash", "-ec", f"{start} --port {port}"], environment, str(begun), port) as engine:
            version = trainer.step()
            for name, value in {"s3://bucket/run-7": trainer.channel, "/data/mirror": str(tmp_path / "mirror")}.items():
                assert name in attach
                attach = attach.replace(name, shlex.quote(value))
            for _ in range(2):  # the second time it is there already
                done = subprocess.run(
                    ["bash", "-ec", f"{attach} --once"], env=environment, capture_output=True, text=True, timeout=240
                )
                assert done.returncode == 0, done.stderr
            assert f"the engine is at version {version} already" in done.stdout
            named, answer = engine.generate_named([1, 2, 3], 8)
            assert (named, len(answer.tokens)) == (str(version), 8)
