"""`WeightcastCallback` in the real `transformers.Trainer`: whatever training does, followers end on its bits."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_store import ScriptedStore
from waiting import until

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from trainers import BF16, At, interrupt, small_model, trainer_of  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.channel.chain import Chain  # noqa: E402
from weightcast.errors import ConflictError, UnreachableError, UsageError  # noqa: E402
from weightcast.integrations.transformers import WeightcastCallback  # noqa: E402
from weightcast.store.base import Store  # noqa: E402
from weightcast.store.memory import MemoryStore  # noqa: E402

METRICS = {"weightcast/version", "weightcast/changed", "weightcast/bytes"}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    tf.utils.logging.disable_progress_bar()
    yield
    tf.utils.logging.enable_progress_bar()


def followed(store: Store) -> Any:
    """A bf16 model, brought to the head."""
    model = small_model(BF16, seed=99)
    with wc.Subscriber(store, model, threads=1) as subscriber:
        subscriber.sync()
    return model


def assert_rounded(follower: Any, trained: Any) -> None:
    theirs = trained.state_dict()
    for name, tensor in follower.state_dict().items():
        own = theirs[name].detach()
        mine = tensor.view(torch.int16).numpy().view(np.uint16)
        bits = own.view(torch.int16).numpy().view(np.uint16) if own.dtype == BF16 else wc.round_to("BF16", own.numpy())
        assert np.array_equal(mine, bits), name


def steps_of(store: Store) -> list[int | None]:
    chain = Chain.open(store)
    return [chain.manifest(version).step for version in chain.versions()]


def digest_of(folder: Path) -> str:
    with wc.Checkpoint(folder) as checkpoint:
        return wc.fingerprint(checkpoint).digest


def hooks_of(trainer: Any) -> int:
    optimizer = trainer.optimizer.optimizer
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


class Waiting(tf.TrainerCallback):
    """Waits for each commit, so that tests know how many there are; notes what callbacks behind ours are given."""

    def __init__(self, callback: WeightcastCallback):
        self.callback = callback
        self.logs: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.callback.receipt is not None:
            self.callback.receipt.result(60)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        self.logs.append(dict(logs))


class Held(tf.TrainerCallback):
    """Closes the bucket once the channel is begun."""

    def __init__(self, store: ScriptedStore):
        self.store, self.held = store, False

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.store.hang("put")
        self.held = True


def waiting(store: Store, **options: Any) -> tuple[WeightcastCallback, Waiting]:
    callback = WeightcastCallback(store, **options)
    return callback, Waiting(callback)


# -- what is published -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("detect", [None, "device"])
def test_followers_of_an_fp32_model_get_it_rounded(tmp_path: Path, detect: str | None) -> None:
    store = MemoryStore()
    callback, wait = waiting(store, dtype="BF16", detect=detect)
    trainer = trainer_of(small_model(), tmp_path, callback, wait, gradient_accumulation_steps=2)
    trainer.train()
    assert steps_of(store) == [None, 1, 2, 3]
    assert callback.receipt is not None
    assert callback.publisher is not None
    assert callback.receipt.result(0).position == callback.publisher.position
    assert_rounded(followed(store), trainer.model)


@pytest.mark.parametrize("compiled", [False, True])
def test_pulled_folder_is_what_save_model_writes(tmp_path: Path, compiled: bool) -> None:
    store = MemoryStore()
    changes = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled else {}
    trainer = trainer_of(small_model(BF16), tmp_path / "out", *waiting(store), **changes)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    with wc.Subscriber(store, tmp_path / "mirror", threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        assert subscriber.apply(staged).digest == digest_of(tmp_path / "saved")
        subscriber.fold()
    assert_rounded(tf.Qwen3ForCausalLM.from_pretrained(tmp_path / "mirror"), trainer.model)  # config.json is there


def test_last_step_is_published_if_it_is_not_a_multiple(tmp_path: Path) -> None:
    store = MemoryStore()
    trainer = trainer_of(small_model(BF16), tmp_path, *waiting(store, every=2), max_steps=5)
    trainer.train()
    assert steps_of(store) == [None, 2, 4, 5]
    assert_rounded(followed(store), trainer.model)


def test_best_model_loaded_at_the_end_is_published(tmp_path: Path) -> None:
    store = MemoryStore()
    best: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = trainer_of(small_model(BF16), tmp_path, *waiting(store), **best)
    trainer.train()
    assert trainer.state.best_global_step == 1  # the worst one: it learns
    assert steps_of(store) == [None, 1, 2, 3, 1]
    assert_rounded(followed(store), trainer.model)


def test_interval_that_is_not_positive_is_refused() -> None:
    with pytest.raises(UsageError, match="every 0 steps"):
        WeightcastCallback("memory://", every=0)


def test_only_rank_zero_publishes(tmp_path: Path) -> None:
    store = MemoryStore()
    callback = WeightcastCallback(store)
    trainer = trainer_of(small_model(BF16), tmp_path, callback)
    trainer.state.is_world_process_zero = False
    trainer.is_world_process_zero = lambda: False
    trainer.train()
    assert callback.publisher is None
    assert not list(store.list(""))


def test_channel_of_another_model_is_refused_before_the_first_step(tmp_path: Path) -> None:
    store = MemoryStore()
    wc.Publisher(store, small_model(BF16, num_hidden_layers=2), threads=1).close()
    trainer = trainer_of(small_model(BF16), tmp_path, WeightcastCallback(store))
    with pytest.raises(UsageError, match=r"one side only .*tensor model\.layers\.1.*table never changes"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert hooks_of(trainer) == 0
    assert steps_of(store) == [None]


# -- more than one training --------------------------------------------------------------------------------------------


def test_resumed_training_continues_in_the_same_channel(tmp_path: Path) -> None:
    store = MemoryStore()
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    first = trainer_of(small_model(BF16), tmp_path, *waiting(store), At(3, interrupt), **saving)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    again = trainer_of(small_model(BF16, seed=7), tmp_path, *waiting(store), **saving)
    again.train(resume_from_checkpoint=True)
    # Back from 3 to the checkpoint at 2, and on: step 3 comes out as it was, so there is nothing to publish for it.
    assert steps_of(store) == [None, 1, 2, 3, 4, 5]
    assert_rounded(followed(store), again.model)
    undisturbed = trainer_of(small_model(BF16), tmp_path / "other", **{**saving, "save_strategy": "no"})
    undisturbed.train()
    assert_rounded(followed(store), undisturbed.model)


def test_second_training_continues_where_the_first_ended(tmp_path: Path) -> None:
    store = MemoryStore()
    callback, wait = waiting(store)
    trainer = trainer_of(small_model(BF16), tmp_path, callback, wait, max_steps=2)
    trainer.train()
    assert hooks_of(trainer) == 0
    trainer.train()
    assert hooks_of(trainer) == 0
    assert steps_of(store) == [None, 1, 2, 1, 2]
    assert_rounded(followed(store), trainer.model)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_training_after_one_that_raised_publishes(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        raise error("in the loop")

    store = MemoryStore()
    callback, wait = waiting(store)
    failing = At(2, fail)
    trainer = trainer_of(small_model(BF16), tmp_path, callback, wait, failing)
    with pytest.raises(error, match="in the loop"):
        trainer.train()
    assert steps_of(store) == [None, 1, 2]
    left = hooks_of(trainer)
    trainer.remove_callback(failing)
    hooks: list[int] = []
    trainer.add_callback(At(1, lambda: hooks.append(hooks_of(trainer))))
    trainer.train()
    assert hooks == [left]  # those of the second alone
    assert hooks_of(trainer) == 0
    assert steps_of(store) == [None, 1, 2, 1, 2, 3]
    assert_rounded(followed(store), trainer.model)


def test_process_ends_if_training_raises_while_the_bucket_hangs(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from scripted_store import ScriptedStore
from trainers import BF16, At, interrupt, small_model, trainer_of
from weightcast.integrations.transformers import WeightcastCallback
store = ScriptedStore()
trainer_of(small_model(BF16), Path(sys.argv[1]), WeightcastCallback(store),
    At(1, lambda: store.hang("put")), At(3, interrupt)).train()
"""
    ended = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.stderr.splitlines()[-1] == "KeyboardInterrupt"


# -- a bucket that fails -----------------------------------------------------------------------------------------------


def test_training_continues_while_the_bucket_is_down(tmp_path: Path) -> None:
    store = ScriptedStore()
    callback = WeightcastCallback(store)
    down, up = At(1, lambda: store.fail("put create")), At(4, store.behave)
    trainer = trainer_of(small_model(BF16), tmp_path, callback, down, up, max_steps=5)
    trainer.train()
    assert steps_of(store)[-1] == 5
    assert_rounded(followed(store), trainer.model)


def test_unsent_weights_at_the_end_raise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = ScriptedStore()
    callback = WeightcastCallback(store)
    down = At(2, lambda: store.fail("put create"))
    trainer = trainer_of(small_model(BF16), tmp_path, callback, down, save_strategy="steps", save_steps=2)
    with pytest.raises(UnreachableError, match="no answer"):
        trainer.train()
    assert trainer.state.global_step == 3
    assert (tmp_path / "checkpoint-3").exists()
    assert hooks_of(trainer) == 0
    assert callback.receipt is not None
    assert callback.receipt.done()
    store.behave()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "weightcast"):
        trainer.remove_callback(down)
        trainer.train()
    assert not caplog.records
    assert_rounded(followed(store), trainer.model)


def test_unsent_weights_of_a_failed_training_are_sent_with_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ScriptedStore()
    callback = WeightcastCallback(store)
    breaking = [At(1, lambda: store.fail("put create")), At(2, interrupt)]
    trainer = trainer_of(small_model(BF16), tmp_path, callback, *breaking)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    for one in breaking:
        trainer.remove_callback(one)
    with caplog.at_level(logging.WARNING, "weightcast"), pytest.raises(UnreachableError):
        trainer.train()  # the channel cannot be taken up
    assert "could not send everything" in caplog.text
    assert hooks_of(trainer) == 0
    store.behave()
    trainer.train()
    assert_rounded(followed(store), trainer.model)


def take_over(store: Store, callback: WeightcastCallback) -> None:
    """Another writer commits, behind what was published."""
    assert callback.receipt is not None
    callback.receipt.result(60)
    with wc.Publisher(store, small_model(BF16, seed=5), threads=1) as publisher:
        publisher.publish().result(60)


def lost(callback: WeightcastCallback) -> None:
    """Wait until the publisher knows."""
    assert callback.receipt is not None
    until(callback.receipt.done)  # `result` would tell the publisher that we know


@pytest.mark.parametrize(("logging_strategy", "last"), [("steps", 3), ("no", 4)])
def test_another_writer_ends_training_at_the_next_publish_or_log(
    tmp_path: Path, logging_strategy: str, last: int
) -> None:
    store = MemoryStore()
    callback = WeightcastCallback(store)
    others = [At(2, lambda: take_over(store, callback)), At(3, lambda: lost(callback))]
    trainer = trainer_of(small_model(BF16), tmp_path, callback, *others, max_steps=5, logging_strategy=logging_strategy)
    with pytest.raises(ConflictError):
        trainer.train()
    assert trainer.state.global_step == last


@pytest.mark.parametrize("known", [False, True])
def test_another_writer_is_noticed_at_the_end_at_the_latest(tmp_path: Path, known: bool) -> None:
    store = MemoryStore()
    callback = WeightcastCallback(store)
    others = [At(2, lambda: take_over(store, callback)), At(3, lambda: lost(callback) if known else None)]
    trainer = trainer_of(small_model(BF16), tmp_path, callback, *others, logging_strategy="no")
    with pytest.raises(ConflictError):
        trainer.train()
    assert trainer.state.global_step == 3
    assert hooks_of(trainer) == 0


# -- logs --------------------------------------------------------------------------------------------------------------


def test_logs_report_what_was_committed(tmp_path: Path) -> None:
    store = MemoryStore()
    callback = WeightcastCallback(store)
    wait = Waiting(callback)
    trainer = trainer_of(small_model(BF16), tmp_path, callback, wait)
    trainer.train()
    elements = sum(parameter.numel() for parameter in trainer.model.parameters())
    for version, seen in enumerate(wait.logs[:3], 1):
        manifest = Chain.open(store).manifest(version)
        assert seen["weightcast/version"] == version
        assert seen["weightcast/bytes"] == manifest.nbytes > 0
        assert seen["weightcast/changed"] == manifest.changed / elements
        assert 0 < seen["weightcast/changed"] < 1
        (kept,) = [entry for entry in trainer.state.log_history if entry["step"] == version and "loss" in entry]
        assert {name: kept[name] for name in METRICS} == {name: seen[name] for name in METRICS}
    assert manifest.changed <= Chain.open(store).channel.table.elements == elements


def test_logs_do_not_wait_for_the_bucket_and_evaluation_logs_stay_unchanged(tmp_path: Path) -> None:
    store = ScriptedStore()
    callback = WeightcastCallback(store)
    trainer = trainer_of(
        small_model(BF16), tmp_path, callback, At(3, store.behave), eval_strategy="steps", eval_steps=1
    )
    trainer.add_callback(hold := Held(store))
    result = trainer.train()
    history = trainer.state.log_history
    assert hold.held
    assert not any(METRICS & entry.keys() for entry in history if entry["step"] < 3 or "loss" not in entry)
    assert any("eval_loss" in entry for entry in history)
    assert not METRICS & result.metrics.keys()
    assert_rounded(followed(store), trainer.model)
