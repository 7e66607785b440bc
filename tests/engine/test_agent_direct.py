"""Workers decode for themselves where they hold what it takes; the mirror follows beside, and is not waited for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from faulty_disk import FaultyDisk  # noqa: E402
from local_engine import Local, Training, attached, must_be, pack  # noqa: E402
from scripted_store import ScriptedStore  # noqa: E402
from sharded_engine import SHAPES  # noqa: E402
from waiting import until  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.channel.keys import DELTAS  # noqa: E402
from weightcast.engine.agent import Agent  # noqa: E402
from weightcast.engine.beside import Beside  # noqa: E402
from weightcast.engine.live import LiveParameters  # noqa: E402
from weightcast.errors import EngineError, SpaceError, StoreError, WeightcastError  # noqa: E402
from weightcast.follow.mirror_reader import reading_held  # noqa: E402
from weightcast.follow.replica import opened_patches  # noqa: E402
from weightcast.store import open_store  # noqa: E402

ORDER = ("stage_coded", "stage_patches", "pause", "apply_update", "clear", "name", "resume")


@pytest.fixture
def engine(training: Training) -> Local:
    """One worker, which holds all of every tensor."""
    return Local(training.weights, ranks=1)


@pytest.fixture
def agent(training: Training, engine: Local, tmp_path: Path) -> Iterator[Agent]:
    with attached(training, engine, tmp_path) as following:
        following.step()
        engine.calls.clear()
        yield following


def steps_of(engine: Local) -> list[str]:
    found = [call for call in engine.calls if call in ORDER]
    engine.calls.clear()
    return found


def mirror_reaches(agent: Agent, version: int) -> None:
    """Without any other step of the agent."""
    until(lambda: agent.subscriber.position is not None and agent.subscriber.position.version == version)


def test_version_is_decoded_by_the_workers_and_the_mirror_follows(
    engine: Local, agent: Agent, training: Training
) -> None:
    for version in range(1, 12):  # past a fold of the mirror
        training.step(version, density=0.9 if version == 5 else 0.05)
        update = agent.step()
        assert update is not None
        assert (update.position.version, update.reloaded, update.unproven) == (version, 0, ())
        assert steps_of(engine) == ["stage_coded", "pause", "apply_update", "clear", "name", "resume"]
        must_be(engine, agent, version)
        mirror_reaches(agent, version)
    assert agent.step() is None


def test_mirror_that_cannot_follow_is_reported_while_versions_arrive(
    agent: Agent, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise SpaceError("the disk is full")

    monkeypatch.setattr(agent.subscriber, "sync", fail)
    found: list[WeightcastError | None] = []

    def next_version() -> bool:
        training.step(len(found) + 1)
        assert agent.step() is not None
        found.append(agent.short)
        return isinstance(agent.short, SpaceError)

    until(next_version)


def test_mirror_is_not_waited_for(engine: Local, agent: Agent, training: Training, tmp_path: Path) -> None:
    training.step(1)
    agent.step()
    mirror_reaches(agent, 1)
    with FaultyDisk(tmp_path / "mirror" / ".weightcast" / "staged") as disk:
        disk.hold(1)
        for version in (2, 3, 4):
            training.step(version)
            assert agent.step() is not None
            must_be(engine, agent, version)
            if version == 2:
                assert disk.held.wait(30), "the mirror is at work"
        assert agent.subscriber.position.version == 1  # type: ignore[union-attr]
        disk.let_go()
        until(lambda: agent.step() is None and agent.subscriber.position.version == 4)  # type: ignore[union-attr]
    folder = tmp_path / "mirror"
    agent.close()
    with reading_held(folder, training.weights.table) as held:
        assert held.position is not None
        assert held.position.version == 4


def test_objects_are_fetched_once_for_engine_and_mirror(engine: Local, training: Training, tmp_path: Path) -> None:
    store = ScriptedStore(open_store(training.url))
    with Agent(store, engine, tmp_path / "mirror") as agent:
        agent.step()
        for version in (1, 2, 3):
            training.step(version)
            agent.step()
            mirror_reaches(agent, version)
    fetched = [key for verb, key in store.calls if verb.startswith("get") and key.startswith(DELTAS)]
    assert len(fetched) == len(set(fetched)) == 3


def test_several_versions_at_once_take_one_pause(engine: Local, agent: Agent, training: Training) -> None:
    for version in (1, 2, 3, 4):
        training.step(version)
    agent.step()
    assert steps_of(engine) == ["stage_coded", "pause", "apply_update", "clear", "name", "resume"]
    must_be(engine, agent, 4)
    mirror_reaches(agent, 4)


def left_over(engine: Local) -> list[list[str]]:
    """The staged patches that workers got beside the objects, in each request to decode since this was asked last."""
    found = [request["plain"] for request in engine.requests if request["kind"] == "stage_coded"]
    engine.requests.clear()
    return found


def names_in(paths: Iterable[str]) -> set[str]:
    with opened_patches(map(Path, paths)) as patches:
        return {row.spec.name for patch in patches for row in patch.rows}


@pytest.mark.parametrize("density", [0.05, 0.9], ids=["sparse", "dense"])
def test_what_workers_hold_in_part_is_decoded_against_the_mirror_tensor_by_tensor(
    training: Training, tmp_path: Path, density: float
) -> None:
    engine = Local(training.weights)
    whole = {"norm", "router"}  # of these each worker holds all
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        engine.requests.clear()
        for version in range(1, 9):
            engine.calls.clear()
            training.step(version, density=density)
            agent.step()
            names = names_in(left_over(engine)[-1])
            assert names, "there are some"
            assert not names & whole
            assert steps_of(engine)[-5:] == ["pause", "apply_update", "clear", "name", "resume"]
            must_be(engine, agent, version)
        training.step(9, whole)
        agent.step()
        assert left_over(engine) == [[]]
        must_be(engine, agent, 9)


def test_workers_try_what_they_could_not_decode_less_and_less_often(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        engine.requests.clear()
        tried = []
        for version in range(1, 9):
            training.step(version)
            agent.step()
            tried.append(len(left_over(engine)) == 2)
        assert tried == [True, False, True, False, False, False, True, False]


def test_several_versions_are_decoded_against_the_mirror_one_after_the_other(
    training: Training, tmp_path: Path
) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        for version in (1, 2, 3, 4):
            training.step(version, None if version != 3 else {"norm"})
        agent.step()
        assert len(left_over(engine)[-1]) == 3, "nothing of the third is left over"
        must_be(engine, agent, 4)


def test_mirror_that_fell_behind_leads_where_workers_cannot_decode(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        monkeypatch.setattr(Beside, "begin", lambda beside: None)
        training.step(1, {"norm"})
        agent.step()
        must_be(engine, agent, 1)
        assert agent.subscriber.position.version == 0  # type: ignore[union-attr]
        training.step(2)
        engine.calls.clear()
        agent.step()
        assert "stage_weights" in engine.calls
        must_be(engine, agent, 2)
        assert agent.subscriber.position.version == 2  # type: ignore[union-attr]


def test_mirror_whose_files_were_changed_is_repaired_before_anything_is_decoded_against_it(
    training: Training, tmp_path: Path
) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        training.step(1)
        (damaged,) = (tmp_path / "mirror").glob("*.safetensors")
        damaged.write_bytes(damaged.read_bytes()[:-64] + bytes(64))
        engine.requests.clear()
        agent.step()
        assert left_over(engine) == [[]], "what was decoded against it was not the version's, and went nowhere"
        must_be(engine, agent, 1)


def test_boxes_cut_for_workers_are_decoded_by_them(tmp_path: Path) -> None:
    cut = [
        wc.Cut(name, axis=axis, parts=2)
        for axis, names in enumerate([("embed", "q", "q_bias", "gate", "up", "experts.*.gate", "experts.*.up"),
                                      ("o", "down", "experts.*.down")])
        for name in names
    ]  # fmt: skip
    with closing(Training(tmp_path, cut=cut)) as training:
        engine = Local(training.weights)
        with attached(training, engine, tmp_path) as agent:
            agent.step()
            engine.calls.clear()
            for version in (1, 2, 3):
                training.step(version, set(SHAPES) - {"embed"})  # padded: its halves are not the workers'
                agent.step()
                assert "stage_patches" not in steps_of(engine)
                must_be(engine, agent, version)
                mirror_reaches(agent, version)


def test_damaged_object_does_not_reach_the_engine_and_is_reported(
    engine: Local, agent: Agent, training: Training
) -> None:
    for version in (1, 2):
        training.step(version)
    (delta,) = Path(training.url).glob("deltas/*000000000002-*")
    good = delta.read_bytes()
    delta.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    update = agent.step()
    assert update is not None
    assert update.position.version == 1
    assert "version 2 cannot be reached" in str(agent.short)
    must_be(engine, agent, 1)


def test_outage_is_reported_and_ends(engine: Local, agent: Agent, training: Training, tmp_path: Path) -> None:
    training.step(1)
    agent.step()
    mirror_reaches(agent, 1)
    away = Path(training.url).rename(tmp_path / "away")
    with pytest.raises(StoreError):
        agent.step()
    assert not engine.paused
    away.rename(training.url)
    training.step(2)
    agent.step()
    must_be(engine, agent, 2)


def test_memory_that_something_else_changed_is_noticed_before_the_pause_and_repaired(
    engine: Local, agent: Agent, training: Training
) -> None:
    training.step(1)
    agent.step()
    with torch.no_grad():
        for word in engine.models[0].qkv.view(torch.int16).view(-1):
            word ^= 4
    training.step(2, {"q"})
    engine.calls.clear()
    with pytest.raises(EngineError, match="what is staged would not be"):
        agent.step()
    assert "pause" not in engine.calls
    until(lambda: agent.step() is None)
    must_be(engine, agent, 2)


def test_update_that_breaks_off_is_loaded_again_from_the_mirror(
    engine: Local, agent: Agent, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.step(1)
    real, calls = LiveParameters.apply, []

    def write(live: LiveParameters, *rest: object) -> None:
        calls.append(live)
        if len(calls) == 1:
            raise MemoryError("no room")
        real(live, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(LiveParameters, "apply", write)
    update = agent.step()
    assert update is not None
    assert update.reloaded == len(list(training.weights.table))
    assert engine.calls.count("resume") == 1
    must_be(engine, agent, 1)
    training.step(2)
    agent.step()
    must_be(engine, agent, 2)


def test_going_back_takes_the_mirrors_way(engine: Local, training: Training, tmp_path: Path) -> None:
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        for version in (1, 2, 3):
            training.step(version)
            agent.step()
    for version in (1, 3):
        with attached(training, engine, tmp_path, policy=wc.Pinned(version)) as agent:
            agent.step()
            must_be(engine, agent, version)


def test_tensor_that_the_engine_packs_is_reloaded_and_others_are_decoded(training: Training, tmp_path: Path) -> None:
    from local_engine import saved

    engine = Local(training.weights, saved(training.weights, tmp_path / "begun"), packed=True, ranks=1)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        engine.calls.clear()
        training.step(1, {"q", "norm"})
        update = agent.step()
        assert update is not None
        assert (update.reloaded, "stage_coded" in engine.calls) == (0, True)
        training.step(2, {"gate"})
        update = agent.step()
        assert update is not None
        assert update.reloaded
        pack(engine.models[0])  # it is its own inverse
        expected = Local(training.weights, ranks=1)
        assert torch.equal(engine.models[0].gate_up.view(torch.int16), expected.models[0].gate_up.view(torch.int16))
