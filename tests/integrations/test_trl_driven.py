"""An engine that no agent follows is updated by the trainer itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from changes import changed  # noqa: E402
from channels import head_of  # noqa: E402
from local_engine import Local  # noqa: E402
from sharded_engine import SHAPES, stream, weights_of  # noqa: E402
from trl_transfer import (  # noqa: E402
    Attended,
    Bucket,
    Opened,
    begun,
    must_be_live,
    publish,
    sync,
)
from waiting import until  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.channel.keys import Position  # noqa: E402
from weightcast.errors import (  # noqa: E402
    EngineError,
    EngineGoneError,
)

# -- an engine that the trainer drives itself --------------------------------------------------------------------------


def test_driven_engine_is_paused_once_per_sync_and_only_after_the_upload(opened: Opened, tmp_path: Path) -> None:
    weights = weights_of(SHAPES)
    engine = Local(weights, ranks=1)
    store = Bucket(lambda _: engine.calls.append("commit"))
    transfer = opened(store, engine=engine, mirror=tmp_path / "mirror", dtype=None)
    transfer.init_weight_transfer()
    assert engine.calls == []

    def streamed() -> Iterator[tuple[str, Any]]:
        yield from stream(weights)
        engine.calls.append("streamed")

    done = sync(transfer, streamed())
    assert (done.version, done.live, engine.calls.count("pause")) == (0, True, 0)  # it has these weights
    for number in range(1, 5):
        weights = changed(weights, 0.05, number)
        engine.calls.clear()
        done = sync(transfer, streamed())
        must = ["streamed", "commit", "stage_coded", "pause", "apply_update", "clear", "name", "resume"]
        assert [call for call in engine.calls if call in must] == must
        assert (done.version, done.live) == (number, True)
        assert done.pause is not None
        assert 0 < done.pause <= done.seconds["live"]
        must_be_live(engine, store, number)
    transfer.destroy()
    assert not engine.paused


def test_engine_with_other_weights_is_updated_to_the_first_version(opened: Opened, tmp_path: Path) -> None:
    weights = weights_of(SHAPES)
    engine, store = Local(changed(weights, 0.5, 99)), Bucket()
    begun(opened(store, engine=engine, mirror=tmp_path / "mirror", dtype=None), stream(weights))
    must_be_live(engine, store, 0)


def test_trainer_does_not_touch_an_engine_that_an_agent_updates(opened: Opened, tmp_path: Path) -> None:
    store, weights = Attended(), weights_of(SHAPES)
    wc.init(store, weights)
    engine = Local(weights)
    transfer = begun(opened(store, engine=engine, mirror=tmp_path / "mirror", dtype=None), stream(weights))
    assert sync(transfer, stream(changed(weights, 0.05, 1))).live
    assert engine.calls == []
    assert not (tmp_path / "mirror").exists()


def _gone(engine: Local) -> None:
    def ask(request: Mapping[str, Any]) -> Any:
        raise EngineGoneError("the engine does not answer", url=engine.url)

    engine.ask = ask  # type: ignore[method-assign]


def _back(engine: Local) -> None:
    del engine.ask


def test_unreachable_engine_at_the_start_is_an_error(opened: Opened, tmp_path: Path) -> None:
    weights = weights_of(SHAPES)
    engine = Local(weights)
    _gone(engine)
    transfer = opened(Bucket(), engine=engine, mirror=tmp_path / "mirror", dtype=None, patience=0.2)
    transfer.init_weight_transfer()
    with pytest.raises(EngineError, match=r"does not answer.*on this host.*weightcast attach") as caught:
        sync(transfer, stream(weights))
    assert caught.value.url == engine.url
    assert isinstance(caught.value.__cause__, EngineGoneError)


def test_engine_that_dies_later_causes_a_warning_and_is_updated_once_it_is_back(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, weights = Bucket(), weights_of(SHAPES)
    engine = Local(weights)
    transfer = opened(store, engine=engine, mirror=tmp_path / "mirror", dtype=None)
    begun(transfer, stream(weights))
    transfer.patience = 0.2
    _gone(engine)
    for number in (1, 2):
        weights = changed(weights, 0.05, number)
        done = sync(transfer, stream(weights))
        assert (done.version, done.live, done.pause) == (number, False, None)
        assert f"version {number} is not live after 0.2 s: the engine does not answer" in caplog.text
    _back(engine)
    engine.calls.clear()
    transfer.patience = 30.0
    weights = changed(weights, 0.05, 3)
    assert sync(transfer, stream(weights)).live
    assert engine.calls.count("pause") == 1
    must_be_live(engine, store, 3)


def test_disk_without_room_for_the_mirror_does_not_end_training(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, weights = Bucket(), weights_of(SHAPES)
    engine = Local(weights)
    transfer = begun(opened(store, engine=engine, mirror=tmp_path / "mirror", dtype=None), stream(weights))
    with monkeypatch.context() as full:

        def poll(*_: object) -> None:
            raise wc.errors.SpaceError("the disk is full")

        full.setattr(wc.Subscriber, "poll", poll)
        transfer.patience = 0.1
        weights = changed(weights, 0.05, 1)
        assert not sync(transfer, stream(weights)).live
    assert "the disk is full" in caplog.text
    transfer.patience = 30.0
    assert sync(transfer, stream(weights)).live
    must_be_live(engine, store, 1)


def test_driven_engine_without_patience_gets_what_is_in_the_bucket(opened: Opened, tmp_path: Path) -> None:
    store, weights = Bucket(), weights_of(SHAPES)
    engine = Local(weights)
    transfer = begun(opened(store, engine=engine, mirror=tmp_path / "mirror", dtype=None, patience=0), stream(weights))
    for number in (1, 2):
        weights = changed(weights, 0.05, number)
        sync(transfer, stream(weights))
    until(lambda: head_of(store).digest == wc.fingerprint(weights).digest)
    sync(transfer, stream(weights))
    assert int(engine.served) == head_of(store).version
    assert not engine.paused
    with store.fail("put create"):
        done = sync(transfer, stream(changed(weights, 0.05, 3)))
        assert (done.live, done.pause) == (False, None)  # what was sent is not what the engine has


def test_driven_engine_at_another_version_of_the_same_number_is_not_live(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody resets the channel as soon as version 1 is committed, and publishes another version 1."""
    weights = weights_of(SHAPES)
    others = [changed(weights, 0.5, 7)]

    def reset(position: Position) -> None:
        if position.version == 1 and others:
            other = others.pop()
            for key in list(store.keys()):
                store.delete(key)
            wc.init(store, other)
            publish(store, changed(other, 0.05, 8))

    store, engine = Bucket(reset), Local(weights)
    transfer = begun(opened(store, engine=engine, mirror=tmp_path / "mirror", dtype=None), stream(weights))
    transfer.patience = 0.5
    done = sync(transfer, stream(changed(weights, 0.05, 1)))
    assert engine.served == "1"
    assert (done.version, done.live, done.pause) == (1, False, None)
    assert "the engine is at 1 (" in caplog.text
