"""Changes of a model that bypass the optimizer, and tensors that are replaced: found, followed or refused."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
from scripted_store import ScriptedStore  # noqa: E402
from torch import nn  # noqa: E402
from training import DETECTORS, DEVICE, Following, adam, backward, same, small, store, train  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.errors import UsageError  # noqa: E402
from weightcast.torch.model import kernels_for  # noqa: E402


@pytest.mark.parametrize("detect", DETECTORS)
def test_load_state_dict_is_noticed_at_once(detect: str, caplog: pytest.LogCaptureFixture) -> None:
    model, channel = small(torch.bfloat16), store()
    optimizer = adam(model)
    with (
        wc.Publisher(channel, model, optimizer=optimizer, detect=detect) as publisher,
        Following(channel) as follower,
    ):
        for step in range(4):
            train(model, optimizer, step)
            if step == 1:
                model.load_state_dict(small(torch.bfloat16, seed=5).state_dict())
            if step == 2:
                train(model, optimizer, 77)
            with caplog.at_level(logging.WARNING):
                publisher.publish(step=step).result(60)
            follower.catch_up()
            same(model, follower.model)
    assert ("changed outside the optimizer" in caplog.text) == (detect == "transient")


def test_edit_unseen_by_torch_without_a_step_is_noticed_at_the_next_check(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, channel = small(torch.bfloat16), store()
    optimizer = adam(model)
    with (
        wc.Publisher(channel, model, optimizer=optimizer, check_every=3) as publisher,
        Following(channel) as follower,
    ):
        for step in range(1, 7):
            train(model, optimizer, step)
            if step == 2:
                model.up.weight.data.add_(1.0)
                model.fixed.weight.data.add_(1.0)
            publisher.publish(step=step).result(60)
            follower.catch_up()
            if step != 2:
                same(model, follower.model)
    assert "changed outside the optimizer" in caplog.text


def test_edit_that_undoes_a_step_sends_nothing() -> None:
    model, channel = small(torch.bfloat16), store()
    optimizer = adam(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with (
        wc.Publisher(channel, model, optimizer=optimizer, check_every=0) as publisher,
        Following(channel) as follower,
    ):
        train(model, optimizer, 1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.data.copy_(before[name])  # behind torch's back
        model.norm.load_state_dict({key.removeprefix("norm."): value for key, value in before.items() if "norm" in key})
        publisher.publish().result(60)
        follower.catch_up()
        same(model, follower.model)


@pytest.mark.parametrize("detect", DETECTORS)
def test_replaced_buffer_is_followed(detect: str) -> None:
    model, channel = small(torch.bfloat16), store()
    optimizer = adam(model)
    with (
        wc.Publisher(channel, model, optimizer=optimizer, detect=detect) as publisher,
        Following(channel) as follower,
    ):
        for step in range(3):
            train(model, optimizer, step)
            model.scale = model.scale * 2
            publisher.publish(step=step).result(60)
            follower.catch_up()
            same(model, follower.model)


@pytest.mark.parametrize("detect", DETECTORS)
@pytest.mark.parametrize("way", ["by name", "by load_state_dict", "by data"])
def test_replaced_parameter_is_followed(detect: str, way: str, caplog: pytest.LogCaptureFixture) -> None:
    model, channel = small(torch.bfloat16), store()
    optimizer = adam(model)
    with (
        wc.Publisher(channel, model, optimizer=optimizer, detect=detect) as publisher,
        Following(channel) as follower,
    ):
        for step in range(4):
            train(model, optimizer, step)
            if step == 1 and way == "by name":
                model.up.weight = nn.Parameter(torch.ones_like(model.up.weight))
            elif step == 1 and way == "by data":
                model.up.weight.data = torch.ones_like(model.up.weight)
            elif step == 1:
                model.load_state_dict(small(torch.bfloat16, seed=5).state_dict(), assign=True)
            if step == 2:
                optimizer = adam(model)  # which nobody watches
                train(model, optimizer, 77)
            publisher.publish(step=step).result(60)
            follower.catch_up()
            same(model, follower.model)
    assert ("changed outside the optimizer" in caplog.text) == (detect == "transient")


@pytest.mark.parametrize("detect", DETECTORS)
def test_model_converted_to_another_dtype_is_refused(detect: str) -> None:
    model, channel = small(torch.float32), store()
    optimizer = adam(model)
    with wc.Publisher(channel, model, optimizer=optimizer, detect=detect, dtype="BF16") as publisher:
        model.to(torch.bfloat16)
        with pytest.raises(UsageError, match="was moved, converted or replaced"):
            publisher.publish()
        if detect == "transient":
            backward(model, 1)
            with pytest.raises(UsageError, match="was moved, converted or replaced"):
                optimizer.step()


def test_parameter_group_added_later_is_scanned() -> None:
    model, channel = small(torch.bfloat16), store()
    optimizer = adam(model.up)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("up"))
    with wc.Publisher(channel, model, optimizer=optimizer) as publisher, Following(channel) as follower:
        train(model, optimizer, 1)
        model.down.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.down.parameters())})
        for step in range(2, 5):
            train(model, optimizer, step)
            publisher.publish(step=step).result(60)
            follower.catch_up()
            same(model, follower.model)


@pytest.mark.parametrize("edited", [1, 2, 4])
def test_edit_unseen_by_torch_before_a_step_is_sent_with_the_step(
    edited: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Its patch would start from bits that no replica has."""
    model, channel = small(torch.bfloat16), store()
    optimizer = adam(model)
    with wc.Publisher(channel, model, optimizer=optimizer) as publisher, Following(channel) as follower:
        for step in range(1, 6):
            if step == edited:
                model.up.weight.data.mul_(1.5)
            train(model, optimizer, step)
            publisher.publish(step=step).result(60)
            follower.catch_up()
            same(model, follower.model)
    assert caplog.text.count("up.weight changed outside the optimizer") == 1


def test_averaged_weights_swapped_in_and_out_during_an_upload_are_published() -> None:
    """The merged patch brings a whole tensor that is what it was."""
    model, channel = small(torch.bfloat16), store()
    failing = ScriptedStore(channel)
    optimizer = adam(model)
    with wc.Publisher(failing, model, optimizer=optimizer) as publisher:
        broken = failing.fail("put", "deltas/")
        own = model.up.bias.detach().clone()
        for value in (torch.full_like(own, 7), own):
            with torch.no_grad():
                model.up.bias.copy_(value)
            publisher.publish()
        broken.end()
    with Following(channel) as follower:
        follower.catch_up()
        same(model, follower.model)


@pytest.mark.parametrize("detect", DETECTORS)
def test_publish_that_raises_midway_ends_the_publisher(detect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part of the change was already recorded: the next publish would miss it."""
    model, channel = small(torch.bfloat16), store()
    optimizer = adam(model)
    publisher = wc.Publisher(channel, model, optimizer=optimizer, detect=detect)
    train(model, optimizer, 1)
    kernels = type(kernels_for(torch.device(DEVICE)))
    monkeypatch.setattr(kernels, "deliver", raising(MemoryError))
    with pytest.raises(MemoryError):
        publisher.publish()
    monkeypatch.undo()
    with pytest.raises(MemoryError):
        publisher.publish()
    publisher.close()
    with (
        wc.Publisher(channel, model, optimizer=optimizer, detect=detect) as again,
        Following(channel) as follower,
    ):
        again.publish().result(60)
        follower.catch_up()
        same(model, follower.model)


def raising(error: type[BaseException]) -> Callable[..., None]:
    def broken(*_: object) -> None:
        raise error

    return broken


@pytest.mark.parametrize("detect", DETECTORS)
def test_swapped_buffers_are_followed(detect: str) -> None:
    model, channel = two_buffers(), store()
    with (
        wc.Publisher(channel, model, optimizer=adam(model), detect=detect) as publisher,
        Following(channel, two_buffers) as follower,
    ):
        for _ in range(3):
            model.x, model.y = model.y, model.x + 1
            publisher.publish().result(60)
            follower.catch_up()
            same(model, follower.model)


def two_buffers() -> nn.Module:
    model = nn.Linear(2, 2, dtype=torch.bfloat16, device=DEVICE)
    model.register_buffer("x", torch.zeros(3, dtype=torch.bfloat16, device=DEVICE))
    model.register_buffer("y", torch.ones(3, dtype=torch.bfloat16, device=DEVICE))
    return model


@pytest.mark.parametrize("detect", DETECTORS)
def test_replaced_module_is_followed_and_a_new_or_untied_one_refused(detect: str) -> None:
    model, channel = small(torch.bfloat16), store()
    with (
        wc.Publisher(channel, model, optimizer=adam(model), detect=detect) as publisher,
        Following(channel) as follower,
    ):
        model.down = small(torch.bfloat16, seed=3).down
        publisher.publish().result(60)
        follower.catch_up()
        same(model, follower.model)
        tied = model.head.weight
        model.head.weight = nn.Parameter(tied.detach().clone())
        with pytest.raises(UsageError, match="was moved, converted or replaced"):
            publisher.publish()
        model.head.weight = tied
        model.more = nn.Linear(2, 2)
        with pytest.raises(UsageError, match="was moved, converted or replaced"):
            publisher.publish()
        del model.more
        publisher.publish().result(60)


def test_publishing_from_another_thread_during_a_step_is_refused() -> None:
    model, channel = small(torch.bfloat16), store()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    caught: list[BaseException] = []

    def publish() -> None:
        try:
            publisher.publish()
        except UsageError as error:
            caught.append(error)

    def closure() -> torch.Tensor:
        thread = threading.Thread(target=publish)
        thread.start()
        thread.join()
        return torch.zeros(())

    with wc.Publisher(channel, model, optimizer=optimizer) as publisher, Following(channel) as follower:
        backward(model, 1)
        optimizer.step(closure)
        assert "in the middle of a step" in str(caught[0])
        publisher.publish().result(60)
        follower.catch_up()
        same(model, follower.model)
