"""Blocks decoded by Triton (interpreted, or on a GPU) give the patches and the errors of the CPU."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
import compiled_kernels  # noqa: E402
from training import adam, same, store  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.errors import FormatError, WeightcastError  # noqa: E402
from weightcast.format.codec import CODECS, CodecName, Coded  # noqa: E402
from weightcast.format.codec.coded import BlockDecoder, Blocks  # noqa: E402
from weightcast.format.diff import diff_tensors  # noqa: E402
from weightcast.format.kernels.bands import BLOCK  # noqa: E402
from weightcast.format.patch import TensorPatch  # noqa: E402
from weightcast.format.spec import DTYPES, TensorSpec  # noqa: E402
from weightcast.format.table import Row  # noqa: E402
from weightcast.format.tensors import Bits, Weights  # noqa: E402
from weightcast.format.workers import ONE  # noqa: E402
from weightcast.torch import TorchTarget  # noqa: E402
from weightcast.torch import model as torch_model  # noqa: E402
from weightcast.torch.batch import Batch, Slot  # noqa: E402
from weightcast.torch.decoder import decode_in_place  # noqa: E402
from weightcast.torch.kernels.gpu import GpuKernels  # noqa: E402
from weightcast.torch.model import words_of  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VECTORS = Path(__file__).parents[1] / "vectors" / "v1"
KERNELS = GpuKernels()
TILE = 4096


def slot_of(spec: TensorSpec, bits: np.ndarray) -> Slot:
    return Slot(spec, words_of(bits.copy()).to(DEVICE))


class OnDevice:
    """Weights on the device, which decode for themselves and must not be read."""

    def __init__(self, weights: Weights):
        self.table = weights.table
        self.slots = {spec.name: slot_of(spec, weights.read(spec.name)) for spec in weights.table}

    def read(self, name: str) -> Bits:
        raise AssertionError(f"{name} was read")

    def block_decoder(self, names: list[str]) -> BlockDecoder | None:
        known = all(name in self.slots for name in names)
        return partial(decode_in_place, self.slots, lambda device: KERNELS) if known else None


def on_cpu(coded: list[Coded], olds: list[np.ndarray]) -> list[TensorPatch]:
    return CODECS["banded"].decode(list(zip(coded, olds, strict=True)), ONE)


def there(coded: list[Coded], olds: list[np.ndarray]) -> list[TensorPatch]:
    slots = {one.row.spec.name: slot_of(one.row.spec, old) for one, old in zip(coded, olds, strict=True)}
    return decode_in_place(slots, lambda device: KERNELS, coded)


def result(decode: Any, *arguments: Any) -> tuple[Any, ...]:
    """All that patches hold, or an error's type and text."""
    try:
        decoded = decode(*arguments)
    except WeightcastError as error:
        return type(error), str(error)
    patches = decoded.tensors if isinstance(decoded, wc.Patch) else decoded
    assert all(patch.indices.dtype == np.int64 and patch.new.dtype == patch.spec.kind.word for patch in patches)
    return tuple(
        (
            one.spec,
            one.digest,
            one.indices.tolist(),
            one.old.tolist(),
            one.new.tolist(),
            one.digest_change() % (1 << 64),
        )
        for one in patches
    )


def coded_by(codec: CodecName, dtype: str, old: np.ndarray, new: np.ndarray, name: str = "w") -> Coded:
    spec = TensorSpec(name, dtype, (old.nbytes * 8 // DTYPES[dtype].per_value,))
    (patch,) = diff_tensors([spec], [old], [new], [7])
    (coded,) = CODECS[codec].encode([(patch, old)], ONE)
    return coded


def check(codec: CodecName, dtype: str, *pairs: tuple[np.ndarray, np.ndarray]) -> list[bytes]:
    """The same patches on both sides, and the right ones; returns the streams."""
    coded = [coded_by(codec, dtype, old, new, f"w{i}") for i, (old, new) in enumerate(pairs)]
    olds = [old for old, _ in pairs]
    patches = there(coded, olds)
    assert result(lambda: patches) == result(on_cpu, coded, olds)
    for patch, (old, new) in zip(patches, pairs, strict=True):
        reached = old.copy()
        patch.scatter(reached)
        assert np.array_equal(reached, new)
    return [one.streams["blocks"].tobytes() for one in coded]


def normal(size: int, seed: int = 0) -> np.ndarray:
    return wc.round_to("BF16", np.random.default_rng(seed).normal(0, 0.02, size).astype(np.float32))


def stepped(old: np.ndarray, places: Any, by: Any = 1) -> tuple[np.ndarray, np.ndarray]:
    new = old.copy()
    new[places] += np.array(by, old.dtype)
    return old, new


# -- golden vectors ----------------------------------------------------------------------------------------------------

GOOD = {
    "banded": "bf16 bool c64 f4 f16 f32 f64 f8_e4m3 f8_e5m2 f8_e8m0 i16 u64 far-sloped random-bits scalar two-blocks",
    "gap": "bf16 f64 i8 u32 block-left-out empty-tensor random-bits",
}
BROKEN = json.loads((VECTORS / "broken" / "cases.json").read_text())
BOXES = "boxes.old.safetensors"
"""The base of objects of boxes: of those the old bits are read, and decoded on the host."""
OF_BLOCKS = [
    file
    for file, case in BROKEN.items()
    if case["clause"] in ("8.5", "8.6")
    and case["old"] != BOXES
    and b"weightcast.blocks" in (VECTORS / "broken" / file).read_bytes()
]


def check_file(patch: Path, base: Path) -> tuple[Any, ...]:
    data = patch.read_bytes()
    with wc.Checkpoint(base) as old:
        found = result(wc.decode, data, OnDevice(old))
        assert found == result(wc.decode, data, old)
    return found


@pytest.mark.parametrize("name", [f"{codec}-{name}" for codec, names in GOOD.items() for name in names.split()])
def test_golden_vectors(name: str) -> None:
    path = VECTORS / "good" / name
    found = check_file(Path(f"{path}.patch.safetensors"), Path(f"{path}.old.safetensors"))
    assert isinstance(found[0][0], TensorSpec)


@pytest.mark.parametrize("file", OF_BLOCKS)
def test_broken_vectors_have_the_same_error(file: str) -> None:
    found = check_file(VECTORS / "broken" / file, VECTORS / "broken" / BROKEN[file]["old"])
    assert found[0] is FormatError or BROKEN[file]["clause"] == "8.6"  # which is checked after decoding, in part


# -- how many change, and where ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["banded", "gap"])
def test_tensors_of_a_batch_are_decoded_one_by_one(codec: CodecName) -> None:
    rng = np.random.default_rng(0)
    olds = np.split(normal(4280), np.cumsum([70, 3, 4097, 60]))
    check(codec, "BF16", *(stepped(old, rng.integers(0, old.size, 6), rng.choice([1, 3, 400])) for old in olds))


@pytest.mark.parametrize("share", [0.3, 0.55, 0.97, 1.0])
def test_dense_changes_are_listed_inverted(share: float) -> None:
    rng, old = np.random.default_rng(1), normal(90)
    check("banded", "BF16", stepped(old, rng.random(90) < share, 2), stepped(old, rng.random(90) < share))


def test_bands_that_begin_within_a_word_of_bits() -> None:
    """The lists of all bands share words: a list must neither lose bits of the one before nor leave its own behind."""
    old = np.tile(np.array([0x3C00, 0x3E00, 0x4000, 0x4200], np.uint16), 20)
    check("banded", "BF16", stepped(old, np.flatnonzero(np.arange(80) % 4 < np.arange(80) // 20)))


def test_raw_blocks_of_every_width() -> None:
    rng = np.random.default_rng(2)
    for dtype in ("BF16", "F32", "I64", "U8"):
        kind = DTYPES[dtype].word
        old = np.frombuffer(rng.bytes(40 * kind.itemsize), kind)
        new = ~old ^ np.arange(40).astype(kind)
        new[3] = old[3]
        row = coded_by("banded", dtype, old, new).row
        stream = np.frombuffer(b"\0" + new.tobytes(), np.uint8)
        raw = Coded(Row(row.spec, 39, row.digest, ((0, stream.size),)), {"blocks": stream})
        found = result(there, [raw], [old])
        assert found == result(on_cpu, [raw], [old])
        assert len(found[0][2]) == 39


@pytest.mark.parametrize("size", [TILE - 1, TILE, TILE + 1, BLOCK + 1])
def test_changes_at_the_ends_of_tiles_and_blocks(size: int) -> None:
    old = np.tile(np.arange(0x20, 0x40, dtype=np.uint8), size // 32 + 1)[:size]
    check("banded", "F8_E4M3", stepped(old, sorted({0, 63, 64, TILE - 2, size - 2, size - 1})))


@settings(max_examples=20)
@given(st.data())
def test_any_bits(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["BF16", "F32", "F64", "F8_E5M2", "I16", "U64"]))
    word = DTYPES[dtype].word
    size = data.draw(st.integers(1, 80))
    old = np.frombuffer(data.draw(st.binary(min_size=size * word.itemsize, max_size=size * word.itemsize)), word)
    changes = data.draw(
        st.dictionaries(st.integers(0, size - 1), st.integers(1, (1 << 8 * word.itemsize) - 1), min_size=1, max_size=30)
    )
    new = old.copy()
    for place, by in changes.items():
        new[place] ^= word.type(by)
    check(data.draw(st.sampled_from(["banded", "gap"])), dtype, (old, new))


@settings(max_examples=10)
@given(st.floats(0.0003, 1), st.sampled_from([2, 65, 129, 200]), st.integers(0, 1 << 20))
def test_any_density(share: float, size: int, seed: int) -> None:
    rng, old = np.random.default_rng(seed), normal(size, seed)
    changed = rng.random(size) < share
    changed[rng.integers(size)] = True
    check("banded", "BF16", stepped(old, changed, rng.choice([1, 1, 1, 2, 65535])))


# -- lies --------------------------------------------------------------------------------------------------------------


@cache
def honest(codec: CodecName) -> list[tuple[Coded, np.ndarray]]:
    """Small tensors with something of everything, and their old bits."""
    changes = [
        ("BF16", *stepped(normal(130), np.arange(0, 130, 9))),
        ("BF16", *stepped(normal(70, 1), np.arange(0, 70, 2), np.arange(35) % 5 + 1)),
        ("F64", *stepped(np.linspace(0.1, 9, 40).view(np.uint64), np.arange(0, 40, 5), 1 << 40)),
        ("U8", *stepped(np.arange(50, dtype=np.uint8), np.arange(0, 50, 7), 3)),
    ]
    return [(coded_by(codec, dtype, old, new), old) for dtype, old, new in changes]


@settings(max_examples=60)
@given(st.data())
def test_any_damage_has_the_same_outcome(data: st.DataObject) -> None:
    coded, old = honest(data.draw(st.sampled_from(["banded", "gap"])))[data.draw(st.integers(0, 3))]
    stream = bytearray(coded.streams["blocks"])
    match data.draw(st.sampled_from(["bits", "cut", "more", "random"])):
        case "bits":
            for bit in data.draw(st.lists(st.integers(0, 8 * len(stream) - 1), min_size=1, max_size=3)):
                stream[bit >> 3] ^= 1 << (bit & 7)
        case "cut":
            del stream[data.draw(st.integers(1, len(stream))) :]
        case "more":
            stream += data.draw(st.binary(min_size=1, max_size=9))
        case "random":
            stream = bytearray([data.draw(st.integers(0, 17)), *data.draw(st.binary(max_size=20))])
    row = coded.row
    lie = Coded(Row(row.spec, row.changed, 7, ((0, len(stream)),)), {"blocks": np.frombuffer(bytes(stream), np.uint8)})
    assert result(there, [lie], [old]) == result(on_cpu, [lie], [old])


def test_error_does_not_depend_on_what_follows_the_block() -> None:
    """A block that ends in its header is followed by bytes that would be impossible bands or parameters."""
    spec = TensorSpec("w", "BF16", (BLOCK + 1,))
    old = np.zeros(BLOCK + 1, np.uint16)
    for first in (b"\2", b"\2\4", b"\1", b"\3\1\xff"):
        stream = np.frombuffer(first + b"\xff" * 40, np.uint8)
        lie = Coded(Row(spec, 1, 7, ((0, len(first)), (1, 40))), {"blocks": stream})
        found = result(there, [lie], [old])
        assert found == result(on_cpu, [lie], [old])
        assert "ends before its codes do" in found[1]


def test_block_that_changes_nothing_is_refused_before_its_far_list_is_read() -> None:
    """One band, no changed set, a far set with a gap that runs past its end."""
    stream = np.frombuffer((1 | 31 << 8 | 1 << 19).to_bytes(3, "little"), np.uint8)
    lie = Coded(Row(TensorSpec("w", "BF16", (40,)), 1, 7, ((0, 3),)), {"blocks": stream})
    found = result(there, [lie], [normal(40)])
    assert found == result(on_cpu, [lie], [normal(40)])
    assert "changes nothing" in found[1]


def test_first_error_in_the_order_of_the_file_is_raised() -> None:
    good = coded_by("gap", "BF16", *stepped(normal(40), [3, 9]), name="a")
    cut = coded_by("gap", "F32", *stepped(np.ones(40, np.float32).view(np.uint32), [3, 9]), name="b")
    late = coded_by("gap", "BF16", *stepped(normal(40), [5]), name="c")
    lies = [good]
    for one, stream in ((cut, cut.streams["blocks"][:-1]), (late, np.append(late.streams["blocks"], np.uint8(0)))):
        lies.append(Coded(Row(one.row.spec, one.row.changed, 7, ((0, stream.size),)), {"blocks": stream}))
    olds = [normal(40), np.ones(40, np.float32).view(np.uint32), normal(40)]
    found = result(there, lies, olds)
    assert found == result(on_cpu, lies, olds)
    assert "tensor b" in found[1]


def claiming(coded: Coded, changed: int) -> Coded:
    """The same streams under a table that makes so much room for them (a block is added to what it says)."""
    row = coded.row
    return Coded(Row(row.spec, changed - BLOCK, row.digest, row.blocks), coded.streams)


@pytest.mark.parametrize("room", [0, 2, 3, 5, 6])
def test_streams_that_change_more_than_there_is_room_for(room: int) -> None:
    olds = [normal(40, 3), normal(40, 4), normal(40, 5)]
    honest = [coded_by("gap", "BF16", *stepped(old, [3, 9]), name=f"w{i}") for i, old in enumerate(olds)]
    coded = [claiming(honest[0], room), *(claiming(one, BLOCK) for one in honest[1:])]
    found = result(there, coded, olds)
    assert found == result(on_cpu, coded, olds)
    assert (found[0] is FormatError) == (room < 6)


def test_memory_is_bounded_by_the_room_that_is_given() -> None:
    olds = [normal(40, i) for i in range(4)]
    coded = [coded_by("gap", "BF16", *stepped(old, [3, 9, 10])) for old in olds]
    batch = Batch([slot_of(one.row.spec, old) for one, old in zip(coded, olds, strict=True)])
    found = KERNELS.decode(batch, [Blocks(one.row.blocks, one.streams["blocks"]) for one in coded], 4)
    assert found.flips.bounds == [0, 3, 6, 6, 6]
    assert found.now.numel() == 6


# -- a whole subscriber ------------------------------------------------------------------------------------------------


class Counted(TorchTarget):
    """A target that counts how many of its tensors were copied to the host."""

    reads = 0

    def read(self, name: str) -> Bits:
        self.reads += 1
        return super().read(name)


@pytest.mark.parametrize("codec", ["banded", "gap"])
def test_subscriber_decodes_on_the_device_and_reads_nothing(codec: CodecName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two versions that come at once, the second changes weights that are staged only: those are on the host."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(20, 30, bias=False), torch.nn.Linear(30, 4, bias=False)]
    model = torch.nn.Sequential(*layers).to(DEVICE, torch.bfloat16)
    mine, channel = copy.deepcopy(model), store()
    optimizer = adam(model, 4e-5)
    with wc.Publisher(channel, model, optimizer=optimizer, codec=codec, threads=1) as publisher:
        monkeypatch.setattr(torch_model, "kernels_for", lambda device, workers: KERNELS)
        target = Counted(mine)
        with wc.Subscriber(channel, target, threads=1) as subscriber:
            for versions in (1, 1, 2):
                for _ in range(versions):
                    for parameter in model.parameters():
                        parameter.grad = torch.randn_like(parameter)
                    optimizer.step()
                    commit = publisher.publish().result(60)
                    assert commit.codec == codec
                    assert commit.changed > 10
                target.reads = 0
                assert subscriber.sync().position == commit.position
                assert (target.reads > 0) == (versions > 1)
                same(model, mine)


def test_target_leaves_decoding_to_the_host_where_its_kernels_do_not_decode() -> None:
    target = TorchTarget(torch.nn.Linear(2, 2, dtype=torch.bfloat16))
    assert target.block_decoder(["weight"]) is None


def test_unknown_tensor_is_refused_as_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_model, "kernels_for", lambda device, workers: KERNELS)
    target = TorchTarget(torch.nn.Linear(2, 2, dtype=torch.bfloat16).to(DEVICE))
    assert target.block_decoder(["weight"]) is not None
    assert target.block_decoder(["weight", "other"]) is None


def test_kernels_compile_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    subprocess.run([sys.executable, compiled_kernels.__file__, "decoding"], env=environment, check=True)
