"""Weights for tests: any dtype, any bits, any density of change."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

import weightcast as wc
from weightcast.format.spec import DTYPES, TensorSpec, TensorTable
from weightcast.format.tensors import Bits

VALUE_DTYPES = tuple(name for name, dtype in DTYPES.items() if dtype.per_value >= 8)
PACKED_DTYPES = tuple(name for name, dtype in DTYPES.items() if dtype.per_value < 8)
DENSITIES = (0.0, 0.001, 0.01, 0.3, 0.5, 0.9, 1.0)


class Bag:
    """Weights of any spec, packed dtypes too; the plainest `Weights` there is."""

    def __init__(self, bits: dict[TensorSpec, Bits], aliases: dict[str, str] | None = None):
        self.table = TensorTable.of(bits, aliases)
        self._bits = {spec.name: value for spec, value in bits.items()}

    def read(self, name: str) -> Bits:
        return self._bits[name]

    def overwrite(self, name: str, indices: np.ndarray, new: Bits) -> None:
        self._bits[name][indices] = new

    def write(self, name: str, bits: Bits) -> None:
        self._bits[name][:] = bits

    def copy(self) -> Bag:
        return Bag({spec: self._bits[spec.name].copy() for spec in self.table}, dict(self.table.aliases))


def same_bits(a: Bag | wc.Arrays | wc.Checkpoint, b: Bag | wc.Arrays | wc.Checkpoint) -> bool:
    return a.table == b.table and all(np.array_equal(a.read(spec.name), b.read(spec.name)) for spec in a.table)


def random_bits(rng: np.random.Generator, spec: TensorSpec) -> Bits:
    return np.frombuffer(rng.bytes(spec.nbytes), spec.kind.word).copy()


def gaussian(rng: np.random.Generator, size: int, scale: float = 0.02) -> Bits:
    """bf16 weights as models have them."""
    return wc.round_to("BF16", (rng.standard_normal(size) * scale).astype(np.float32))


def moved(rng: np.random.Generator, old: Bits, density: float, furthest: int = 3) -> Bits:
    """A copy in which about ``density`` of the elements moved by a few units."""
    new = old.copy()
    hit = rng.random(old.size) < density
    steps = rng.integers(1, furthest + 1, old.size) * rng.choice([-1, 1], old.size)
    new[hit] += steps[hit].astype(old.dtype)
    return new


def one(bits: Bits, dtype: str = "BF16", name: str = "w") -> Bag:
    """A model of one flat tensor."""
    return Bag({TensorSpec(name, dtype, (bits.size * DTYPES[dtype].width // DTYPES[dtype].per_value,)): bits})


@st.composite
def changes(draw: st.DrawFn) -> tuple[Bag, Bag]:
    """Two states of a small model: several tensors of any dtype, shape, bits and density."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old, new = {}, {}
    for i in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(VALUE_DTYPES + PACKED_DTYPES))
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
        if dtype in PACKED_DTYPES:
            shape = (*shape, 4)  # whole bytes
        spec = TensorSpec(f"layer.{i}", dtype, shape)
        before = random_bits(rng, spec)
        far = draw(st.sampled_from([1, 2, 50, 2**62]))
        old[spec], new[spec] = before, moved(rng, before, draw(st.sampled_from(DENSITIES)), far)
    return Bag(old), Bag(new)


def write_file(path: Path, weights: Bag | wc.Arrays, names: list[str] | None = None) -> None:
    """A safetensors file, by hand: every dtype, in the table's order whatever that does to alignment."""
    header, data = {}, b""
    for spec in weights.table:
        if names is None or spec.name in names:
            raw = weights.read(spec.name).tobytes()
            offsets = [len(data), len(data) + len(raw)]
            header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
            data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_folder(folder: Path, weights: Bag | wc.Arrays, shards: int = 2) -> None:
    """A sharded Hugging Face checkpoint folder."""
    folder.mkdir(parents=True)
    names = [spec.name for spec in weights.table]
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        write_file(folder / file, weights, names[i::shards])
        weight_map |= dict.fromkeys(names[i::shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "test"}')
