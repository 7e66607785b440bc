"""Models, optimizers and options that a publisher of a model refuses, before anything is uploaded."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from training import DEVICE, adam, small, store  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.errors import UsageError  # noqa: E402
from weightcast.store.memory import MemoryStore  # noqa: E402
from weightcast.torch import TorchTarget  # noqa: E402


@pytest.fixture
def channel() -> MemoryStore:
    return store()


def test_optimizer_of_another_model_is_refused(channel: MemoryStore) -> None:
    model = small(torch.bfloat16)
    with pytest.raises(UsageError, match="owns none of the model's parameters"):
        wc.Publisher(channel, model, optimizer=adam(small(torch.bfloat16)))
    assert not list(channel.list(""))


def test_optimizer_of_a_part_of_the_model_is_refused(channel: MemoryStore) -> None:
    model = small(torch.bfloat16)
    with pytest.raises(UsageError, match="none of the given optimizers owns") as caught:
        wc.Publisher(channel, model, optimizer=torch.optim.SGD(model.up.parameters(), lr=1.0))
    assert caught.value.tensor == "down.bias"
    assert not list(channel.list(""))


def test_non_contiguous_parameter_is_refused(channel: MemoryStore) -> None:
    model = nn.Linear(4, 8, dtype=torch.bfloat16)
    model.weight = nn.Parameter(model.weight.detach().t().contiguous().t())
    with pytest.raises(UsageError, match="contiguous") as caught:
        wc.Publisher(channel, model, optimizer=adam(model))
    assert caught.value.tensor == "weight"


def test_meta_tensor_is_refused(channel: MemoryStore) -> None:
    model = nn.Linear(4, 8, device="meta")
    with pytest.raises(UsageError, match="no memory yet"):
        wc.Publisher(channel, model, optimizer=adam(model))


def test_dtype_that_the_format_cannot_hold_is_refused(channel: MemoryStore) -> None:
    model = nn.Linear(4, 8)
    model.register_buffer("phases", torch.zeros(3, dtype=torch.complex128))
    with pytest.raises(UsageError, match="complex128"):
        wc.Publisher(channel, model, optimizer=adam(model))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "float8", torch.float8_e4m3fn])
def test_dtype_without_rounding_is_refused(channel: MemoryStore, dtype: object) -> None:
    model = nn.Linear(4, 8)
    with pytest.raises(UsageError, match="cannot be published as"):
        wc.Publisher(channel, model, optimizer=adam(model), dtype=dtype)


def test_model_with_another_table_is_refused(channel: MemoryStore) -> None:
    with wc.Publisher(channel, nn.Linear(4, 8)):
        pass
    for other in (nn.Linear(4, 9), nn.Linear(4, 8, bias=False), nn.Linear(4, 8, dtype=torch.bfloat16)):
        with pytest.raises(UsageError, match="A channel's table never changes"):
            wc.Publisher(channel, other)


def test_publish_after_close_is_refused(channel: MemoryStore) -> None:
    model = nn.Linear(4, 8)
    publisher = wc.Publisher(channel, model, optimizer=adam(model))
    publisher.close()
    with pytest.raises(UsageError, match="the publisher is closed"):
        publisher.publish()


def test_unknown_detector_is_refused(channel: MemoryStore) -> None:
    with pytest.raises(UsageError, match="no detector 'magic'"):
        wc.Publisher(channel, nn.Linear(4, 8), detect="magic")


def test_transient_needs_an_optimizer(channel: MemoryStore) -> None:
    with pytest.raises(UsageError, match="needs the optimizer"):
        wc.Publisher(channel, nn.Linear(4, 8), detect="transient")


def test_optimizer_for_arrays_is_refused(channel: MemoryStore) -> None:
    arrays = wc.Arrays({"w": np.zeros(3, np.float32)})
    with pytest.raises(UsageError, match="for a torch model"):
        wc.Publisher(channel, arrays, detect="host")


def test_publisher_of_a_model_refuses_other_weights(channel: MemoryStore) -> None:
    model = nn.Linear(4, 8)
    with wc.Publisher(channel, model) as publisher, pytest.raises(UsageError, match="publishes that model"):
        publisher.publish(weights=TorchTarget(nn.Linear(4, 8)))


def test_model_with_other_dtypes_than_the_channel_is_refused(channel: MemoryStore) -> None:
    with wc.Publisher(channel, nn.Linear(4, 8, dtype=torch.bfloat16)):
        pass
    with pytest.raises(UsageError, match=r"a tensor is BF16 \[8\] on one side and F32 \[8\] on the other"):
        wc.Subscriber(channel, nn.Linear(4, 8))


def test_optimizer_of_another_model_in_the_wrapper_of_accelerate_is_refused(channel: MemoryStore) -> None:
    pytest.importorskip("accelerate").Accelerator(cpu=DEVICE == "cpu")  # which the wrapper needs
    wrapper = pytest.importorskip("accelerate.optimizer").AcceleratedOptimizer

    class Foreign:
        param_groups: ClassVar[list] = []

    with pytest.raises(UsageError, match="expected a torch optimizer, got Foreign"):
        wc.Publisher(channel, nn.Linear(2, 2), optimizer=wrapper(Foreign(), device_placement=False))
