"""What a mirror and the folder of `weightcast squash` take on the disk, in copies of the weights, as JSON.

    python benchmarks/disk.py [--elements N] [--versions N] [--density D]

After every eighth version both are brought up to date, as the commands do it. Sizes do not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import weightcast as wc

TENSORS = 4


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def run(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "weightcast", *words, "--quiet"], check=True, stdout=subprocess.DEVNULL)


def measure(elements: int, versions: int, density: float, folder: Path) -> list[dict[str, float]]:
    """Copies of the weights that each takes, by version."""
    rng = np.random.default_rng(0)
    arrays = {f"w{i}": rng.integers(0, 1 << 16, elements // TENSORS, np.uint16) for i in range(TENSORS)}
    weights = wc.Arrays(arrays, dict.fromkeys(arrays, "BF16"))
    url, mirror, squasher = (folder / name for name in ("channel", "mirror", "squasher"))
    wc.init(url, weights)
    found = []
    with wc.Publisher(url, weights) as publisher:
        for version in range(1, versions + 1):
            for bits in arrays.values():
                bits[rng.integers(0, bits.size, int(bits.size * density))] ^= 1
            publisher.publish().result()
            if version % 8 == 2:
                run("pull", url, mirror)
                run("squash", url, "--folder", squasher)
                taken = {"mirror": size(mirror), "squash": size(squasher)}
                found.append({"version": version} | {name: at / (2 * elements) for name, at in taken.items()})
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=20_000_000)
    parser.add_argument("--versions", type=int, default=130)
    parser.add_argument("--density", type=float, default=0.01)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        for line in measure(options.elements, options.versions, options.density, Path(place)):
            print(json.dumps({name: round(value, 2) for name, value in line.items()}), flush=True)
