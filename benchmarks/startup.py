"""CPU seconds of the quick verbs, median of ten processes each, beside `hf` where it is installed, as one JSON object.

python benchmarks/startup.py
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import weightcast as wc

RUNS = 10


def cpu_seconds(command: list[str]) -> float:
    """User and system time of one run, its children included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def small_channel(folder: str) -> str:
    weights = wc.Arrays({"w": np.zeros(1000, np.float32)})
    wc.init(folder, weights)
    with wc.Publisher(folder, weights) as publisher:
        for step in range(1, 6):
            weights.read("w")[step] = 1
            publisher.publish(step=step)
    return folder


def commands(url: str) -> dict[str, list[str]]:
    ours = [sys.executable, "-m", "weightcast"]
    found = {
        "weightcast --version": [*ours, "--version"],
        "weightcast --help": [*ours, "--help"],
        "weightcast log": [*ours, "log", url],
        "weightcast status": [*ours, "status", url],
        "weightcast plan": [*ours, "plan", url, "--from", "nothing"],
        "import weightcast": [sys.executable, "-c", "import weightcast"],
    }
    hf = Path(sys.executable).with_name("hf")
    if hf.exists():
        found |= {"hf version": [str(hf), "version"], "hf --help": [str(hf), "--help"]}
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        named = commands(small_channel(folder))
        taken: dict[str, list[float]] = {name: [] for name in named}
        for _ in range(RUNS):  # in turn, so that a busy moment of the machine falls on all of them
            for name, command in named.items():
                taken[name].append(cpu_seconds(command))
    print(json.dumps({name: round(statistics.median(times), 3) for name, times in taken.items()}, indent=2))


if __name__ == "__main__":
    main()
