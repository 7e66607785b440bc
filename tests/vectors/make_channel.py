"""Write a golden channel of docs/SPEC.md sections 11 to 13 into channel-v1/ beside this file, once.

    PYTHONPATH=src:tests/support python tests/vectors/make_channel.py

It is never written again (SPEC 9.4). `expected.json` has the position digest of every version.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from cases import gaussian, moved

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.pins import pin
from weightcast.publish.from_checkpoint import cut_anchor
from weightcast.store import open_store
from weightcast.upkeep.collect import PROBES
from weightcast.upkeep.squash import squash

HERE = Path(__file__).parent / "channel-v1"
VERSIONS = 10


def main() -> None:
    if HERE.exists():
        print("it is there already")
        return
    rng = np.random.default_rng(11)
    arrays = {
        "a.weight": gaussian(rng, 300).reshape(20, 15),
        "b.weight": gaussian(rng, 64),
        "norm": np.ones(4, np.float32),
    }
    dtypes = {"a.weight": "BF16", "b.weight": "BF16"}
    model = wc.Arrays(arrays, dtypes, {"tied.weight": "a.weight"})
    expected = [wc.init(HERE / "bucket", model, writer="golden").position.digest]
    with wc.Publisher(HERE / "bucket", model, writer="golden") as publisher:
        for step in range(1, VERSIONS + 1):
            for name in dtypes:
                model.write(name, moved(rng, model.read(name), 0.05))
            expected.append(publisher.publish(step=10 * step).result().position.digest)
    chain = Chain.open(open_store(HERE / "bucket"))
    with tempfile.TemporaryDirectory() as scratch:
        list(squash(chain, Path(scratch) / "squash", levels=(4, 8)))
        with wc.Subscriber(HERE / "bucket", Path(scratch) / "mirror", wc.Pinned(5)) as subscriber:
            staged = subscriber.poll()
            assert staged is not None
            subscriber.apply(staged)
            cut_anchor(chain, subscriber.mirror)
    pin(chain, 3)
    for listed in list(chain.store.list(PROBES)):
        chain.store.delete(listed.key)
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
