"""Events of trainers that frameworks run: from the trainer to the engine that it updates."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from changes import changed  # noqa: E402
from local_engine import Local  # noqa: E402
from sharded_engine import SHAPES, stream, weights_of  # noqa: E402
from trl_transfer import Bucket, Opened, begun, sync  # noqa: E402

from weightcast.events.event import Event  # noqa: E402
from weightcast.store.memory import MemoryStore  # noqa: E402

TRAINER = ["detect", "resolve", "encode", "upload", "commit"]


def test_callback_tells_what_its_publisher_does(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from trainers import small_model, trainer_of

    from weightcast.integrations.transformers import WeightcastCallback

    told: list[Event] = []
    callback = WeightcastCallback(MemoryStore(), every=2, dtype="BF16", on_event=told.append)
    trainer_of(small_model(), tmp_path, callback, max_steps=2).train()
    assert [(event.phase, event.version, event.step) for event in told] == [(p, 1, 2) for p in ("step", *TRAINER)]


def test_version_has_one_story_from_trls_trainer_to_the_engine(opened: Opened, tmp_path: Path) -> None:
    lock, told = threading.Lock(), []

    def sink(event: Event) -> None:
        with lock:
            told.append(event)

    weights = weights_of(SHAPES)
    engine = Local(weights, ranks=1)
    transfer = opened(Bucket(), engine=engine, mirror=tmp_path / "mirror", dtype=None, on_event=sink)
    begun(transfer, stream(weights))
    done = sync(transfer, stream(changed(weights, 0.05, 1)))
    transfer.destroy()
    assert (done.version, done.live) == (1, True)
    found = [event for event in told if event.version == 1]
    assert len({(event.channel, event.digest) for event in found}) == 1
    phases = {role: [event.phase for event in found if event.role == role] for role in ("trainer", "agent", "engine")}
    assert phases == {
        "trainer": TRAINER,
        "agent": ["find", "fetch", "verify", "stage"],
        "engine": ["pause", "apply", "resume"],
    }
    paused = sum(event.seconds for event in found if event.role == "engine")
    assert done.pause == pytest.approx(paused)
