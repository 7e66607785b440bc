"""A channel that is signed, with the files of its keys, and what its owners and its attackers do to it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.key_file import write_private
from weightcast.channel.keyring import Role
from weightcast.channel.records import Channel
from weightcast.channel.signing import PrivateKey, PublicKey
from weightcast.channel.trust import Signing, Trust
from weightcast.disk.apply import write_patch
from weightcast.store.base import Store
from weightcast.store.file import FileStore
from weightcast.upkeep.keyring import add_key, revoke_key
from weightcast.upkeep.squash import squash

ELEMENTS = 4000
NAMES = ("root", "writer", "cutter", "replica", "stranger")


def arrays(bits: np.ndarray) -> wc.Arrays:
    return wc.Arrays({"w": bits.copy()}, {"w": "BF16"})


def bits_of(version: int) -> np.ndarray:
    """What version ``version`` holds."""
    bits = np.random.default_rng(0).integers(0x3C00, 0x3E00, ELEMENTS).astype(np.uint16)
    for step in range(1, version + 1):
        bits[np.random.default_rng(step).choice(ELEMENTS, 60, replace=False)] ^= 1
    return bits


class SignedChannel:
    """A bucket in a folder: root, writer and cutter have their keys; a stranger has one that nobody vouches for."""

    def __init__(self, home: Path, versions: int = 0):
        self.home = home
        self.url = home / "bucket"
        self.keys = {name: PrivateKey.new() for name in NAMES}
        for name, key in self.keys.items():
            write_private(self.file(name), key)
        self.trust = str(self.keys["root"].public)
        wc.init(self.url, arrays(bits_of(0)), sign=self.file("root"))
        self.add("writer", "writer")
        self.add("cutter", "cutter")
        self.version = 0
        self.publish(versions)

    def file(self, name: str) -> Path:
        """The private key's file."""
        return self.home / f"{name}.key"

    @property
    def store(self) -> Store:
        return FileStore(self.url)

    def public(self, name: str) -> PublicKey:
        return self.keys[name].public

    def chain(self, signer: str | None = None, **options: bool) -> Chain:
        signing = Signing(Trust(self.trust, **options), self.keys[signer] if signer else None)
        return Chain.open(self.store, signing)

    def add(self, name: str, *roles: Role, first: int = 0) -> None:
        add_key(self.chain("root"), self.public(name), roles, first)

    def revoke(self, name: str, last: int | None = None) -> None:
        revoke_key(self.chain("root"), self.public(name).id, last)

    def publish(self, count: int = 1, writer: str = "writer") -> None:
        """The next versions, one by one."""
        weights = arrays(bits_of(self.version))
        with wc.Publisher(self.url, weights, threads=1, sign=self.file(writer), trust=self.trust) as publisher:
            for _ in range(count):
                self.version += 1
                weights.write("w", bits_of(self.version))
                publisher.publish(step=self.version).result(60)

    def squash(self) -> None:
        assert list(squash(self.chain("cutter"), self.home / "scratch", levels=(8,)))

    def pull(self, folder: str = "mirror", trust: wc.Trust | str | None = None) -> wc.Position:
        """Bring a mirror to the head; without ``trust`` it has only what it has recorded."""
        with wc.Subscriber(self.url, self.home / folder, threads=1, trust=trust) as subscriber:
            subscriber.sync()
            assert subscriber.position is not None
            return subscriber.position

    def held(self, folder: str = "mirror") -> np.ndarray:
        with wc.Checkpoint(self.home / folder) as checkpoint:
            return checkpoint.read("w").copy()

    # -- what an attacker does -----------------------------------------------------------------------------------------

    def path(self, key: str) -> Path:
        return self.url / key

    def rewrite(self, key: str, **fields: object) -> None:
        """Change fields of a record and leave its signature; None removes a field."""
        record = {**json.loads(self.path(key).read_text()), **fields}
        kept = {name: value for name, value in record.items() if value is not None or name not in fields}
        self.path(key).write_text(json.dumps(kept, sort_keys=True, separators=(",", ":")))

    def put_squash(self, base: int, evil: np.ndarray, signer: str | None = None) -> str:
        """Upload a squash from ``base`` to the head that holds other bits, signed by one who may or may not."""
        made = self.home / "evil"
        made.unlink(missing_ok=True)
        write_patch(arrays(bits_of(base)), arrays(evil), made)
        position = wc.Position(self.version, wc.fingerprint(arrays(evil)).digest)
        open_chain = Chain.open(self.store)
        if signer is None:
            unsigned = Chain(self.store, _unsigned(open_chain))
            return unsigned.put_squash(base, position, made).key
        return (
            Chain(self.store, open_chain.channel, Signing(None, self.keys[signer])).put_squash(base, position, made).key
        )

    def overwrite(self, key: str, data: bytes) -> None:
        self.path(key).parent.mkdir(parents=True, exist_ok=True)
        self.path(key).write_bytes(data)

    def snapshot(self) -> dict[str, bytes]:
        """Every object, to put it back later."""
        return {listed.key: self.path(listed.key).read_bytes() for listed in self.store.list("")}

    def put_back(self, objects: dict[str, bytes]) -> None:
        """Make the bucket what it was."""
        for listed in list(self.store.list("")):
            if listed.key not in objects:
                self.store.delete(listed.key)
        for key, data in objects.items():
            self.overwrite(key, data)


def _unsigned(chain: Chain) -> Channel:
    return replace(chain.channel, signer=None, signature=None)
