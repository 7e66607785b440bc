"""Streams of (name, tensor): every version is what was sent, and a bad stream changes nothing."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from scripted_store import ScriptedStore  # noqa: E402
from trl_transfer import BF16, F16, F32, holds, model, pulled, step, versions  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.channel.keys import DELTAS  # noqa: E402
from weightcast.errors import StoreError, UsageError  # noqa: E402
from weightcast.store.memory import MemoryStore  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}


def strange(seed: int) -> dict[str, Any]:
    """Tensors of every width, layout and shape that frameworks stream."""
    luck = torch.Generator().manual_seed(seed)
    base = torch.randn(24, 20, generator=luck)
    return {
        "bf16": base.to(BF16),
        "transposed": base.to(BF16).t(),
        "slice": base.to(F16)[3:9, 1::2],
        "fp8": base.to(torch.float8_e4m3fn),
        "scales": base[0].to(F32),
        "packed": torch.randint(0, 255, (7, 3), dtype=torch.uint8, generator=luck),
        "counts": torch.randint(0, 2**40, (5,), generator=luck),
        "mask": base[1] > 0,
        "scalar": base[2, 2].clone(),
        "empty": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(base[:2].clone()),
        "complex": torch.complex(base[0], base[1]),
        "conjugate": torch.complex(base[0], base[1]).conj(),
    }


def wire(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.detach().resolve_conj() for name, tensor in tensors.items()}


# -- exactness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("detect", [None, "device", "host"])
@pytest.mark.parametrize("codec", ["banded", "gap"])
def test_every_version_is_what_was_sent(detect: Any, codec: Any) -> None:
    store = MemoryStore()
    with wc.StreamPublisher(store, detect=detect, codec=codec, threads=2) as publisher:
        for seed in (0, 1, 1, 2, 0):
            tensors = strange(seed)
            publisher.send(on_device(tensors).items()).result(60)
            holds(store, wire(tensors), None)
    assert versions(store) == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_small_steps_are_small_patches(dtype: Any) -> None:
    store, tensors = MemoryStore(), model(dtype)
    with wc.StreamPublisher(store, dtype="BF16", threads=1) as publisher:
        publisher.send(on_device(tensors).items())
        for number in range(1, 4):
            step(tensors, number)
            manifest = publisher.send(on_device(tensors).items(), step=number, label=f"step {number}").result(60)
            assert (manifest.position.version, manifest.step, manifest.label) == (number, number, f"step {number}")
            assert 0 < manifest.changed < 300
            assert manifest.codec == "banded"
            holds(store, tensors)


def test_tensors_may_come_in_any_order() -> None:
    store, tensors, luck = MemoryStore(), strange(0) | model(BF16), random.Random(0)
    with wc.StreamPublisher(store, threads=1) as publisher:
        publisher.send(on_device(tensors).items()).result(60)
        for seed in (1, 2):
            tensors = strange(seed) | model(BF16, seed)
            shuffled = list(on_device(tensors).items())
            luck.shuffle(shuffled)
            publisher.send(shuffled).result(60)
            holds(store, wire(tensors), None)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_tensor_may_be_overwritten_once_the_next_one_is_asked_for(dtype: Any) -> None:
    store, tensors = MemoryStore(), model(dtype)

    def fleeting() -> Iterator[tuple[str, Any]]:
        room = torch.empty(4096, dtype=dtype, device=DEVICE)
        for name, tensor in tensors.items():
            there = room[: tensor.numel()].view(tensor.shape)
            there.copy_(tensor)
            yield name, there
            room.fill_(7.0)

    with wc.StreamPublisher(store, dtype="BF16", threads=1) as publisher:
        for number in range(3):
            step(tensors, number)
            publisher.send(fleeting()).result(60)
            holds(store, tensors)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_float32_of_any_layout_and_from_another_device_is_rounded(dtype: Any) -> None:
    """Sent from the host first, where its old bits are kept then."""
    store, base = MemoryStore(), torch.randn(90, 110, generator=torch.Generator().manual_seed(0))
    with wc.StreamPublisher(store, dtype=dtype, threads=2) as publisher:
        for number in range(4):
            base[number, ::7] += 1
            tensors = {"plain": base.clone(), "transposed": base.t(), "slice": base[3:40, 1::2]}
            publisher.send((tensors if number < 2 else on_device(tensors)).items()).result(60)
            holds(store, tensors, dtype)


def test_groups_are_bounded() -> None:
    """Tensors of more bytes than a group: they are compared in several."""
    store, size = MemoryStore(), 150_000_000
    tensors = {name: torch.zeros(size, dtype=torch.uint8, device=DEVICE) for name in ("a", "b", "c")}
    with wc.StreamPublisher(store, codec="gap", threads=2) as publisher:
        publisher.send(tensors.items()).result(60)
        tensors["a"][7], tensors["c"][size - 1] = 1, 2
        manifest = publisher.send(tensors.items()).result(60)
    assert manifest.changed == 2
    found = pulled(store)
    assert [int(np.flatnonzero(found[name])[0]) for name in ("a", "c")] == [7, size - 1]
    assert not found["b"].any()


def test_sends_ahead_of_the_upload_are_merged() -> None:
    store, tensors = ScriptedStore(MemoryStore()), model(BF16)
    with wc.StreamPublisher(store, threads=1, retry_after=0.05) as publisher:
        publisher.send(on_device(tensors).items()).result(60)
        store.fail("put", DELTAS, StoreError, times=2)
        receipts = []
        for number in range(1, 6):
            step(tensors, number)
            receipts.append(publisher.send(on_device(tensors).items(), step=number))
        assert receipts[-1].result(60).step == 5
        holds(store, tensors)
    assert versions(store)[-1] < 6


def test_stream_under_inference_mode_and_then_without() -> None:
    store, tensors = MemoryStore(), model(BF16)
    with wc.StreamPublisher(store, threads=1) as publisher:
        with torch.inference_mode():
            publisher.send(on_device(tensors).items()).result(60)
        step(tensors, 1)
        publisher.send(on_device(tensors).items()).result(60)
        step(tensors, 2)
        with torch.inference_mode():
            publisher.send({name: tensor + 0 for name, tensor in on_device(tensors).items()}.items()).result(60)
    holds(store, tensors)


# -- channels ----------------------------------------------------------------------------------------------------------


def test_channel_is_taken_up_where_it_is() -> None:
    store, tensors = MemoryStore(), model(BF16)
    with wc.StreamPublisher(store, threads=1) as publisher:
        publisher.send(on_device(tensors).items())
    with wc.StreamPublisher(store, threads=1) as publisher:
        receipt = publisher.send(on_device(tensors).items())
        assert receipt.result(60).position.version == 0
        assert receipt.is_new is False
    step(tensors, 1)
    with wc.StreamPublisher(store, threads=1) as publisher:
        assert publisher.send(on_device(tensors).items(), step=9).result(60).step == 9
        assert publisher.position.version == 1
        step(tensors, 2)
        publisher.send(on_device(tensors).items())
        assert publisher.flush(60).version == 2
    holds(store, tensors)


def test_model_publisher_and_stream_publisher_share_a_channel() -> None:
    store, net = MemoryStore(), torch.nn.Linear(30, 20)
    with wc.Publisher(store, net, dtype="BF16", detect="device", threads=1) as publisher:
        net.weight.data += 0.5
        publisher.publish()
    with wc.StreamPublisher(store, threads=1) as publisher:
        assert publisher.send(net.to(DEVICE).named_parameters()).result(60).position.version == 1
        net.weight.data += 0.5
        publisher.send(net.named_parameters())
    holds(store, dict(net.cpu().named_parameters()))


def test_frozen_tensors_keep_their_bits_and_may_be_sent_later() -> None:
    store, tensors = MemoryStore(), model(BF16)
    with wc.StreamPublisher(store, threads=1) as publisher:
        publisher.send(on_device(tensors).items())
    some = {name: tensor for name, tensor in tensors.items() if "norm" not in name}
    with wc.StreamPublisher(store, threads=1) as publisher:
        publisher.send(on_device(some).items())
        step(some, 1)
        publisher.send(on_device(some).items()).result(60)
        holds(store, tensors)
        step(tensors, 2)
        with pytest.raises(RuntimeError):
            publisher.send(_then_raises(on_device(tensors)))
        publisher.send(on_device(tensors).items()).result(60)
        holds(store, tensors)
        step(tensors, 3)
        publisher.send(on_device(tensors).items()).result(60)
        holds(store, tensors)


def test_tied_output_layer_that_the_channel_lacks_is_dropped() -> None:
    """`state_dict()` has a tied layer under both names; a checkpoint on the Hub has the embedding alone."""
    store, tensors = MemoryStore(), model(BF16)
    with wc.StreamPublisher(store, threads=1) as publisher:
        publisher.send(on_device(tensors).items())
    with wc.StreamPublisher(store, threads=1) as publisher:
        for number in range(3):
            step(tensors, number)
            both = {"lm_head.weight": tensors["embed.weight"].clone(), **tensors}
            publisher.send(on_device(both).items()).result(60)
            holds(store, tensors)
        step(tensors, 4)
        other = tensors | {"lm_head.weight": tensors["embed.weight"] + 1}
        with pytest.raises(UsageError, match=r"not a copy of embed\.weight") as caught:
            publisher.send(on_device(other).items())
        assert caught.value.tensor == "lm_head.weight"
        publisher.send(on_device(tensors).items()).result(60)
        holds(store, tensors)


def test_tied_output_layer_that_the_stream_lacks_follows() -> None:
    store, tensors = MemoryStore(), model(BF16)
    copy = {"lm_head.weight": tensors["embed.weight"]}
    with wc.StreamPublisher(store, threads=1) as publisher:
        publisher.send(on_device(tensors | copy).items())
    with wc.StreamPublisher(store, threads=1) as publisher:
        for number in range(2):
            step(tensors, number)
            publisher.send(on_device(tensors).items()).result(60)
            holds(store, tensors | copy)
        with pytest.raises(UsageError, match=r"taken for a copy of embed\.weight.*restart"):
            publisher.send(on_device(tensors | copy).items())


@pytest.mark.parametrize("half", [BF16, F16])
def test_halves_for_a_float32_row_are_widened(half: Any) -> None:
    """Frameworks cast all that they send; the router's bias is float32 in the checkpoint."""
    store, tensors = MemoryStore(), {"bias": torch.randn(50)}
    with wc.StreamPublisher(store, threads=1) as publisher:
        publisher.send(on_device(tensors).items())
    with wc.StreamPublisher(store, threads=1) as publisher:
        for number in range(2):
            sent = {"bias": (tensors["bias"] + number).to(half)}
            publisher.send(on_device(sent).items()).result(60)
            holds(store, {"bias": sent["bias"].float()}, None)


# -- bad streams -------------------------------------------------------------------------------------------------------


def _then_raises(tensors: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from tensors.items()
    raise RuntimeError("a rank is gone")


@pytest.mark.parametrize("at", range(4))
def test_stream_that_raises_changes_nothing(at: int) -> None:
    store, tensors = MemoryStore(), model(F32) | {"scale": torch.ones(3, dtype=torch.float64)}
    with wc.StreamPublisher(store, dtype="BF16", threads=1) as publisher:
        publisher.send(on_device(tensors).items()).result(60)
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        for number in range(1, 3):
            step(tensors, number)
            with pytest.raises(RuntimeError, match="a rank is gone"):
                publisher.send(_then_raises(dict(islice(on_device(tensors).items(), at))))
            holds(store, before)
        manifest = publisher.send(on_device(tensors).items()).result(60)
        assert manifest.position.version == 1
        holds(store, tensors)


def _shard() -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.__new__(DTensor, torch.zeros(40, 16), _spec(), requires_grad=False)


def _spec() -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    return DTensorSpec(mesh, (Replicate(),), TensorMeta(torch.Size((40, 16)), (16, 1), F32))


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "shape": (lambda: torch.zeros(16, 40), r"sent shape \[16, 40\], the channel has \[40, 16\]"),
    "dtype": (lambda: torch.zeros(40, 16, dtype=torch.int16), "sent I16"),
    "other float": (lambda: torch.zeros(40, 16, dtype=BF16), "sent BF16, before it sent F32"),
    "meta": (lambda: torch.zeros(40, 16, device="meta"), "dense tensor in memory"),
    "sparse": (lambda: torch.zeros(40, 16).to_sparse(), "dense tensor in memory"),
    "array": (lambda: np.zeros((40, 16), np.float32), "expected a tensor, got ndarray"),
    "shard": (_shard, r"is a shard.*full_tensor\(\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tensor_is_refused_after_the_stream_is_exhausted(case: str) -> None:
    """Other ranks that gather the same stream would wait for the one that sends."""
    make, says = BAD[case]
    store, tensors, reached = MemoryStore(), model(F32), []

    def stream(bad: Any) -> Iterator[tuple[str, Any]]:
        for name, tensor in tensors.items():
            yield name, bad if name == "embed.weight" else tensor.to(DEVICE)
        reached.append(True)

    with wc.StreamPublisher(store, dtype="BF16", threads=1) as publisher:
        publisher.send(on_device(tensors).items()).result(60)
        step(tensors, 1)
        with pytest.raises(UsageError, match=says) as caught:
            publisher.send(stream(make()))
        assert caught.value.tensor == "embed.weight"
        assert reached == [True]
        assert versions(store) == [0]
        publisher.send(on_device(tensors).items()).result(60)
    holds(store, tensors)


def test_all_unknown_tensors_are_named() -> None:
    store, tensors = MemoryStore(), model(BF16)
    with wc.StreamPublisher(store, threads=1) as publisher:
        publisher.send(on_device(tensors).items())
    with wc.StreamPublisher(store, threads=1) as publisher:
        more = {f"draft.{i}": torch.zeros(2) for i in range(7)}
        with pytest.raises(UsageError, match=r"no such tensor: draft\.0, draft\.1, draft\.2, draft\.3, draft\.4 …"):
            publisher.send(on_device(tensors | more).items())
        assert publisher.send(on_device(tensors).items()).result(60).position.version == 0


def test_stream_is_exhausted_when_the_publisher_has_ended() -> None:
    store, tensors, reached = MemoryStore(), model(BF16), []

    def stream() -> Iterator[tuple[str, Any]]:
        yield from on_device(tensors).items()
        reached.append(True)

    publisher = wc.StreamPublisher(store, threads=1)
    publisher.send(stream()).result(60)
    publisher.close()
    publisher.close()
    with pytest.raises(UsageError, match="closed"):
        publisher.send(stream())
    assert reached == [True, True]


def test_options_are_checked_at_once() -> None:
    with pytest.raises(UsageError, match=r"needs a model.*Publisher"):
        wc.StreamPublisher(MemoryStore(), detect="transient")
    with pytest.raises(UsageError, match="no detector"):
        wc.StreamPublisher(MemoryStore(), detect="gpu")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="float32 cannot be published as"):
        wc.StreamPublisher(MemoryStore(), dtype="F64")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="codec"):
        wc.StreamPublisher(MemoryStore(), codec="zip")  # type: ignore[arg-type]
    publisher = wc.StreamPublisher(MemoryStore())
    with pytest.raises(UsageError, match="nothing was sent yet"):
        publisher.position  # noqa: B018
    publisher.close()


def test_failed_beginning_can_be_repeated() -> None:
    store, tensors = ScriptedStore(MemoryStore()), model(BF16)
    publisher = wc.StreamPublisher(store, threads=1)
    store.fail("create", "", StoreError, times=1)
    with pytest.raises(StoreError):
        publisher.send(on_device(tensors).items())
    publisher.send(on_device(tensors).items()).result(60)
    publisher.close()
    holds(store, tensors)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_copy_on_the_gpu_that_was_overwritten_is_noticed() -> None:
    """Memory savers drop what a sleeping trainer holds on the GPU: such tensors are published whole, and exact."""
    store, tensors = MemoryStore(), model(BF16)
    with wc.StreamPublisher(store, detect="device", threads=1) as publisher:
        publisher.send(on_device(tensors).items()).result(60)
        for number in range(1, 4):
            step(tensors, number)
            for kept in _words_on_the_gpu():
                kept[: number * 100] = 0
            publisher.send(on_device(tensors).items()).result(60)
            holds(store, tensors)


def _words_on_the_gpu() -> list[Any]:
    return [one for one in gc.get_objects() if type(one) is torch.Tensor and one.is_cuda and one.dtype == torch.int16]
