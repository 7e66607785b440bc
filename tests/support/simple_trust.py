"""A second checker of signatures, written from docs/SPEC.md section 15: a bucket in a folder, and `cryptography`.

It shares no code with weightcast, so where it finds what weightcast signed to be right, the page was enough.
"""

import base64
import hashlib
import json
import re
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from simple_reader import need


def canonical(record: dict) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def key_of(text: str) -> tuple[str, Ed25519PublicKey]:
    """The id and the key (15.1.1)."""
    raw = bytes.fromhex(text.removeprefix("ed25519:"))
    return hashlib.sha256(raw).hexdigest()[:16], Ed25519PublicKey.from_public_bytes(raw)


def check(public: Ed25519PublicKey, signature: str, kind: str, channel: str, record: dict) -> None:
    """15.1.2; raises if the signature is wrong."""
    need(re.fullmatch(r"[0-9A-Za-z_-]{86}", signature) is not None, "15.1.1 the form of a signature")
    line = f"weightcast signature 1 {kind} {channel}\n".encode()
    public.verify(base64.urlsafe_b64decode(signature + "=="), line + canonical(record))


class Checker:
    """What a reader with a root key checks of a whole bucket; how many signatures of each kind were right."""

    def __init__(self, bucket: Path, root: str):
        self.bucket = bucket
        self.root = key_of(root)
        self.counts: dict[str, int] = {}
        channel = self._record(bucket / "channel.json")
        self.channel = channel["id"]
        self._signed("channel", channel, ())
        self.keys: list[list] = []
        self.numbers = 0
        previous = None
        while (path := bucket / "manifests" / f"keyring-{self.numbers + 1:012d}.json").exists():
            entry = self._record(path)
            need(path.read_bytes() == canonical(entry), "15.2.1 not canonical")
            need((entry["number"], entry["previous"]) == (self.numbers + 1, previous), "15.2.4 does not follow")
            self._signed("keyring", entry, ())
            self.keys, self.numbers = entry["keys"], self.numbers + 1
            previous = hashlib.sha256(path.read_bytes()).hexdigest()

    def _record(self, path: Path) -> dict:
        return json.loads(path.read_text(encoding="utf-8"))

    def _allowed(self, signer: str, roles: tuple[str, ...], version: int) -> Ed25519PublicKey:
        if signer == self.root[0]:
            return self.root[1]
        for text, role, first, last in self.keys:
            if key_of(text)[0] == signer and role in roles and first <= version <= (version if last is None else last):
                return key_of(text)[1]
        raise AssertionError(f"15.2.2 {signer} may not sign this")

    def _signed(self, kind: str, record: dict, roles: tuple[str, ...], version: int = 0) -> None:
        bare = {name: value for name, value in record.items() if name != "signature"}
        public = self._allowed(record["signer"], roles, version)
        check(public, record["signature"], kind, record["channel"] if kind != "channel" else record["id"], bare)
        self.counts[kind] = self.counts.get(kind, 0) + 1

    def manifests(self) -> None:
        previous = None
        for version, path in enumerate(sorted((self.bucket / "manifests").glob("[0-9]*"))):
            manifest = self._record(path)
            need(path.read_bytes() == canonical(manifest), "15.1.5 not canonical")
            need(manifest.get("previous") == previous, "15.1.5 does not follow")
            need(manifest.get("keyring", 0) <= self.numbers, "15.2.5 a newer list")
            self._signed("manifest", manifest, ("writer",), version)
            previous = hashlib.sha256(path.read_bytes()).hexdigest()

    def anchors(self) -> None:
        for path in sorted((self.bucket / "anchors").glob("*/anchor.json")):
            anchor = self._record(path)
            self._signed("anchor", anchor, ("writer", "cutter"), anchor["position"][0])

    def squashes(self) -> None:
        form = r"(\d{12})-(\d{12})-([0-9a-f]{16})-([0-9a-f]{64})-([0-9a-f]{16})-([0-9A-Za-z_-]{86})\.safetensors"
        for path in sorted((self.bucket / "squashes").iterdir()):
            found = re.fullmatch(form, path.name)
            assert found is not None, "11.2 the form of a name"
            base, result, digest, sha256, signer, signature = found.groups()
            data = path.read_bytes()
            need(hashlib.sha256(data).hexdigest() == sha256, "12.3 it is damaged")
            record = {"format": 1, "kind": "squash", "base": int(base), "result": int(result), "digest": digest}
            record |= {"bytes": len(data), "sha256": sha256, "signer": signer}
            check(self._allowed(signer, ("cutter",), int(result)), signature, "squash", self.channel, record)
            self.counts["squash"] = self.counts.get("squash", 0) + 1
