"""Small writers and readers of other systems' folders, written from the layouts alone: numpy, safetensors, zstandard.

They share no code with the package, so that a mistake in one of the two shows. A state is a dictionary of arrays; bf16
is `ml_dtypes.bfloat16`.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import zstandard
from safetensors import safe_open
from safetensors.numpy import load_file, save, save_file
from simple_reader import position, read_checkpoint

State = dict[str, np.ndarray]

BF16 = ml_dtypes.bfloat16
SHAPES = {"model.embed.weight": (40, 16), "model.layers.0.up.weight": (32, 16), "model.norm.weight": (16,)}


def states(count: int, seed: int = 0, density: float = 0.03, dtype: type = BF16) -> list[State]:
    """The states of a training of a small model: some elements move, signed zeros and NaN payloads among them."""
    rng = np.random.default_rng(seed)
    word = np.dtype(f"<u{np.dtype(dtype).itemsize}")
    made = [{name: (rng.standard_normal(shape) * 0.02).astype(dtype) for name, shape in SHAPES.items()}]
    while len(made) < count:
        new = {name: array.copy() for name, array in made[-1].items()}
        for array in new.values():
            bits = array.reshape(-1).view(word)
            hit = rng.random(bits.size) < density
            bits[hit] += rng.integers(1, 4, bits.size).astype(word)[hit]
        flat = new["model.embed.weight"].reshape(-1).view(word)
        top = word.type(1 << (8 * word.itemsize - 1))
        flat[len(made)] = top if flat[len(made)] == 0 else 0  # a zero, and the next time a negative one
        flat[0] = ~word.type(0) - word.type(len(made))  # a NaN whose payload changes
        made.append(new)
    return made


def content(state: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in state.items()}


def digest(state: State) -> str:
    """The position digest of a state, as docs/SPEC.md defines it, by the reader that was written from it."""
    return position(read_checkpoint(save(state)))


# -- a history ---------------------------------------------------------------------------------------------------------


def write_history(folder: Path, states: Mapping[int, State]) -> Path:
    """Checkpoint folders as a trainer leaves them, with what belongs to the training alone."""
    for step, state in states.items():
        made = folder / f"checkpoint-{step}"
        made.mkdir(parents=True)
        save_file(state, made / "model.safetensors", {"format": "pt"})
        (made / "config.json").write_text('{"model_type": "test"}')
        (made / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        (made / "optimizer.pt").write_bytes(b"a pickle")
    return folder


def read_history(folder: Path) -> dict[int, dict[str, bytes]]:
    paths = {int(path.name.removeprefix("checkpoint-")): path for path in folder.glob("checkpoint-*")}
    return {step: content(load_file(path / "model.safetensors")) for step, path in sorted(paths.items())}


# -- TRL's drafts ------------------------------------------------------------------------------------------------------


def write_trl(
    folder: Path, states: list[State], *, draft: str = "last", encoding: str = "gap_delta", every: int = 4
) -> Path:
    """What the trainer of a draft uploads, from step 1 on: an anchor first, and at every multiple of ``every``."""
    for kind in ("anchors", "deltas"):
        (folder / kind).mkdir(parents=True)
    for step, state in enumerate(states, 1):
        if step == 1 or step % every == 0:
            save_file(state, folder / f"anchors/step_{step:06d}.safetensors", _trl_metadata(state, step, draft, True))
        else:
            tensors = trl_delta(states[step - 2], state, draft, encoding)
            metadata = _trl_metadata(state, step, draft, False) | ({"encoding": encoding} if draft == "last" else {})
            save_file(tensors, folder / f"deltas/step_{step:06d}.safetensors", metadata)
    return folder


def trl_delta(old: State, new: State, draft: str, encoding: str) -> dict[str, np.ndarray]:
    """Indices and values; compared by their bits, though the drafts compare floats and lose a zero's sign."""
    tensors: dict[str, np.ndarray] = {}
    places, values = (".idx", ".val") if draft == "last" else (".indices", ".values")
    for name, array in new.items():
        bits = array.reshape(-1).view("<u2")
        index = np.flatnonzero(bits != old[name].reshape(-1).view("<u2"))
        if draft == "last" and encoding == "gap_delta":
            gaps = np.diff(index, prepend=-1) - 1
            index = gaps.astype("<u2" if not gaps.size or gaps.max() < 1 << 16 else "<u4")
            chosen = np.cumsum(index.astype(np.int64) + 1) - 1
        else:
            index = chosen = index.astype("<i4")
        if draft == "first" and not chosen.size:
            continue
        tensors |= {name + places: index, name + values: array.reshape(-1)[chosen]}
    return tensors or {"__empty_delta__": np.zeros(1, "<i4")}


def _trl_metadata(state: State, step: int, draft: str, whole: bool) -> dict[str, str]:
    if draft == "last":
        return {"format": "sparse_weight_patch", "version": "1", "sparse": str(not whole), "model_version": str(step)}
    summed = hashlib.sha256(b"".join(state[name].tobytes() for name in sorted(state))).hexdigest()
    kind = "anchor_checkpoint" if whole else "sparse_weight_patch"
    return {"format": kind, "version": "1", "model_version": str(step), "checksum_sha256": summed}


def read_trl(folder: Path) -> dict[int, dict[str, bytes]]:
    """The weights of each step, as an engine of the last draft has them."""
    files = {int(path.stem.removeprefix("step_")): path for path in folder.glob("*/step_*.safetensors")}
    found, held = {}, {}
    for step, path in sorted(files.items()):
        if path.parent.name == "anchors":
            held = load_file(path)
        else:
            with safe_open(path, "np") as file:
                encoding = file.metadata()["encoding"]
                for name in (key.removesuffix(".val") for key in file.keys() if key.endswith(".val")):  # noqa: SIM118
                    raw = file.get_tensor(f"{name}.idx").astype(np.int64)
                    index = np.cumsum(raw + 1) - 1 if encoding == "gap_delta" else raw
                    flat = held[name].reshape(-1).copy()
                    flat[index] = file.get_tensor(f"{name}.val")
                    held[name] = flat.reshape(held[name].shape)
        found[step] = content(held)
    return found


# -- slime -------------------------------------------------------------------------------------------------------------


def adler32(data: bytes) -> str:
    return f"{zlib.adler32(data):08x}"


def xxh3(data: bytes) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(data)


CHECKSUMS: dict[str, Callable[[bytes], str]] = {"adler32": adler32, "xxh3-128": xxh3}


def write_slime(folder: Path, states: list[State], encoding: str = "xor", checksum: str = "adler32") -> Path:
    """Versions 1, 2, … after the first state, which is the engines' own checkpoint: `base` beside them."""
    folder.mkdir(parents=True)
    base = folder.with_name(folder.name + "-base")
    base.mkdir()
    save_file(states[0], base / "model.safetensors", {"format": "pt"})
    (base / "config.json").write_text('{"model_type": "test"}')
    for version in range(1, len(states)):
        write_slime_version(folder, version, states[version - 1], states[version], encoding, checksum)
    return folder


def write_slime_version(
    folder: Path, version: int, old: State, new: State, encoding: str = "xor", checksum: str = "adler32"
) -> Path:
    made = folder / f"weight_v{version:06d}"
    made.mkdir()
    deltas, checksums = {}, {}
    for name, array in new.items():
        before, after = (np.frombuffer(state[name].tobytes(), np.uint8) for state in (old, new))
        if np.array_equal(before, after):
            continue
        if encoding == "xor":
            delta = (before ^ after).tobytes()
        else:
            places = np.flatnonzero(before != after)
            delta = np.uint32(places.size).tobytes() + places.astype("<u4").tobytes() + after[places].tobytes()
        deltas[name] = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(delta), np.uint8)
        checksums[name] = CHECKSUMS[checksum](array.tobytes())
    file = "model-00000-of-00001.safetensors"
    if deltas:
        save_file(deltas, made / file, checksums)
    metadata = {"version": f"{version:06d}", "base_version": f"{version - 1:06d}", "delta_encoding": encoding}
    metadata |= {"compression_format": "zstd", "checksum_format": checksum}
    index = {"metadata": metadata, "weight_map": dict.fromkeys(deltas, file)}
    (made / "model.safetensors.index.json").write_text(json.dumps(index))
    return made


def read_slime(folder: Path) -> dict[int, dict[str, bytes]]:
    """The weights of each version, as an engine has them that starts with the first, which is whole."""
    found: dict[int, dict[str, bytes]] = {}
    held: dict[str, bytes] = {}
    for path in sorted(folder.glob("weight_v*")):
        index = path / "model.safetensors.index.json"
        metadata = json.loads(index.read_text())["metadata"] if index.exists() else {}
        if "delta_encoding" not in metadata:
            held = content(load_file(path / "model.safetensors"))
        for file in sorted(path.glob("*.safetensors")) if "delta_encoding" in metadata else ():
            with safe_open(file, "np") as opened:
                for name in opened.keys():  # noqa: SIM118
                    delta = zstandard.ZstdDecompressor().decompress(opened.get_tensor(name).tobytes())
                    held = held | {name: _slime_applied(held[name], delta, metadata["delta_encoding"])}
                    assert CHECKSUMS[metadata["checksum_format"]](held[name]) == opened.metadata()[name]
        found[int(path.name.removeprefix("weight_v"))] = held
    return found


def _slime_applied(old: bytes, delta: bytes, encoding: str) -> bytes:
    new = np.frombuffer(old, np.uint8).copy()
    if encoding == "xor":
        return (new ^ np.frombuffer(delta, np.uint8)).tobytes()
    count = int.from_bytes(delta[:4], "little")
    new[np.frombuffer(delta[4 : 4 + 4 * count], "<u4")] = np.frombuffer(delta[4 + 4 * count :], np.uint8)
    return new.tobytes()
