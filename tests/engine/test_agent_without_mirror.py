"""An agent without a mirror follows an engine that holds a version, by what its workers decode; it never reloads."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from local_engine import Local, Training, must_be, other_weights  # noqa: E402
from sharded_engine import SHAPES  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.engine.agent import Agent  # noqa: E402
from weightcast.engine.live import LiveParameters  # noqa: E402
from weightcast.errors import EngineError, NoRouteError, StoreError  # noqa: E402
from weightcast.publish.from_checkpoint import cut_anchor  # noqa: E402


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where an agent without a mirror keeps objects."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def engine(training: Training) -> Local:
    """One worker, which holds all of every tensor."""
    return Local(training.weights, ranks=1)


@pytest.fixture
def agent(training: Training, engine: Local) -> Iterator[Agent]:
    with Agent(training.url, engine, None) as following:
        assert following.step() is None
        yield following


def anchored(training: Training, folder: Path) -> None:
    """Give the head an anchor."""
    with wc.Subscriber(training.url, folder) as subscriber:
        subscriber.sync()
        cut_anchor(subscriber.chain, subscriber.mirror)


def is_untouched(engine: Local) -> bool:
    return not {"pause", "apply_update"}.intersection(engine.calls) and not engine.paused


def test_every_version_is_decoded_by_the_workers(engine: Local, agent: Agent, training: Training) -> None:
    for version in range(1, 6):
        training.step(version, density=0.9 if version == 3 else 0.05)
        update = agent.step()
        assert update is not None
        assert (update.position.version, update.reloaded, agent.lag) == (version, 0, 0)
        must_be(engine, agent, version)
    assert agent.step() is None
    agent.catch_up()


@pytest.mark.parametrize("prove", [False, True])
def test_versions_behind_are_caught_up_with_in_one_pause(engine: Local, training: Training, prove: bool) -> None:
    for version in (1, 2, 3, 4):
        training.step(version)
    with Agent(training.url, engine, None, prove=prove) as agent:
        agent.step()
        assert engine.calls.count("pause") == 1
        must_be(engine, agent, 4)


def test_nothing_is_left_on_disk(engine: Local, training: Training, temporary: Path) -> None:
    with Agent(training.url, engine, None) as agent:
        training.step(1)
        agent.step()
        assert list(temporary.iterdir())
    assert not list(temporary.iterdir())


def test_agent_that_restarts_goes_on_from_what_is_live(engine: Local, training: Training) -> None:
    for version in (1, 2):
        training.step(version)
        with Agent(training.url, engine, None) as agent:
            agent.step()
            must_be(engine, agent, version)


def test_engine_that_restarts_from_a_version_is_brought_to_the_newest(
    engine: Local, agent: Agent, training: Training
) -> None:
    training.step(1)
    old = training.weights.copy()
    agent.step()
    for version in (2, 3):
        training.step(version)
        agent.step()
    engine.restart(old)
    agent.step()
    must_be(engine, agent, 3)


def test_engine_at_no_version_is_refused_and_followed_once_it_restarts(training: Training) -> None:
    engine = Local(other_weights(), ranks=1)
    training.step(1)
    with Agent(training.url, engine, None) as agent:
        with pytest.raises(EngineError, match="the engine holds no version of the channel") as refused:
            agent.step()
        assert "Restart it from a version of the channel" in (refused.value.hint or "")
        assert is_untouched(engine)
        assert agent.position is None
        engine.restart(training.weights)
        agent.step()
        must_be(engine, agent, 1)


def test_parameters_that_cannot_be_read_back_are_refused(training: Training) -> None:
    engine = Local(training.weights, ranks=1, skips="q_bias")
    with Agent(training.url, engine, None, allow_partial=True) as agent:
        with pytest.raises(EngineError, match="without a mirror: not all of the engine can be read: q_bias"):
            agent.step()
        assert is_untouched(engine)


def test_tensors_held_in_part_are_refused_by_name_and_the_engine_serves_on(training: Training) -> None:
    engine = Local(training.weights)
    with Agent(training.url, engine, None) as agent:
        agent.step()
        training.step(1, {"down"})
        with pytest.raises(EngineError, match="a part of tensors that they cannot decode: down") as refused:
            agent.step()
        assert "--mirror FOLDER" in (refused.value.hint or "")
        assert is_untouched(engine)
        assert engine.served == "0"


def test_boxes_cut_for_workers_are_followed_by_all_of_them(tmp_path: Path) -> None:
    cut = [
        wc.Cut(name, axis=axis, parts=2)
        for axis, names in enumerate([("q", "q_bias", "gate", "up", "experts.*.gate", "experts.*.up"),
                                      ("o", "down", "experts.*.down")])
        for name in names
    ]  # fmt: skip
    with closing(Training(tmp_path, cut=cut)) as training:
        engine = Local(training.weights)
        with Agent(training.url, engine, None) as agent:
            for version in (1, 2, 3):
                training.step(version, set(SHAPES) - {"embed"})  # padded: its halves are not the workers'
                agent.step()
                must_be(engine, agent, version)


def test_anchor_is_no_way_to_a_version_even_if_it_is_cheaper(
    engine: Local, agent: Agent, training: Training, tmp_path: Path
) -> None:
    for version in range(1, 5):
        training.step(version, density=0.9)
    anchored(training, tmp_path / "anchored")
    agent.step()
    must_be(engine, agent, 4)


def test_version_that_only_an_anchor_leads_to_is_refused(
    engine: Local, agent: Agent, training: Training, tmp_path: Path
) -> None:
    for version in (1, 2):
        training.step(version)
    anchored(training, tmp_path / "anchored")
    for delta in Path(training.url).glob("deltas/*000000000002-*"):
        delta.unlink()
    agent.step()
    assert isinstance(agent.short, NoRouteError)
    assert "without an anchor" in str(agent.short)
    must_be(engine, agent, 1)
    engine.restart(training.weights)
    assert agent.step() is None
    must_be(engine, agent, 2)


def test_going_back_is_refused(engine: Local, training: Training) -> None:
    training.step(1)
    with Agent(training.url, engine, None) as agent:
        agent.step()
    with Agent(training.url, engine, None, policy=wc.Pinned(0)) as agent:
        with pytest.raises(EngineError, match="cannot be reached from here without an anchor"):
            agent.step()
        must_be(engine, agent, 1)


def test_update_that_breaks_off_leaves_a_pause_until_the_engine_restarts(
    engine: Local, agent: Agent, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.step(1)

    def write(live: LiveParameters, *rest: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(LiveParameters, "apply", write)
        with pytest.raises(EngineError, match="no room") as broken:
            agent.step()
    assert "It stays paused. Restart it from a version" in (broken.value.hint or "")
    assert engine.paused
    with pytest.raises(EngineError, match="a mix of versions"):
        agent.step()
    assert engine.paused
    engine.restart(training.weights)
    assert agent.step() is None
    must_be(engine, agent, 1)


def test_memory_that_something_else_changed_is_noticed_and_never_named(
    engine: Local, agent: Agent, training: Training
) -> None:
    training.step(1)
    agent.step()
    with torch.no_grad():
        for word in engine.models[0].qkv.view(torch.int16).view(-1):
            word ^= 4
    training.step(2, {"q"})
    engine.calls.clear()
    for problem in ("what is staged would not be", "the engine holds no version"):
        with pytest.raises(EngineError, match=problem):
            agent.step()
        assert is_untouched(engine)
    engine.restart(training.weights)
    agent.step()
    must_be(engine, agent, 2)


def test_outage_is_the_stores_error_and_ends(engine: Local, agent: Agent, training: Training, tmp_path: Path) -> None:
    training.step(1)
    agent.step()
    away = Path(training.url).rename(tmp_path / "away")
    with pytest.raises(StoreError):
        agent.step()
    assert not engine.paused
    away.rename(training.url)
    training.step(2)
    agent.step()
    must_be(engine, agent, 2)
