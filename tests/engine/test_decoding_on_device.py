"""A worker's blocks are decoded by Triton (interpreted, or on a GPU) to what the host decodes, errors included."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from cases import Bag  # noqa: E402
from changes import changed  # noqa: E402
from several import objects_of  # noqa: E402
from sharded_engine import SHAPES, Engine, Stream, live_worker, memory, stream, weights_of  # noqa: E402
from surgery import Table, with_block, with_column  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.engine.box_digests import BoxDigest  # noqa: E402
from weightcast.engine.cuts import cuts_of  # noqa: E402
from weightcast.engine.decoding import Decoded, Version, decoding_kernels, prepare_coded  # noqa: E402
from weightcast.engine.layout import Part  # noqa: E402
from weightcast.engine.learn import learn  # noqa: E402
from weightcast.engine.live import LiveParameters  # noqa: E402
from weightcast.errors import FormatError, WeightcastError  # noqa: E402
from weightcast.format.joined import joined, open_objects  # noqa: E402
from weightcast.format.safetensors import BytesSource  # noqa: E402
from weightcast.format.spec import TensorSpec  # noqa: E402
from weightcast.torch.kernels.gpu import GpuKernels  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Counting(GpuKernels):
    """Kernels that remember how many tensors they decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.decoded = 0

    def decode(self, batch: Any, blocks: Any, most: int) -> Any:
        self.decoded += len(batch.specs)
        return super().decode(batch, blocks, most)


def version_of(*objects: bytes) -> Version:
    return joined(open_objects(map(BytesSource, objects)))


def worker(rank: int, count: int, weights: Bag) -> tuple[torch.nn.Module, LiveParameters]:
    model, live = live_worker(Engine(rank, count), weights)
    model = model.to(DEVICE)
    there = LiveParameters(model, live.layout)
    there.digests.update(live.digests)
    return model, there


def result(model: torch.nn.Module, live: LiveParameters, one: Decoded) -> tuple[Any, ...]:
    """What was staged, and the memory that it leads to. The memory and the digests stay as they are."""
    storages = [tensor.data.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    before, digests = [storage.clone() for storage in storages], dict(live.digests)
    live.apply(one.prepared)
    after = [bytes(storage.cpu()) for storage in storages]
    for storage, saved in zip(storages, before, strict=True):
        storage.copy_(saved)
    live.digests.clear()
    live.digests.update(digests)
    return one.undecoded, one.prepared.boxes, one.prepared.changed, after


def both(
    model: torch.nn.Module, live: LiveParameters, versions: Sequence[Version], room: int | None = None
) -> tuple[Decoded, Counting]:
    """What the device decodes, which is what the host does."""
    kernels = Counting()
    one = prepare_coded(live, versions, room=room, kernels=lambda device: kernels)
    on_host = prepare_coded(live, versions, room=room, kernels=lambda device: None)
    assert result(model, live, one) == result(model, live, on_host)
    return one, kernels


@pytest.mark.parametrize("codec", ["gap", "banded"])
@pytest.mark.parametrize("count", [1, 2])
def test_device_decodes_rows_that_are_there_whole(codec: str, count: int) -> None:
    old = weights_of(SHAPES)
    new = changed(old, 0.1, 1)
    model, live = worker(0, count, old)
    version = version_of(wc.encode(wc.diff(old, new), codec, old, cut=cuts_of(live.layout)))
    one, kernels = both(model, live, [version])
    cast = {"router"}
    changing = {row.spec.name for row in version.rows}
    assert kernels.decoded == len(changing - one.undecoded - cast)
    assert one.prepared.on_device, "changes stay on the device"
    assert {live_words.dtype for live_words in (write.words for write in one.prepared.scatters)} <= {torch.int32}
    if count == 1:
        live.apply(one.prepared)
        model = Engine(0, 1).make()
        Engine(0, 1).load(model, stream(new))
        assert {part: live.read(part).tolist() for part in live.layout} == {
            part: LiveParameters(model, live.layout).read(part).tolist() for part in live.layout
        }


def test_device_decodes_later_versions_and_several_objects() -> None:
    states = [weights_of(SHAPES)]
    for seed in (1, 2):
        states.append(changed(states[-1], 0.1, seed, {"q", "k", "down", "norm", "experts.0.up"}))
    for rank, count in ((0, 1), (1, 2)):
        model, live = worker(rank, count, states[0])
        before = memory(model.cpu()) if DEVICE == "cpu" else None
        versions = [version_of(*objects_of(wc.diff(a, b), a, ("gap", "banded", "gap"))) for a, b in pairwise(states)]
        both(model, live, versions)
        assert before is None or memory(model) == before


@pytest.mark.parametrize("codec", ["gap", "banded"])
def test_columns_of_several_tiles_are_written_to_where_a_worker_has_them(codec: str) -> None:
    old = weights_of({"down": ("BF16", (70, 260)), "o": ("F32", (30, 200))})
    new = changed(old, 0.02, 1)
    cut = [wc.Cut("*", axis=1, parts=2)]
    models = [torch.nn.Module() for _ in range(2)]
    for rank, model in enumerate(models):
        for spec in old.table:
            shape = spec.shape[0], spec.shape[1] // 2
            dtype = torch.bfloat16 if spec.dtype == "BF16" else torch.float32
            # Transposed in memory, and after other elements.
            room = torch.zeros(shape[0] * shape[1] + 3, dtype=dtype)[3:].view(shape[1], shape[0]).t()
            model.register_parameter(spec.name, torch.nn.Parameter(room, requires_grad=False))

        def load(given: Stream, model: torch.nn.Module = model, rank: int = rank) -> None:
            for name, tensor in given:
                half = tensor.shape[1] // 2
                model.get_parameter(name).data.copy_(tensor.narrow(1, rank * half, half))

        layout = learn(model, load, old.table)
        load(stream(old))
        live = LiveParameters(model.to(DEVICE), layout)
        one, kernels = both(model, live, [version_of(wc.encode(wc.diff(old, new), codec, old, cut=cut))])
        assert (one.undecoded, kernels.decoded, one.prepared.writes) == (frozenset(), 2, one.prepared.on_device)


def test_without_room_on_the_device_nothing_is_staged() -> None:
    old = weights_of(SHAPES)
    version = version_of(wc.encode(wc.diff(old, changed(old, 0.3, 1)), "banded", old))
    model, live = worker(0, 1, old)
    one, _ = both(model, live, [version], room=0)
    assert one.prepared.writes == []
    assert one.undecoded == {row.spec.name for row in version.rows}


def test_device_refuses_another_count_of_changes_than_the_table_says() -> None:
    old = weights_of(SHAPES)
    data = wc.encode(wc.diff(old, changed(old, 0.3, 1, {"q"})), "banded", old)
    _, live = worker(0, 1, old)
    rows = version_of(data).rows
    with pytest.raises(FormatError, match="the table says"):
        prepare_coded(
            live,
            [version_of(with_column(data, "changed", 0, rows[0].changed - 1))],
            kernels=lambda device: GpuKernels(),
        )


def test_live_digests_are_those_of_the_host() -> None:
    weights = weights_of(SHAPES)
    for rank, count in ((0, 1), (1, 2)):
        model, live = live_worker(Engine(rank, count), weights)
        there = LiveParameters(model.to(DEVICE), live.layout, has_kernels=lambda device: True)
        for _ in range(2):
            assert there.digest_each(list(weights.table)) == {
                spec.name: [wanted(live, part, spec) for part in live.layout.locate(spec.name)]
                for spec in weights.table
            }
            assert there.digests == live.digests
            with torch.no_grad():
                for name in ("norm", "qkv"):
                    model.get_parameter(name).view(torch.int16).bitwise_xor_(1)
            for spec in weights.table:
                live.digest(spec)


def wanted(live: LiveParameters, part: Part, spec: TensorSpec) -> BoxDigest:
    return next(one for one in live.digest(spec) if one.box == part.box)


@pytest.mark.parametrize("block", [b"", b"\x00", b"\x00\x01\x02", b"\x01\xff\xff\xff", b"\x09\x00"])
def test_device_refuses_what_the_host_refuses(block: bytes) -> None:
    shapes = {"norm": SHAPES["norm"], "q": SHAPES["q"]}
    old = weights_of(SHAPES)
    new = changed(old, 0.3, 1, set(shapes))
    data = wc.encode(wc.diff(old, new), "banded", old)
    assert Table.of(data).lengths
    _, live = worker(0, 1, old)
    damaged = with_block(data, 0, block or b"\xff" * 40)
    found = []
    for kernels in (GpuKernels(), None):
        with pytest.raises(WeightcastError) as caught:
            prepare_coded(live, [version_of(damaged)], kernels=lambda device, one=kernels: one)
        found.append((type(caught.value), str(caught.value)))
    assert found[0] == found[1]
    assert found[0][0] is FormatError


def test_parameters_on_the_host_are_decoded_there() -> None:
    assert decoding_kernels(torch.device("cpu")) is None
