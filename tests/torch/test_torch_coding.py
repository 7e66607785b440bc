"""Blocks coded by Triton (interpreted, or on a GPU) are byte for byte those of the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
import compiled_kernels  # noqa: E402
from training import adam, store  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.format.codec import CODECS, CodecName  # noqa: E402
from weightcast.format.codec.ranks import rank_tensors  # noqa: E402
from weightcast.format.coding import Coding  # noqa: E402
from weightcast.format.diff import diff_tensors  # noqa: E402
from weightcast.format.kernels.bands import BLOCK  # noqa: E402
from weightcast.format.scan import Change  # noqa: E402
from weightcast.format.spec import DTYPES, TensorSpec  # noqa: E402
from weightcast.format.workers import ONE  # noqa: E402
from weightcast.torch import model as torch_model  # noqa: E402
from weightcast.torch.batch import Batch, Slot  # noqa: E402
from weightcast.torch.kernels.gpu import GpuKernels  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VECTORS = Path(__file__).parents[1] / "vectors" / "v1" / "good"
both = pytest.mark.parametrize("codec", ["banded", "gap"])

Pair = tuple[np.ndarray, np.ndarray]


class Tensors:
    """Tensors of one dtype on the device, and the changes to them."""

    def __init__(self, dtype: str, pairs: list[Pair]):
        self.pairs, self.kernels = pairs, GpuKernels()
        specs = [
            TensorSpec(f"t{i}", dtype, (old.nbytes * 8 // DTYPES[dtype].per_value,)) for i, (old, _) in enumerate(pairs)
        ]
        self.words = [torch.from_numpy(self._signed(old).copy()).to(DEVICE) for old, _ in pairs]
        self.batch = Batch([Slot(spec, words) for spec, words in zip(specs, self.words, strict=True)])

    def _signed(self, bits: np.ndarray) -> np.ndarray:
        return bits if bits.itemsize == 1 else bits.view(f"<i{bits.itemsize}")

    def change(self) -> Any:
        """Give the tensors their new bits; returns what flipped."""
        old = self.kernels.take(self.batch)
        for words, (_, new) in zip(self.words, self.pairs, strict=True):
            words.copy_(torch.from_numpy(self._signed(new).copy()))
        return self.kernels.differ(self.batch, old)

    def delivered(self, codec: CodecName, flips: Any) -> list[Change]:
        return list(self.kernels.deliver(self.batch, flips, Coding(codec), None).changes({}))

    def coded_by_cpu(self, codec: CodecName) -> list[tuple[Any, bytes]]:
        found = []
        for spec, (old, new) in zip(self.batch.specs, self.pairs, strict=True):
            (patch,) = diff_tensors([spec], [old], [new], [0])
            if patch.changed:
                ranks = rank_tensors([spec], [(patch.indices, patch.old, patch.new)], [old], ONE)[0]
                (coded,) = CODECS[codec].encode([(patch, ranks)], ONE)
                found.append((coded.row.blocks, coded.streams["blocks"].tobytes()))
        return found


def check(codec: CodecName, dtype: str, *pairs: Pair) -> list[bytes]:
    """The same blocks on both sides; returns their bytes."""
    tensors = Tensors(dtype, list(pairs))
    found = [(one.prepared.sizes, one.prepared.stream.tobytes()) for one in tensors.delivered(codec, tensors.change())]
    assert found == tensors.coded_by_cpu(codec)
    return [stream for _, stream in found]


def words(dtype: str, values: Any) -> np.ndarray:
    return np.array(values, DTYPES[dtype].word)


def stepped(old: np.ndarray, places: Any, by: Any = 1) -> Pair:
    new = old.copy()
    new[places] += np.array(by, old.dtype)
    return old, new


# -- how many change, and where ----------------------------------------------------------------------------------------


@both
def test_tensors_of_a_batch_are_coded_one_by_one(codec: CodecName) -> None:
    rng = np.random.default_rng(0)
    bits = wc.round_to("BF16", rng.normal(0, 0.02, 4500).astype(np.float32))
    sizes = [1, 0, 3, 4097, 60, 5]
    cuts = np.split(bits, np.cumsum(sizes))
    pairs = [stepped(cut, rng.random(cut.size) < 0.02, rng.choice([1, 1, 3, 400])) for cut in cuts]
    check(codec, "BF16", *pairs, stepped(words("BF16", [0x3F80]), [0]))


@both
def test_single_changes_at_the_ends_of_blocks(codec: CodecName) -> None:
    old = np.tile(np.arange(0x20, 0x40, dtype=np.uint8), BLOCK // 32 + 1)
    check(codec, "F8_E4M3", stepped(old, [0, BLOCK - 1, BLOCK, BLOCK + 31]))


@both
def test_block_that_is_left_out(codec: CodecName) -> None:
    tensors = Tensors("I8", [stepped(np.zeros(BLOCK + 9, np.uint8), [BLOCK + 3, BLOCK + 4])])
    (change,) = tensors.delivered(codec, tensors.change())
    assert [ordinal for ordinal, _ in change.prepared.sizes] == [1]
    assert [(change.prepared.sizes, change.prepared.stream.tobytes())] == tensors.coded_by_cpu(codec)


@pytest.mark.parametrize("share", [0.3, 0.55, 0.97, 1.0])
def test_dense_changes_with_many_far_steps(share: float) -> None:
    rng = np.random.default_rng(1)
    old = wc.round_to("BF16", rng.normal(0, 0.02, 300).astype(np.float32))
    check("banded", "BF16", stepped(old, rng.random(300) < share, 2), stepped(old, rng.random(300) < share))


def test_raw_block_where_every_element_is_random() -> None:
    rng = np.random.default_rng(2)
    for dtype in ("BF16", "F32", "I64", "U8"):
        kind = DTYPES[dtype].word
        old = np.frombuffer(rng.bytes(40 * kind.itemsize), kind)
        (stream,) = check("banded", dtype, (old, ~old ^ np.arange(40).astype(kind)))
        assert stream[0] == 0 or dtype == "U8"


def test_undone_changes_leave_a_tensor_to_the_host() -> None:
    old = words("BF16", range(0x3C00, 0x3C40))
    tensors = Tensors("BF16", [stepped(old, [3, 5, 9]), stepped(old, [7])])
    flips = tensors.change()
    tensors.words[0][5] -= 1
    first, second = tensors.delivered("banded", flips)
    assert first.indices.tolist() == [3, 9]
    assert first.prepared is None
    assert second.prepared is not None


def test_nothing_is_coded_for_plain() -> None:
    tensors = Tensors("BF16", [stepped(words("BF16", range(99)), [3, 5])])
    assert [change.prepared for change in tensors.delivered("plain", tensors.change())] == [None]


# -- dtypes and golden vectors -----------------------------------------------------------------------------------------

NAMES = {  # one for each width and each way to make keys, and those with blocks that are hard to code
    "banded": "bf16 bool c64 f16 f32 f64 f8_e4m3 f8_e5m2 u32 many-bands far-sloped far-flat special-bits",
    "gap": "bf16 f64 i8 huge-gaps nearly-all-changed",
}


@pytest.mark.parametrize(("codec", "name"), [(codec, name) for codec, names in NAMES.items() for name in names.split()])
def test_golden_vectors(codec: CodecName, name: str) -> None:
    path = VECTORS / f"{codec}-{name}"
    with wc.Checkpoint(Path(f"{path}.old.safetensors")) as old, wc.Checkpoint(Path(f"{path}.new.safetensors")) as new:
        for spec in old.table:
            if name == "special-bits" and spec.dtype not in ("BF16", "F64"):  # interpreted, each takes seconds
                continue
            (stream,) = check(codec, spec.dtype, (old.read(spec.name).copy(), new.read(spec.name).copy()))
            written = Path(f"{path}.patch.safetensors").read_bytes()
            assert stream in written or name == "special-bits"  # with the old weights, raw is smaller


@settings(max_examples=12)
@given(st.data())
def test_any_bits(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["BF16", "F32", "F64", "F8_E5M2", "I16", "U64"]))
    word = DTYPES[dtype].word
    size = data.draw(st.integers(1, 80))
    old = np.frombuffer(data.draw(st.binary(min_size=size * word.itemsize, max_size=size * word.itemsize)), word)
    changes = data.draw(
        st.dictionaries(st.integers(0, size - 1), st.integers(1, (1 << 8 * word.itemsize) - 1), max_size=30)
    )
    new = old.copy()
    for place, by in changes.items():
        new[place] ^= word.type(by)
    check(data.draw(st.sampled_from(["banded", "gap"])), dtype, (old, new))


def test_kernels_compile_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    subprocess.run([sys.executable, compiled_kernels.__file__], env=environment, check=True)


# -- from a training loop ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "detect"), [("banded", "transient"), ("gap", "device")])
def test_publisher_with_the_gpus_kernels_sends_the_bytes_of_a_cpu(
    codec: CodecName, detect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish() -> list[str]:
        torch.manual_seed(0)
        model = torch.nn.Linear(40, 30).to(DEVICE, torch.bfloat16)
        optimizer = adam(model, 3e-5)
        with wc.Publisher(store(), model, optimizer=optimizer, detect=detect, codec=codec, threads=1) as publisher:
            commits = []
            for step in range(1, 3):
                for parameter in model.parameters():
                    parameter.grad = torch.randn_like(parameter)
                optimizer.step()
                commits.append(publisher.publish(step=step).result(60))
        assert {commit.codec for commit in commits} == {codec}
        return [commit.objects[0].sha256 for commit in commits]

    monkeypatch.setattr(torch_model, "kernels_for", lambda device, workers: GpuKernels())
    coded_there = publish()
    monkeypatch.undo()
    assert coded_there == publish()
