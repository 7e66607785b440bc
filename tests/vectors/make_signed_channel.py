"""Write a golden channel that is signed (docs/SPEC.md section 15) into channel-signed-v1/ beside this file.

    PYTHONPATH=src:tests/support python tests/vectors/make_signed_channel.py

The private keys are made of their names, and so worth nothing. `writer` signs up to version 4, `next-writer` from then
on; `cutter` a squash and a later anchor, `replica` a heartbeat. From the first release on the channel is never written
again (SPEC 9.4). `expected.json` has the root's public key and the position digest of every version.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import numpy as np
from cases import gaussian, moved

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import put_heartbeat
from weightcast.channel.keyring import Role
from weightcast.channel.keys import WRITER
from weightcast.channel.records import Heartbeat
from weightcast.channel.signing import PrivateKey
from weightcast.channel.trust import Signing, Trust
from weightcast.publish.from_checkpoint import cut_anchor
from weightcast.publish.open import init_signed
from weightcast.publish.publisher import Publisher
from weightcast.store import open_store
from weightcast.store.probe import PROBES
from weightcast.upkeep.keyring import add_key, revoke_key
from weightcast.upkeep.squash import squash

HERE = Path(__file__).parent / "channel-signed-v1"
ROLES: dict[str, Role] = {"writer": "writer", "cutter": "cutter", "replica": "replica"}


def key(name: str) -> PrivateKey:
    return PrivateKey(hashlib.sha256(name.encode()).digest())


def main() -> None:
    if HERE.exists():
        print("it is there already")
        return
    trust, bucket = Trust(str(key("root").public)), HERE / "bucket"

    def chain(name: str) -> Chain:
        return Chain.open(open_store(bucket), Signing(trust, key(name)))

    rng = np.random.default_rng(12)
    model = wc.Arrays({"a": gaussian(rng, 300).reshape(20, 15), "b": gaussian(rng, 64)}, {"a": "BF16", "b": "BF16"})
    begun = init_signed(Signing(trust, key("root")), bucket, model, writer="golden")
    expected = [begun.position.digest]
    for name, role in ROLES.items():
        add_key(chain("root"), key(name).public, [role])

    def publish(name: str, versions: range) -> None:
        signer: object = key(name)  # internal: a key in place of its file
        with Publisher(bucket, model, writer="golden", sign=signer, trust=trust) as publisher:  # type: ignore[arg-type]
            for version in versions:
                for spec in model.table:
                    model.write(spec.name, moved(rng, model.read(spec.name), 0.05))
                receipt = publisher.publish(step=10 * version, label=f"Schritt {version} – ½")
                expected.append(receipt.result().position.digest)

    publish("writer", range(1, 5))
    add_key(chain("root"), key("next-writer").public, ["writer"], 5)
    revoke_key(chain("root"), key("writer").public.id, 4)
    publish("next-writer", range(5, 7))
    with tempfile.TemporaryDirectory() as scratch:
        list(squash(chain("cutter"), Path(scratch) / "squash", levels=(4,)))
        with wc.Subscriber(bucket, Path(scratch) / "mirror", wc.Pinned(5), trust=trust) as subscriber:
            subscriber.sync()
            cut_anchor(chain("cutter"), subscriber.mirror)
    position = wc.Position(6, expected[6])
    put_heartbeat(chain("replica"), Heartbeat("golden", position, 1.5, pause=0.25))
    store = open_store(bucket)
    for listed in [*store.list(PROBES), *store.list(WRITER)]:  # the writer's note names this host
        store.delete(listed.key)
    (HERE / "expected.json").write_text(json.dumps({"root": trust.key, "positions": expected}, indent=1) + "\n")


if __name__ == "__main__":
    main()
