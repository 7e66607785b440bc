"""Every kernel set comes to the same bits: numba's, torch's operations, and Triton's (interpreted, or on a GPU)."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    assert os.environ.get("TRITON_INTERPRET") == "1", "set by conftest.py, before Triton is imported"

from weightcast.format.codec.ranks import Ranks, rank_tensors  # noqa: E402
from weightcast.format.coding import Coding  # noqa: E402
from weightcast.format.diff import diff_tensors  # noqa: E402
from weightcast.format.digest import MODULUS, tensor_digest  # noqa: E402
from weightcast.format.kernels.bands import BLOCK  # noqa: E402
from weightcast.format.patch import ModelSize, Patch, TensorPatch  # noqa: E402
from weightcast.format.patchfile import encode_prepared  # noqa: E402
from weightcast.format.scan import Change  # noqa: E402
from weightcast.format.spec import TensorSpec  # noqa: E402
from weightcast.format.tensors import round_to  # noqa: E402
from weightcast.format.workers import ONE, Workers  # noqa: E402
from weightcast.torch.batch import WORDS, Batch, Copied, Slot  # noqa: E402
from weightcast.torch.coordinates import DTYPES  # noqa: E402
from weightcast.torch.kernels.gpu import GpuKernels  # noqa: E402
from weightcast.torch.kernels.host import HostKernels  # noqa: E402
from weightcast.torch.kernels.operations import PlainKernels  # noqa: E402

CUDA = torch.cuda.is_available()
SETS = {
    "host": (lambda: HostKernels(Workers(2)), "cpu"),
    "plain": (PlainKernels, "cuda" if CUDA else "cpu"),
    "gpu": (GpuKernels, "cuda" if CUDA else "cpu"),
}

# The interpreter takes a second per hundred tiles or changes: enough for every kind of boundary, and no more.
SHAPES = [(3,), (0,), (70, 60), (4096,), (1,), (9001,)]
KINDS = {  # torch dtype, wire dtype
    "bf16": (torch.bfloat16, "BF16"),
    "f16": (torch.float16, "F16"),
    "f32": (torch.float32, "F32"),
    "f64": (torch.float64, "F64"),
    "i8": (torch.int8, "I8"),
    "i64": (torch.int64, "I64"),
    "bool": (torch.bool, "BOOL"),
    "f8": (torch.float8_e4m3fn, "F8_E4M3"),
    "c64": (torch.complex64, "C64"),
    "f32 as bf16": (torch.float32, "BF16"),
    "f32 as f16": (torch.float32, "F16"),
}
ONE_PER_WIDTH = {"i8", "bf16", "f32", "i64", "f32 as bf16"}
"""Kinds that the interpreter reads whole; the others have the width of one of these, and two tiles have to do."""

SPECIAL = np.array(
    [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 1, 0x33000001, 0x7F7FFFFF], np.uint32
)


@dataclass
class Case:
    """Tensors on a device, as they were and as they are, and the same on this side in wire bits."""

    batch: Batch
    new: list[torch.Tensor]
    before: list[np.ndarray]
    after: list[np.ndarray]

    def switch(self) -> None:
        """Make the tensors what they are to become."""
        for slot, new in zip(self.batch.slots, self.new, strict=True):
            slot.source.copy_(new)


def random_words(rng: np.random.Generator, size: int, itemsize: int, dtype: torch.dtype) -> np.ndarray:
    bits = np.frombuffer(rng.bytes(size * itemsize), f"<u{itemsize}").copy()
    if dtype == torch.bool:
        bits &= 1
    elif dtype.is_floating_point and size:  # exponents near each other, as weights have them
        values = rng.normal(0, 0.02, size).astype(np.float32)
        bits = torch.from_numpy(values).to(dtype).view(WORDS[itemsize]).numpy().view(f"<u{itemsize}").copy()
        if itemsize == 4:
            bits[: SPECIAL.size] = SPECIAL[:size]
    return bits


def changed_words(rng: np.random.Generator, words: np.ndarray, density: float, dtype: torch.dtype) -> np.ndarray:
    new = words.copy()
    at = rng.random(words.size) < density
    if dtype == torch.bool:
        new[at] ^= 1
    else:
        shift = 16 if words.itemsize == 4 else 0  # so that rounding shows it, mostly
        steps = rng.choice([1, 1, 1, 2, 300], words.size).astype(words.dtype)
        new[at] += (steps << np.array(rng.integers(0, shift + 1), words.dtype))[at]
    return new


def make_case(kind: str, density: float, device: str, shapes: list[tuple[int, ...]], seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    dtype, wire = KINDS[kind]
    narrow = DTYPES[dtype] != wire
    slots, later, before, after = [], [], [], []
    for i, shape in enumerate(shapes):
        size = int(np.prod(shape))
        old = random_words(rng, size, dtype.itemsize, dtype)
        new = changed_words(rng, old, density, dtype)

        def tensor(words: np.ndarray, shape: tuple[int, ...] = shape) -> torch.Tensor:
            signed = words.view(f"i{words.itemsize}" if words.itemsize > 1 else "u1")
            return torch.from_numpy(signed.copy()).view(dtype).reshape(shape).to(device)

        live = tensor(old)
        slots.append(Slot(TensorSpec(f"t{i}", wire, shape), live, 0, narrow))
        later.append(tensor(new))
        for words, out in ((old, before), (new, after)):
            out.append(round_to(wire, words.view(np.float32)) if narrow else words)
    return Case(Batch(slots), later, before, after)


def unsigned(words: torch.Tensor) -> np.ndarray:
    array = words.cpu().numpy()
    return array.view(f"<u{array.itemsize}")


def expected(case: Case) -> list[Change]:
    found = []
    for spec, old, new in zip(case.batch.specs, case.before, case.after, strict=True):
        (tensor,) = diff_tensors([spec], [old], [new], [0])
        if tensor.changed:
            (ranks,) = rank_tensors([spec], [(tensor.indices, tensor.old, tensor.new)], [old], ONE)
            found.append(Change(spec, tensor.indices, tensor.old, tensor.new, tensor.digest, ranks))
    return found


def coded(changes: list[Change]) -> bytes:
    """As `banded` writes it: what the changes are prepared for."""
    tensors = tuple(TensorPatch(c.spec, c.indices, c.now, c.was, c.gain % MODULUS) for c in changes)
    prepared = {change.spec.name: change.prepared for change in changes}
    return encode_prepared(Patch("0" * 64, "1" * 64, ModelSize(1, 1, 1), tensors), "banded", prepared, ONE)


def same(found: list[Change], wanted: list[Change]) -> None:
    assert [change.spec for change in found] == [change.spec for change in wanted]
    for a, b in zip(found, wanted, strict=True):
        for name in ("indices", "was", "now"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), (a.spec.name, name)
            assert getattr(a, name).dtype == getattr(b, name).dtype
        assert a.gain % MODULUS == b.gain % MODULUS
        if isinstance(a.prepared, Ranks):
            same_ranks(a.prepared, b.prepared)
    assert coded(found) == coded(wanted)


def same_ranks(found: Ranks, wanted: Ranks) -> None:
    assert np.array_equal(found.bands, wanted.bands)
    assert np.array_equal(found.uppers, wanted.uppers)
    assert np.array_equal(found.ranks, wanted.ranks)
    told = wanted.sizes != 0  # of a band without changes, a size is not asked
    assert np.array_equal(found.sizes[told], wanted.sizes[told])


def holds(copied: Copied, wanted: list[np.ndarray]) -> None:
    for words, bits in zip(copied.words(), wanted, strict=True):
        assert np.array_equal(unsigned(words), bits)


def check(name: str, kind: str, density: float, shapes: list[tuple[int, ...]]) -> None:
    make, device = SETS[name]
    kernels = make()
    case = make_case(kind, density, device, shapes)
    batch = case.batch
    old = kernels.take(batch)
    holds(old, case.before)
    assert [int(d) % MODULUS for d in kernels.digests(batch)] == [tensor_digest(bits) for bits in case.before]
    case.switch()
    flips = kernels.differ(batch, old)
    wanted = expected(case)
    assert kernels.count(flips) == sum(change.indices.size for change in wanted)
    shadow = Copied(batch, [chunk.clone() for chunk in old.chunks])
    same(list(kernels.deliver(batch, flips, Coding("banded"), None).changes({})), wanted)
    same(list(kernels.deliver(batch, flips, Coding("banded"), shadow).changes({})), wanted)
    holds(shadow, case.after)
    kernels.put(shadow, flips)
    holds(shadow, case.before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETS)
def test_every_kernel_set_finds_the_same_bits(name: str, kind: str) -> None:
    if CUDA or name != "gpu":
        check(name, kind, 0.03, SHAPES)
    else:
        check(name, kind, 0.008, SHAPES if kind in ONE_PER_WIDTH else [(3,), (0,), (70, 60), (1,)])


@pytest.mark.parametrize("density", [0.0, 0.0005, 0.4, 1.0])
@pytest.mark.parametrize("name", SETS)
def test_every_kernel_set_finds_the_same_bits_at_any_density(name: str, density: float) -> None:
    # Interpreted, each change costs: two tiles, the second of them hardly begun, have to do where most elements change.
    check(name, "bf16", density, SHAPES if CUDA or density < 0.1 else [(3,), (0,), (4100,)])


@pytest.mark.parametrize("name", SETS)
def test_every_kernel_set_finds_the_same_bits_across_blocks(name: str) -> None:
    if CUDA:
        check(name, "bf16", 0.02, [(3 * BLOCK + 5000,), (100,), (BLOCK,)])
    else:
        check(name, "bf16", 0.002 if name == "gpu" else 0.02, [(BLOCK + 5000,)])
