"""docs/guides/training.md: its examples train small models, and followers end on their bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from guides import Page

torch = pytest.importorskip("torch")

from training import adam, same, small  # noqa: E402

import weightcast as wc  # noqa: E402
import weightcast.torch  # noqa: E402

PAGE = Page.of("training.md")
LOOP, TRAINER, STREAM, RECEIVE = PAGE.python


@pytest.fixture
def known(tmp_path: Path) -> dict[str, Any]:
    """What the examples use and do not say."""
    model = small(torch.float32)

    def compute_loss(model: Any, batch: int) -> Any:
        generator = torch.Generator().manual_seed(batch)
        tokens = torch.randint(0, 40, (16,), generator=generator)
        return torch.nn.functional.cross_entropy(model(tokens), tokens)

    return {
        "wc": wc,
        "url": str(tmp_path / "channel"),
        "model": model,
        "optimizer": adam(model, lr=1e-3),
        "data": range(3),
        "compute_loss": compute_loss,
    }


def test_loop_publishes_what_it_trains(known: dict[str, Any]) -> None:
    exec(LOOP, known)
    with wc.Subscriber(known["url"], follower := small(torch.bfloat16, seed=9)) as subscriber:
        update = subscriber.sync()
    assert update is not None
    assert update.position == known["receipt"].result().position
    same(follower, known["model"])


def test_stream_publishes_what_it_is_sent(known: dict[str, Any]) -> None:
    model, follower = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, dtype=torch.bfloat16)
    exec(STREAM, known | {"model": model})
    torch.nn.init.ones_(model.weight)
    exec(STREAM, told := known | {"model": model})
    assert told["receipt"].result().position.version == 1
    with wc.Subscriber(known["url"], follower) as subscriber:
        subscriber.sync()
    same(follower, model)


def test_receiver_follows_in_place(known: dict[str, Any]) -> None:
    exec(LOOP, known)

    def stop(position: wc.Position) -> None:
        raise InterruptedError(position.version)

    follower = small(torch.float32, seed=9)
    with pytest.raises(InterruptedError, match=str(known["receipt"].result().position.version)):  # else it goes on
        exec(RECEIVE, known | {"model": follower, "print": stop})
    same(follower, known["model"])
    (expression,) = re.findall(r"`(wc\.fingerprint\(.*?\)\.digest)`", PAGE.text)
    digest = eval(expression, {"wc": wc, "weightcast": weightcast, "model": follower})
    assert digest == known["receipt"].result().position.digest


def test_trainer_publishes_by_the_callback(tmp_path: Path) -> None:
    tf = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from trainers import dataset, small_model, trainer_of

    tf.utils.logging.disable_progress_bar()
    model, url = small_model(), str(tmp_path / "channel")
    known = {"url": url, "model": model, "args": trainer_of(model, tmp_path).args, "dataset": dataset()}
    exec(TRAINER, known | {"Trainer": tf.Trainer}, made := {})
    made["trainer"].train()
    follower = small_model(torch.bfloat16, seed=9)
    with wc.Subscriber(url, follower) as subscriber:
        update = subscriber.sync()
        assert update is not None
        assert subscriber.chain.manifest(update.position.version).step == 3, "the last of three"
    same(follower, model)
