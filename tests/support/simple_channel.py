"""A second reader of channels, written from docs/SPEC.md sections 11 and 12: a folder, the standard library, no hurry.

It shares no code with weightcast, so where both read the same channel in the same way, the page was enough.
"""

import hashlib
import json
import re
from pathlib import Path

from simple_reader import Tensor, apply_objects, apply_patch, need, position, read_checkpoint


def read_record(path: Path, kind: str) -> dict:
    record = json.loads(path.read_text(encoding="utf-8"))
    need(record.pop("format") == 1 and record.pop("kind") == kind, f"11.5 this is no {kind}")
    return record


def read_object(bucket: Path, key: str, sha256: str) -> bytes:
    data = (bucket / key).read_bytes()
    need(hashlib.sha256(data).hexdigest() == sha256, f"12.3 {key} is damaged")
    return data


class Channel:
    """A channel in a folder."""

    def __init__(self, bucket: Path):
        self.bucket = bucket
        raw = json.loads((bucket / "channel.json").read_text(encoding="utf-8"))
        apart = ("id", "signer", "signature")
        rest = json.dumps({k: v for k, v in raw.items() if k not in apart}, sort_keys=True, separators=(",", ":"))
        need(hashlib.sha256(rest.encode()).hexdigest()[:32] == raw["id"], "11.5 the id is not the digest of the rest")
        channel = read_record(bucket / "channel.json", "channel")
        self.id, self.aliases, self.tensors = channel["id"], channel["aliases"], channel["tensors"]

    def manifest(self, version: int) -> dict | None:
        path = self.bucket / "manifests" / f"{version:012d}.json"
        if not path.exists():
            return None
        manifest = read_record(path, "manifest")
        need(manifest["channel"] == self.id and manifest["position"][0] == version, "11.6 it is of something else")
        keys = [key for key, _, _ in manifest["objects"]]
        need(1 <= len(set(keys)) == len(keys) <= 1 << 16, "11.6 none, too many or repeated objects")
        digest = manifest["position"][1][:16]
        if manifest["base"] is None:
            anchor = rf"anchors/{version:012d}-{digest}-[0-9a-f]{{16}}/anchor\.json"
            need(len(keys) == 1 and re.fullmatch(anchor, keys[0]) is not None, "11.6 not the record of an anchor")
            return manifest
        one = rf"deltas/{version:012d}-{digest}-[0-9a-f]{{16}}"
        if len(keys) == 1 and re.fullmatch(rf"{one}\.safetensors", keys[0]):
            return manifest
        inside = [re.fullmatch(rf"({one}/)[0-9a-f]{{16}}\.safetensors", key) for key in keys]
        need(len({match and match[1] for match in inside} - {None}) == 1 and all(inside), "11.6 not all in one folder")
        return manifest

    def head(self) -> int:
        version = max(int(path.stem) for path in (self.bucket / "manifests").glob("[0-9]*"))
        while self.manifest(version + 1) is not None:
            version += 1
        return version

    def anchor(self, version: int) -> dict[str, Tensor]:
        """The weights of an anchor of that version."""
        (folder,) = (self.bucket / "anchors").glob(f"{version:012d}-*")
        record = read_record(folder / "anchor.json", "anchor")
        weights: dict[str, Tensor] = {}
        for key, size, sha256 in record["files"]:
            data = read_object(self.bucket, key, sha256)
            need(len(data) == size, "12.3 a file is of another size")
            if key.endswith(".safetensors"):
                weights |= read_checkpoint(data)
        shapes = [[name, tensor.dtype, list(tensor.shape)] for name, tensor in sorted(weights.items())]
        need(shapes == self.tensors, "12.3 an anchor of another table")
        need([version, position(weights, self.aliases)] == record["position"], "12.3 an anchor of another digest")
        return weights

    def step(self, weights: dict[str, Tensor], version: int) -> dict[str, Tensor]:
        """From one version to the next by its delta."""
        manifest = self.manifest(version + 1)
        need(manifest is not None, f"11.3 version {version + 1} is not committed")
        assert manifest is not None
        need(manifest["base"] == [version, position(weights, self.aliases)], "12.3 the base is another")
        objects = [read_object(self.bucket, key, sha256) for key, _, sha256 in manifest["objects"]]
        weights = apply_objects(objects, weights, self.aliases)
        need(manifest["position"] == [version + 1, position(weights, self.aliases)], "12.3 the result is another")
        return weights

    def leap(self, weights: dict[str, Tensor], base: int, result: int) -> dict[str, Tensor]:
        """From one version to a later one by a squash."""
        (path,) = (self.bucket / "squashes").glob(f"{base:012d}-{result:012d}-*")
        _, _, digest, sha256 = path.stem.split("-")
        weights = apply_patch(read_object(self.bucket, f"squashes/{path.name}", sha256), weights, self.aliases)
        need(position(weights, self.aliases).startswith(digest), "11.2 the result is not what the name says")
        return weights
