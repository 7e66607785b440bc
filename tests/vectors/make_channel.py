"""Write a golden channel of docs/SPEC.md sections 11 to 13 into channel-v1/ beside this file, if it is not there.

    PYTHONPATH=src:tests/support python tests/vectors/make_channel.py

Version 7 is three objects of boxes in a folder. From the first release on the channel is never written again (SPEC
9.4). `expected.json` has the position digest of every version.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from cases import gaussian, moved
from several import publish_objects

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.pins import pin
from weightcast.publish.from_checkpoint import cut_anchor
from weightcast.store import open_store
from weightcast.upkeep.collect import PROBES
from weightcast.upkeep.squash import squash

HERE = Path(__file__).parent / "channel-v1"
VERSIONS = 10
IN_BOXES = 7


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

    def train(version: int) -> wc.Arrays:
        """A step of the model; returns the weights before it."""
        before = wc.Arrays.copy_of(model)
        for name in dtypes:
            model.write(name, moved(rng, model.read(name), 0.3 if version == IN_BOXES else 0.05))
        return before

    def publish(versions: range) -> None:
        with wc.Publisher(HERE / "bucket", model, writer="golden") as publisher:
            for version in versions:
                train(version)
                expected.append(publisher.publish(step=10 * version).result().position.digest)

    publish(range(1, IN_BOXES))
    chain = Chain.open(open_store(HERE / "bucket"))
    expected.append(publish_objects(chain, train(IN_BOXES), model).position.digest)
    publish(range(IN_BOXES + 1, VERSIONS + 1))
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
