"""Publishing from a torch training loop: exact at every version, whatever trains and however changes are found."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from scripted_store import ScriptedStore

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.errors import UsageError  # noqa: E402
from weightcast.store.memory import MemoryStore  # noqa: E402
from weightcast.torch import TorchTarget  # noqa: E402
from weightcast.torch.model import kernels_for  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DETECTORS = ("transient", "device", "host")
names = count()


class Small(nn.Module):
    """Something of everything: tied weights, a buffer that training changes, one that it does not, a frozen weight."""

    def __init__(self, width: int = 24, words: int = 40):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.up = nn.Linear(width, 3 * width)
        self.norm = nn.BatchNorm1d(3 * width)
        self.down = nn.Linear(3 * width, width)
        self.fixed = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.down(torch.relu(self.norm(self.up(self.fixed(hidden)))))
        return self.head(hidden)


def small(dtype: torch.dtype, seed: int = 0) -> Small:
    torch.manual_seed(seed)
    return Small().to(DEVICE, dtype)


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 40, (16,), generator=generator).to(DEVICE)
    target = torch.randint(0, 40, (16,), generator=generator).to(DEVICE)
    nn.functional.cross_entropy(model(tokens).float(), target).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    backward(model, seed)
    optimizer.step()
    optimizer.zero_grad()


def store() -> MemoryStore:
    return MemoryStore(f"torch-{next(names)}")


def bits_of(model: nn.Module) -> dict[str, np.ndarray]:
    """A model as it should arrive: floats as the channel has them, the rest as it is."""
    found = {}
    for name, value in model.state_dict().items():
        value = value.detach().cpu()
        if value.dtype == torch.bfloat16:
            found[name] = value.view(torch.int16).numpy().view(np.uint16)
        elif value.dtype == torch.float32:
            found[name] = wc.round_to("BF16", value.numpy())
        else:
            found[name] = value.numpy()
    return found


def same(model: nn.Module, other: nn.Module) -> None:
    mine, others = bits_of(model), bits_of(other)
    assert mine.keys() == others.keys()
    for name, bits in mine.items():
        assert np.array_equal(bits, others[name]), name


class Following:
    """A subscriber with a model of its own, which is asked for every version."""

    def __init__(self, channel: MemoryStore, make: Callable[[], nn.Module] | None = None):
        self.model = make() if make else small(torch.bfloat16, seed=9)
        self.target = TorchTarget(self.model)
        self._subscriber = wc.Subscriber(channel, self.target)

    def catch_up(self) -> wc.Position:
        staged = self._subscriber.poll()
        if staged is not None:
            self._subscriber.apply(staged)
        assert self._subscriber.position is not None
        return self._subscriber.position

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *_: object) -> None:
        self._subscriber.close()


def adam(model: nn.Module, lr: float = 3e-5, **options: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, **options)


def run(dtype: torch.dtype, every: int, steps: int, lr: float = 3e-5) -> list[str]:
    """Train a model that all detectors watch, and follow one of their channels; the hashes of what was published."""
    model, objects = small(dtype), []
    optimizer = adam(model, lr)
    channels = [store() for _ in DETECTORS]
    with ExitStack() as opened:
        publishers = [
            opened.enter_context(
                wc.Publisher(channel, model, optimizer=optimizer, detect=detect, dtype="BF16", threads=1)
            )
            for channel, detect in zip(channels, DETECTORS, strict=True)
        ]
        follower = opened.enter_context(Following(channels[0]))
        for step in range(1, steps + 1):
            train(model, optimizer, step)
            if step % every == 0:
                receipts = [publisher.publish(step=step) for publisher in publishers]
                commit, *others = [receipt.result(60) for receipt in receipts]
                assert [other.object.sha256 for other in others] == [commit.object.sha256] * 2
                assert [other.position for other in others] == [commit.position] * 2
                assert follower.catch_up() == commit.position
                assert wc.fingerprint(follower.target).digest == commit.position.digest
                same(model, follower.model)
                assert commit.codec == "banded"
                objects.append(commit.object.sha256)
    assert publishers[0].position.version == steps // every
    return objects


@pytest.mark.parametrize("every", [1, 3, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["pure bf16", "fp32 masters"])
def test_three_hundred_steps_arrive_bit_by_bit_and_all_detectors_send_the_same(dtype: torch.dtype, every: int) -> None:
    steps = 300
    assert len(set(run(dtype, every, steps))) > 0.9 * steps // every


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["pure bf16", "fp32 masters"])
def test_journal_becomes_a_shadow_where_most_weights_change(dtype: torch.dtype) -> None:
    assert len(run(dtype, 2, 12, lr=1e-2)) == 6


# -- what trains -------------------------------------------------------------------------------------------------------


def halves(model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    return [torch.optim.AdamW(parameters[:3], lr=3e-5), torch.optim.SGD(parameters[3:], lr=1e-3, momentum=0.9)]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer | list[torch.optim.Optimizer]]] = {
    "for loop": lambda model: adam(model, foreach=False),
    "foreach": lambda model: adam(model, foreach=True),
    "fused": lambda model: adam(model, fused=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
    "lbfgs": lambda model: torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad], lr=1e-3, max_iter=3),
    "two": halves,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("detect", DETECTORS)
def test_whatever_optimizes(kind: str, detect: str) -> None:
    model, channel = small(torch.float32), store()
    made = OPTIMIZERS[kind](model)
    optimizers = made if isinstance(made, list) else [made]
    with (
        wc.Publisher(channel, model, optimizer=made, detect=detect, dtype="BF16") as publisher,
        Following(channel) as follower,
    ):
        for step in range(1, 7):
            backward(model, step)
            backward(model, step + 100)  # accumulated
            for optimizer in optimizers:
                if kind == "lbfgs":
                    optimizer.step(lambda step=step: closure(model, step))
                else:
                    optimizer.step()
                optimizer.zero_grad()
            publisher.publish(step=step).result(60)
            follower.catch_up()
            same(model, follower.model)
        assert publisher.position.version == 6


def closure(model: nn.Module, step: int) -> torch.Tensor:
    model.zero_grad()
    tokens = torch.arange(16, device=DEVICE) + step
    loss = nn.functional.cross_entropy(model(tokens), tokens)
    loss.backward()
    return loss


def test_accelerates_wrapper_is_looked_into() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, channel = small(torch.float32), store()
    accelerator = accelerate.Accelerator(cpu=DEVICE == "cpu")
    prepared, optimizer = accelerator.prepare(model, adam(model))
    with (
        wc.Publisher(channel, prepared, optimizer=optimizer, dtype=torch.bfloat16) as publisher,
        Following(channel) as follower,
    ):
        for step in range(3):
            train(prepared, optimizer, step)
            publisher.publish(step=step).result(60)
            follower.catch_up()
            same(model, follower.model)


def test_a_foreign_optimizer_in_accelerates_wrapper_is_refused(channel: MemoryStore) -> None:
    wrapper = pytest.importorskip("accelerate.optimizer").AcceleratedOptimizer

    class Foreign:
        param_groups: ClassVar[list] = []

    with pytest.raises(UsageError, match="expected a torch optimizer, got Foreign"):
        wc.Publisher(channel, nn.Linear(2, 2), optimizer=wrapper(Foreign(), device_placement=False))


def test_a_compiled_model_has_the_names_of_its_own() -> None:
    model, channel = small(torch.bfloat16), store()
    compiled = torch.compile(model, backend="eager")
    optimizer = adam(model)
    with wc.Publisher(channel, compiled, optimizer=optimizer) as publisher, Following(channel) as follower:
        train(compiled, optimizer, 1)
        publisher.publish().result(60)
        follower.catch_up()
        same(model, follower.model)


def test_publishing_without_a_step_between_sends_nothing() -> None:
    model, channel = small(torch.bfloat16), store()
    with wc.Publisher(channel, model, optimizer=adam(model)) as publisher:
        receipt = publisher.publish(step=1)
        assert receipt.result(60).position.version == 0
        assert receipt.is_new is False


def test_what_flips_and_flips_back_is_not_sent() -> None:
    model, channel = nn.Linear(8, 8, dtype=torch.bfloat16, device=DEVICE), store()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(sign: float) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, sign * 0.25)
        optimizer.step()

    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(1.0)
    with wc.Publisher(channel, model, optimizer=optimizer) as publisher:
        step(1)
        step(-1)
        assert publisher.publish().result(60).position.version == 0
        step(1)
        assert publisher.publish().result(60).changed == 72


def test_nothing_stands_but_the_journal() -> None:
    model, channel = small(torch.bfloat16), store()
    optimizer = adam(model)
    with wc.Publisher(channel, model, optimizer=optimizer) as publisher:
        held: list[bool] = []
        optimizer.register_step_post_hook(lambda *_: held.extend(j.before is not None for j in journals(publisher)))
        train(model, optimizer, 1)
        assert held
        assert not any(held)
        assert all(journal.shadow is None for journal in journals(publisher))
        publisher.publish().result(60)
        assert all(journal.flips is None for journal in journals(publisher))


def journals(publisher: wc.Publisher) -> list:
    return [journal for some in publisher._detector._journals.values() for journal in some]


def test_hooks_go_with_the_publisher() -> None:
    model, channel = small(torch.bfloat16), store()
    optimizer = adam(model)
    with wc.Publisher(channel, model, optimizer=optimizer):
        assert len(optimizer._optimizer_step_pre_hooks) == 1
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    gc.collect()


def test_a_step_that_raises_in_the_middle_loses_nothing() -> None:
    model, channel = small(torch.bfloat16), store()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = type(optimizer).step

    class BrokenError(Exception):
        pass

    def broken() -> torch.Tensor:
        with torch.no_grad():
            model.embed.weight[3] += 1.0
        raise BrokenError

    with wc.Publisher(channel, model, optimizer=optimizer) as publisher, Following(channel) as follower:
        backward(model, 1)
        with pytest.raises(BrokenError):
            optimizer.step(broken)
        train(model, optimizer, 2)
        publisher.publish().result(60)
        follower.catch_up()
        same(model, follower.model)
    assert type(optimizer).step is plain


# -- edits that bypass the optimizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("detect", DETECTORS)
def test_load_state_dict_is_caught_at_once(detect: str, caplog: pytest.LogCaptureFixture) -> None:
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


def test_an_edit_behind_torchs_back_without_a_step_is_caught_at_the_next_check(
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


def test_an_edit_that_undoes_a_step_is_no_change() -> None:
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
def test_a_buffer_that_is_replaced_is_followed(detect: str) -> None:
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
def test_a_parameter_that_is_replaced_is_followed(detect: str, way: str, caplog: pytest.LogCaptureFixture) -> None:
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
def test_a_model_that_is_converted_is_refused(detect: str) -> None:
    model, channel = small(torch.float32), store()
    optimizer = adam(model)
    with wc.Publisher(channel, model, optimizer=optimizer, detect=detect, dtype="BF16") as publisher:
        model.to(torch.bfloat16)
        with pytest.raises(UsageError, match="no longer the one that is watched"):
            publisher.publish()
        if detect == "transient":
            backward(model, 1)
            with pytest.raises(UsageError, match="no longer the one that is watched"):
                optimizer.step()


def test_a_parameter_group_that_is_added_later_is_seen() -> None:
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


def test_an_edit_behind_torchs_back_before_a_step_is_sent_whole_with_it(caplog: pytest.LogCaptureFixture) -> None:
    """Its patch would begin at bits that nobody has."""
    model, channel = small(torch.bfloat16), store()
    optimizer = adam(model)
    with wc.Publisher(channel, model, optimizer=optimizer) as publisher, Following(channel) as follower:
        for step in range(1, 6):
            if step == 3:
                model.up.weight.data.mul_(1.5)
            train(model, optimizer, step)
            publisher.publish(step=step).result(60)
            follower.catch_up()
            same(model, follower.model)
    assert caplog.text.count("up.weight changed outside the optimizer") == 1


def test_averaged_weights_swapped_in_and_out_while_an_upload_is_under_way() -> None:
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
def test_a_publish_that_broke_off_ends_the_publisher(detect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part of what changed had been taken note of: what comes next would lack it."""
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
def test_buffers_that_change_places_are_followed(detect: str) -> None:
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
def test_a_module_that_is_replaced_is_followed_and_one_that_is_new_or_untied_refused(detect: str) -> None:
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
        with pytest.raises(UsageError, match="no longer the one that is watched"):
            publisher.publish()
        model.head.weight = tied
        model.more = nn.Linear(2, 2)
        with pytest.raises(UsageError, match="no longer the one that is watched"):
            publisher.publish()
        del model.more
        publisher.publish().result(60)


def test_publishing_from_another_thread_in_the_middle_of_a_step_is_refused() -> None:
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


# -- take up, restart ------------------------------------------------------------------------------------------------


def test_a_channel_is_begun_with_the_model_and_gone_on_with() -> None:
    model, channel = small(torch.float32), store()
    optimizer = adam(model)
    with wc.Publisher(channel, model, optimizer=optimizer, dtype="BF16") as publisher:
        assert publisher.position.version == 0
        train(model, optimizer, 1)
        publisher.publish(step=1)
    with wc.Publisher(channel, model, optimizer=optimizer) as publisher:  # the channel's dtype is taken
        assert publisher.position.version == 1
        train(model, optimizer, 2)
    train(model, optimizer, 3)  # unseen
    with wc.Publisher(channel, model, optimizer=optimizer) as publisher, Following(channel) as follower:
        assert publisher.position.version == 1
        assert publisher.publish(step=3).result(60).step == 3
        follower.catch_up()
        same(model, follower.model)


def test_transformers_models_are_published_as_they_are_saved(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=1, num_key_value_heads=1, head_dim=32, num_experts=4, num_experts_per_tok=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).to(DEVICE, torch.bfloat16)
    optimizer = adam(model, lr=1e-3)
    url = tmp_path / "channel"
    with wc.Publisher(url, model, optimizer=optimizer) as publisher:
        tokens = torch.randint(0, 64, (2, 8), device=DEVICE)
        for step in range(3):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            commit = publisher.publish(step=step).result(60)
    model.save_pretrained(tmp_path / "saved")
    with wc.Checkpoint(tmp_path / "saved") as saved:
        assert wc.fingerprint(saved).digest == commit.position.digest
    with wc.Subscriber(url, tmp_path / "mirror") as subscriber:
        subscriber.apply(subscriber.poll())
        subscriber.fold()
    loaded = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "mirror")
    assert torch.equal(loaded.lm_head.weight.cpu(), model.lm_head.weight.cpu())


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def channel() -> MemoryStore:
    return store()


def test_an_optimizer_of_another_model_is_refused(channel: MemoryStore) -> None:
    model = small(torch.bfloat16)
    with pytest.raises(UsageError, match="owns none of the model's parameters"):
        wc.Publisher(channel, model, optimizer=adam(small(torch.bfloat16)))
    assert not list(channel.list(""))


def test_an_optimizer_of_a_part_of_the_model_is_refused(channel: MemoryStore) -> None:
    model = small(torch.bfloat16)
    with pytest.raises(UsageError, match="none of the given optimizers owns") as caught:
        wc.Publisher(channel, model, optimizer=torch.optim.SGD(model.up.parameters(), lr=1.0))
    assert caught.value.tensor == "down.bias"
    assert not list(channel.list(""))


def test_a_parameter_that_is_not_contiguous_is_refused(channel: MemoryStore) -> None:
    model = nn.Linear(4, 8, dtype=torch.bfloat16)
    model.weight = nn.Parameter(model.weight.detach().t().contiguous().t())
    with pytest.raises(UsageError, match="contiguous") as caught:
        wc.Publisher(channel, model, optimizer=adam(model))
    assert caught.value.tensor == "weight"


def test_a_meta_tensor_is_refused(channel: MemoryStore) -> None:
    model = nn.Linear(4, 8, device="meta")
    with pytest.raises(UsageError, match="no memory yet"):
        wc.Publisher(channel, model, optimizer=adam(model))


def test_a_dtype_the_wire_cannot_hold_is_refused(channel: MemoryStore) -> None:
    model = nn.Linear(4, 8)
    model.register_buffer("phases", torch.zeros(3, dtype=torch.complex128))
    with pytest.raises(UsageError, match="complex128"):
        wc.Publisher(channel, model, optimizer=adam(model))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "float8", torch.float8_e4m3fn])
def test_a_dtype_that_is_not_rounded_to_is_refused(channel: MemoryStore, dtype: object) -> None:
    model = nn.Linear(4, 8)
    with pytest.raises(UsageError, match="cannot be published as"):
        wc.Publisher(channel, model, optimizer=adam(model), dtype=dtype)


def test_a_model_of_another_table_is_refused(channel: MemoryStore) -> None:
    with wc.Publisher(channel, nn.Linear(4, 8)):
        pass
    for other in (nn.Linear(4, 9), nn.Linear(4, 8, bias=False), nn.Linear(4, 8, dtype=torch.bfloat16)):
        with pytest.raises(UsageError, match="A channel's table never changes"):
            wc.Publisher(channel, other)


def test_a_publish_after_close_is_refused(channel: MemoryStore) -> None:
    model = nn.Linear(4, 8)
    publisher = wc.Publisher(channel, model, optimizer=adam(model))
    publisher.close()
    with pytest.raises(UsageError, match="closed"):
        publisher.publish()


def test_a_detector_that_is_not_there_is_refused(channel: MemoryStore) -> None:
    with pytest.raises(UsageError, match="no detector 'magic'"):
        wc.Publisher(channel, nn.Linear(4, 8), detect="magic")


def test_transient_needs_an_optimizer(channel: MemoryStore) -> None:
    with pytest.raises(UsageError, match="needs the optimizer"):
        wc.Publisher(channel, nn.Linear(4, 8), detect="transient")


def test_arrays_have_no_optimizer(channel: MemoryStore) -> None:
    arrays = wc.Arrays({"w": np.zeros(3, np.float32)})
    with pytest.raises(UsageError, match="for a torch model"):
        wc.Publisher(channel, arrays, detect="host")


def test_a_models_publisher_publishes_no_other_weights(channel: MemoryStore) -> None:
    model = nn.Linear(4, 8)
    with wc.Publisher(channel, model) as publisher, pytest.raises(UsageError, match="publishes that model"):
        publisher.publish(weights=TorchTarget(nn.Linear(4, 8)))


def test_a_target_of_other_dtypes_than_the_channels_is_refused(channel: MemoryStore) -> None:
    with wc.Publisher(channel, nn.Linear(4, 8, dtype=torch.bfloat16)):
        pass
    with pytest.raises(UsageError, match="BF16"):
        wc.Subscriber(channel, TorchTarget(nn.Linear(4, 8)))
