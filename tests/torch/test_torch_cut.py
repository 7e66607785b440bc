"""Models published in boxes: however changes are found and wherever they are coded, the bytes are the same."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from training import DETECTORS, DEVICE, adam, same, store  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.format.coding import Coding, Cutting  # noqa: E402
from weightcast.format.patchfile import PatchReader  # noqa: E402
from weightcast.format.safetensors import BytesSource  # noqa: E402
from weightcast.format.scan import Change, ranked  # noqa: E402
from weightcast.format.spec import TensorSpec  # noqa: E402
from weightcast.format.workers import ONE  # noqa: E402
from weightcast.store.memory import MemoryStore  # noqa: E402
from weightcast.torch import TorchTarget  # noqa: E402
from weightcast.torch import model as torch_model  # noqa: E402
from weightcast.torch.batch import Batch, Slot, unsigned  # noqa: E402
from weightcast.torch.kernels.gpu import GpuKernels  # noqa: E402
from weightcast.torch.kernels.operations import PlainKernels  # noqa: E402

CUT = [wc.Cut("0.weight", axis=1, parts=4), wc.Cut("2.weight", axis=0, parts=2), wc.Cut("2.weight", axis=1, parts=3)]


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 8)).to(DEVICE, dtype)


def publish(dtype: torch.dtype, detect: Any, cut: Any = CUT) -> tuple[MemoryStore, nn.Module, list[bytes]]:
    channel, model = store(), model_of(dtype)
    optimizer = adam(model, 3e-4)
    objects = []
    options = {"detect": detect, "dtype": "BF16", "threads": 1, "cut": cut}
    with wc.Publisher(channel, model, optimizer=optimizer, **options) as publisher:
        for step in range(1, 4):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            commit = publisher.publish(step=step).result(60)
            assert commit.codec == "banded"
            objects.append(channel.get(commit.objects[0].key))
    return channel, model, objects


def must_follow(channel: MemoryStore, model: nn.Module) -> None:
    target = model_of(torch.bfloat16)
    with wc.Subscriber(channel, TorchTarget(target)) as subscriber:
        subscriber.sync()
    same(model, target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["pure bf16", "fp32 masters"])
def test_all_detectors_send_the_same_boxes(dtype: torch.dtype) -> None:
    found = {detect: publish(dtype, detect) for detect in DETECTORS}
    channel, model, objects = found["transient"]
    assert [one[2] for one in found.values()] == [objects] * 3
    rows = PatchReader(BytesSource(objects[-1])).rows
    assert [row.place.box.offset for row in rows if row.spec.name == "0.weight"] == [(0, at) for at in (0, 10, 20, 30)]
    assert len([row for row in rows if row.spec.name == "2.weight"]) == 6
    must_follow(channel, model)


@pytest.mark.parametrize("kernels", [GpuKernels, PlainKernels])
@pytest.mark.parametrize("detect", ["transient", "device"])
def test_publisher_with_the_kernels_of_a_device_sends_the_bytes_of_a_cpu(
    kernels: type, detect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_model, "kernels_for", lambda device, workers: kernels())
    channel, model, objects = publish(torch.float32, detect)
    must_follow(channel, model)
    monkeypatch.undo()
    assert objects == publish(torch.float32, detect)[2]


@pytest.mark.parametrize("kernels", [GpuKernels, PlainKernels])
def test_boxes_of_several_blocks_are_those_of_the_host(kernels: type) -> None:
    """A tensor of three dimensions, one that is not cut, and one in which nothing changed."""
    shapes = {"cube": (3, 5, 48), "plain": (70,), "still": (4, 4), "rows": (64, 9)}
    cuts = (wc.Cut("cube", 2, 4), wc.Cut("cube", 0, 2), wc.Cut("still", 1, 2), wc.Cut("rows", 0, 8))
    torch.manual_seed(1)
    specs = [TensorSpec(name, "BF16", shape) for name, shape in shapes.items()]
    bits = {name: (torch.randn(shape) * 0.02).bfloat16().view(torch.int16) for name, shape in shapes.items()}
    on_device = {name: tensor.clone().to(DEVICE) for name, tensor in bits.items()}
    batch = Batch([Slot(spec, on_device[spec.name]) for spec in specs])
    made = kernels()
    old = made.take(batch)
    for name, tensor in on_device.items():
        tensor += ((torch.rand(tensor.shape) < 0.2) & (name != "still")).to(DEVICE, torch.int16)
    coding = Coding("banded", Cutting(cuts))
    found = list(made.deliver(batch, made.differ(batch, old), coding, old).changes({}))
    assert [change.spec.name for change in found] == ["cube", "plain", "rows"]
    changes = [Change(one.spec, one.indices, one.was, one.now, one.gain) for one in found]
    olds = [unsigned(bits[one.spec.name].reshape(-1)) for one in found]
    for one, other in zip(found, ranked(changes, olds, coding, ONE), strict=True):
        assert encoded(one) == encoded(other)


def encoded(change: Change) -> bytes:
    from weightcast.format.patch import ModelSize, Patch, TensorPatch
    from weightcast.format.patchfile import encode_prepared

    tensor = TensorPatch(change.spec, change.indices, change.now, change.was, 0)
    patch = Patch("0" * 64, "1" * 64, ModelSize(1, 1, 1), (tensor,))
    return encode_prepared(patch, "banded", {change.spec.name: change.prepared}, ONE)


@pytest.mark.parametrize("detect", [None, "host"])
def test_streams_are_cut(detect: Any) -> None:
    channel, model = store(), model_of(torch.bfloat16)
    with wc.StreamPublisher(channel, cut=CUT, detect=detect) as publisher:
        publisher.send(model.state_dict().items()).result(60)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        commit = publisher.send(model.state_dict().items(), step=1).result(60)
    rows = PatchReader(BytesSource(channel.get(commit.objects[0].key))).rows
    assert len([row for row in rows if row.spec.name == "0.weight"]) == 4
    must_follow(channel, model)


def test_edit_outside_the_optimizer_is_sent_whole() -> None:
    channel, model = store(), model_of(torch.bfloat16)
    optimizer = adam(model, 3e-5)
    with wc.Publisher(channel, model, optimizer=optimizer, threads=1, cut=CUT, check_every=1) as publisher:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        model[0].weight.data[3, 7] = 1.5
        publisher.publish(step=1).result(60)
    must_follow(channel, model)
