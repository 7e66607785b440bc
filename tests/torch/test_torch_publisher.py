"""Publishing from a torch training loop: exact at every version, whatever trains and however changes are found."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from training import DETECTORS, DEVICE, Following, adam, backward, same, small, store, train  # noqa: E402
from waiting import until  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.torch import TorchTarget  # noqa: E402
from weightcast.torch.batch import Copied  # noqa: E402


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
                assert [other.objects[0].sha256 for other in others] == [commit.objects[0].sha256] * 2
                assert [other.position for other in others] == [commit.position] * 2
                assert follower.catch_up() == commit.position
                assert wc.fingerprint(follower.target).digest == commit.position.digest
                same(model, follower.model)
                assert commit.codec == "banded"
                objects.append(commit.objects[0].sha256)
    assert publishers[0].position.version == steps // every
    return objects


@pytest.mark.parametrize("every", [1, 3, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["pure bf16", "fp32 masters"])
def test_hundreds_of_steps_arrive_exactly_and_all_detectors_send_the_same(dtype: torch.dtype, every: int) -> None:
    """A digest's gains are owed for 64 publishes, and the model is digested at every 50th: runs go beyond both."""
    steps = 300 if every > 1 else 100
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
def test_steps_of_any_optimizer_arrive_exactly(kind: str, detect: str) -> None:
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


def test_optimizer_in_the_wrapper_of_accelerate_is_unwrapped() -> None:
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


def test_compiled_model_is_published_under_its_original_names() -> None:
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


def test_change_undone_before_a_publish_is_not_sent() -> None:
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


def test_copies_of_the_model_do_not_pile_up_between_publishes() -> None:
    """A device keeps none after a step; the host keeps one, to rank against, until what changed is published."""
    model, channel = small(torch.bfloat16), store()
    optimizer = adam(model)
    with wc.Publisher(channel, model, optimizer=optimizer) as publisher:
        gc.collect()
        before, during, after = copies(), list[int](), list[int]()
        optimizer.register_step_pre_hook(lambda *_: during.append(copies()))
        optimizer.register_step_post_hook(lambda *_: after.append(copies()))
        for step in range(3):
            train(model, optimizer, step)
        assert during == [before + 1, *[before + 1 + HELD] * 2]
        assert after == [before + HELD] * 3
        publisher.publish().result(60)
        until(lambda: copies() == before)


HELD = 0 if DEVICE == "cuda" else 1


def copies() -> int:
    """How many copies of a model's bits are alive."""
    return sum(type(one) is Copied for one in gc.get_objects())


def test_closed_publisher_leaves_no_hooks() -> None:
    model, channel = small(torch.bfloat16), store()
    optimizer = adam(model)
    with wc.Publisher(channel, model, optimizer=optimizer):
        assert len(optimizer._optimizer_step_pre_hooks) == 1
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    gc.collect()


def test_step_that_raises_midway_loses_nothing() -> None:
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


# -- take up, restart ------------------------------------------------------------------------------------------------


def test_channel_is_created_from_the_model_and_continued() -> None:
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


def test_anchor_in_place_of_an_unreachable_head_has_the_configuration(tmp_path: Path) -> None:
    class Configured(nn.Linear):
        config = SimpleNamespace(save_pretrained=lambda folder: (folder / "config.json").write_text("{}"))

    channel, mirror = tmp_path / "channel", tmp_path / "mirror"
    with wc.Publisher(channel, Configured(4, 4), threads=1):
        pass
    for path in channel.rglob("*.safetensors"):
        path.unlink()
    model = Configured(4, 4)
    with wc.Publisher(channel, model, threads=1) as publisher:
        assert publisher.position.version == 1
    with wc.Subscriber(channel, mirror, threads=1) as subscriber:
        subscriber.sync()
    assert (mirror / "config.json").read_text() == "{}"
    with wc.Checkpoint(mirror) as files:
        assert wc.fingerprint(files) == wc.fingerprint(TorchTarget(model))
