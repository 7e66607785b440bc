"""What it costs a replica to go back over its last versions, with what its mirror keeps and without.

    python benchmarks/back.py [--params 32000000] [--versions 8] [--back 7] [--density 0.01]

A mirror follows a channel version by version, folding each time, and is then asked for an older version: once as it is,
and once after its history was removed, so that it has to begin at an anchor. Both must end with that version's bits.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

import weightcast as wc


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--params", type=int, default=32_000_000)
    options.add_argument("--versions", type=int, default=8)
    options.add_argument("--back", type=int, default=7)
    options.add_argument("--density", type=float, default=0.01)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), chosen)))


def measure(folder: Path, chosen: argparse.Namespace) -> dict[str, object]:
    bucket, mirror = str(folder / "bucket"), folder / "mirror"
    digests = publish(bucket, chosen)
    for version in range(chosen.versions + 1):
        pull(bucket, mirror, version)
    goal = chosen.versions - chosen.back
    kept = sum(path.stat().st_size for path in (mirror / ".weightcast" / "history").iterdir())
    with_history = pull(bucket, mirror, goal, digests[goal])
    pull(bucket, mirror, chosen.versions)
    shutil.rmtree(mirror / ".weightcast" / "history")
    without = pull(bucket, mirror, goal, digests[goal])
    return {
        "model_bytes": 2 * chosen.params,
        "versions_back": chosen.back,
        "history_bytes": kept,
        "with_history": with_history,
        "without_history": without,
    }


def publish(bucket: str, chosen: argparse.Namespace) -> list[str]:
    """A channel of small steps; the digest of every version."""
    rng = np.random.default_rng(0)
    floats = rng.normal(0, 0.02, chosen.params).astype(np.float32).view(np.uint32)
    bits = ((floats + 0x8000) >> 16).astype(np.uint16)
    names = [f"layers.{at}.weight" for at in range(4)]
    arrays = {name: part.copy() for name, part in zip(names, np.array_split(bits, len(names)), strict=True)}
    model = wc.Arrays(arrays, dict.fromkeys(arrays, "BF16"))
    digests = [wc.init(bucket, model).position.digest]
    with wc.Publisher(bucket, model) as publisher:
        for step in range(1, chosen.versions + 1):
            for name in names:
                array = model.read(name)
                array[rng.choice(array.size, int(array.size * chosen.density), replace=False)] ^= 1
            digests.append(publisher.publish(step=step).result().position.digest)
    return digests


def pull(bucket: str, mirror: Path, version: int, digest: str | None = None) -> dict[str, object]:
    """Bring the mirror to a version, as `weightcast pull --version` does."""
    began = time.monotonic()
    with wc.Subscriber(bucket, mirror, wc.Pinned(version)) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        position = subscriber.apply(staged)
    assert digest is None or position.digest == digest
    return {"fetched_bytes": staged.nbytes, "seconds": round(time.monotonic() - began, 2)}


if __name__ == "__main__":
    main()
