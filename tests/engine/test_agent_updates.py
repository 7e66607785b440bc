"""An agent brings an engine to every version: by what workers decode, by comparison with the mirror, or by a reload."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from faulty_disk import FaultyDisk  # noqa: E402
from local_engine import Local, Training, attached, must_be, other_weights, pack, saved  # noqa: E402
from sharded_engine import SHAPES, Engine, Stream, memory, model_of, stream, weights_of  # noqa: E402
from waiting import until  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.engine.agent import Agent  # noqa: E402
from weightcast.engine.learn import learn  # noqa: E402
from weightcast.engine.proof import prove  # noqa: E402
from weightcast.engine.worker import EngineWorker  # noqa: E402

ORDER = ("pause", "apply_update", "clear", "name", "resume")
"""What a version is to an engine: nothing is computed between the writing and the end of what was computed before."""


def test_engine_follows_and_every_version_is_verified(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        assert agent.step() is None
        must_be(engine, agent, 0)
        for version in range(1, 12):  # past a fold of the mirror
            assert training.step(version) == version
            engine.calls.clear()
            update = agent.step()
            assert update is not None
            assert (update.position.version, update.reloaded, update.unproven) == (version, 0, ())
            assert [call for call in engine.calls if call in ORDER] == list(ORDER)
            must_be(engine, agent, version)
        assert agent.step() is None
        assert agent.lag == 0


def test_several_versions_at_once_take_one_pause(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        for version in (1, 2, 3, 4):
            training.step(version, density=0.05 if version != 3 else 0.9)
        engine.calls.clear()
        agent.step()
        assert engine.calls.count("pause") == 1
        must_be(engine, agent, 4)


@pytest.mark.parametrize(("density", "waits"), [(0.05, False), (0.9, True)], ids=["patch", "dense"])
def test_fold_of_the_mirror_does_not_keep_a_paused_engine_waiting(
    training: Training, tmp_path: Path, density: float, waits: bool
) -> None:
    """A patch is written during the fold. What is read from the mirror, where memory has no room for much of a model,
    waits for it, while the engine serves."""
    engine = Local(training.weights, available=lambda: 1 << 30 if not waits else 0)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        training.step(1)
        agent.step()
        agent.catch_up()
        training.step(2, {"gate"}, density)
        engine.calls.clear()
        with FaultyDisk(tmp_path / "mirror") as disk:
            disk.hold(1)
            agent.subscriber.mirror.begin_fold()
            assert disk.held.wait(30)
            stepping = threading.Thread(target=agent.step)
            stepping.start()
            until(lambda: not stepping.is_alive() or engine.calls.count("read_job") > 0)
            stepping.join(0.5 if waits else 60)
            assert ("pause" not in engine.calls) is stepping.is_alive() is waits
            disk.let_go()
            stepping.join(60)
        must_be(engine, agent, 2)


def test_engine_with_other_weights_is_compared_with_what_it_loaded_and_not_reloaded(
    training: Training, tmp_path: Path
) -> None:
    other = other_weights()
    engine = Local(other, saved(other, tmp_path / "begun"))
    with attached(training, engine, tmp_path) as agent:
        training.step(1)
        update = agent.step()
        assert update is not None
        assert update.reloaded == 0
        must_be(engine, agent, 1)


def test_engine_without_its_checkpoint_is_reloaded_once(training: Training, tmp_path: Path) -> None:
    engine = Local(other_weights())
    with attached(training, engine, tmp_path) as agent:
        update = agent.step()
        assert update is not None
        assert update.reloaded == len(SHAPES)
        must_be(engine, agent, 0)
        training.step(1)
        update = agent.step()
        assert update is not None
        assert update.reloaded == 0
        must_be(engine, agent, 1)


def test_checkpoint_folder_that_changed_after_loading_is_not_compared_with(training: Training, tmp_path: Path) -> None:
    other = other_weights()
    begun = saved(other, tmp_path / "begun")
    engine = Local(other, begun)
    for path in begun.iterdir():
        path.unlink()
    begun.rmdir()
    saved(training.weights, begun)
    with attached(training, engine, tmp_path) as agent:
        update = agent.step()
        assert update is not None
        assert (update.reloaded, update.unproven) == (len(SHAPES), ())
        must_be(engine, agent, 0)


def test_parameter_that_the_engine_packs_after_loading_is_only_reloaded(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights, saved(training.weights, tmp_path / "begun"), packed=True)
    with attached(training, engine, tmp_path) as agent:
        update = agent.step()
        assert update is not None
        assert set(update.unproven) == {"gate", "up"}
        for version, names in enumerate([{"q", "norm"}, {"gate"}, None], 1):
            training.step(version, names)
            update = agent.step()
            assert update is not None
            assert bool(update.reloaded) == (names != {"q", "norm"})
            assert set(update.unproven) == {"gate", "up"}
            for rank, model in enumerate(engine.models):
                expected = Engine(rank).make()
                Engine(rank).load(expected, stream(training.weights))
                pack(expected)
                assert memory(expected) == memory(model)
        proof = prove(engine, agent.subscriber.chain)
        assert set(proof.unproven) == {"gate", "up"}
        assert not proof.holds
        assert proof.verdict == "version 3, but for 2 tensors that cannot be read back: gate, up"


def test_unproven_tensors_are_those_of_the_engine_that_runs(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights, saved(training.weights, tmp_path / "loaded"), packed=True)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        training.step(1)
        agent.step()
    with attached(training, engine, tmp_path) as successor:
        successor.step()
        assert successor.unproven == ("gate", "up")
        engine.restart(training.weights, tmp_path / "loaded", packed=False)
        successor.step()
        assert successor.unproven == ()
        must_be(engine, successor, 1)


def test_engine_whose_loader_cannot_be_traced_is_reloaded(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights, saved(training.weights, tmp_path / "begun"), traceable=False)
    with attached(training, engine, tmp_path) as agent:
        training.step(1)
        update = agent.step()
        assert update is not None
        assert (update.reloaded, set(update.unproven)) == (len(SHAPES), set(SHAPES))
        assert not engine.paused
        for rank, model in enumerate(engine.models):
            expected = Engine(rank).make()
            Engine(rank).load(expected, stream(training.weights))
            assert memory(expected) == memory(model)


def test_engine_without_free_memory_is_written_from_the_mirror(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights, available=lambda: 0)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        training.step(1)
        update = agent.step()
        assert update is not None
        assert update.nbytes == 0
        must_be(engine, agent, 1)


@pytest.mark.parametrize("proving", [True, False])
def test_tensor_that_the_engine_does_not_use_is_left_out(proving: bool, training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights, saved(training.weights, tmp_path / "begun"), skips="norm")
    with attached(training, engine, tmp_path, prove=proving, allow_partial=True) as agent:
        assert agent.step() is None
        for version in (1, 2):
            training.step(version)
            update = agent.step()
            assert update is not None
            assert (update.reloaded, update.unproven) == (0, ())
            must_be(engine, agent, version)
        other = tmp_path / "other"
        other.mkdir()
        another = Training(other)  # the same tensors, and a version 2 of other bits
        for version in (1, 2):
            another.step(version + 10)
        with attached(another, Local(weights_of(SHAPES)), other) as theirs:
            theirs.step()
            proof = prove(engine, theirs.subscriber.chain)
            assert (proof.version, proof.holds) == (None, False)
        another.close()


class Rounding(Local):
    """One worker that holds a float32 tensor as bf16."""

    def restart(self, weights: wc.Weights, folder: Path | None = None) -> None:
        model = model_of(p=torch.empty(40, 6, dtype=torch.bfloat16), q=torch.empty(50, dtype=torch.bfloat16))

        def load(given: Stream) -> None:
            for name, tensor in given:
                model.get_parameter(name).data.copy_(tensor)

        load(stream(weights))  # type: ignore[arg-type]
        learner: Callable = partial(learn, model, load)
        self.models, self.workers = [model], [EngineWorker(model, learner, load, str(folder), 0, 1)]


def test_tensor_that_the_engine_rounds_is_patched_and_reported_as_unverified(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {"p": rng.standard_normal((40, 6), np.float32), "q": rng.integers(0, 2**14, 50).astype(np.uint16)}
    weights = wc.Arrays(arrays, dtypes={"q": "BF16"})
    engine = Rounding(weights, saved(weights, tmp_path / "begun"))  # type: ignore[arg-type]
    (model,) = engine.models
    url = str(tmp_path / "channel")
    with wc.Publisher(url, weights) as publisher, Agent(url, engine, tmp_path / "mirror", prove=True) as agent:
        agent.step()
        for version in (1, 2):
            arrays["p"][version, :3] += 1
            arrays["q"][version] ^= 1
            publisher.publish().result(60)
            update = agent.step()
            assert update is not None
            assert (update.reloaded, update.unproven) == (0, ("p",))
            assert torch.equal(model.p, torch.from_numpy(arrays["p"]).to(torch.bfloat16))
            assert np.array_equal(model.q.detach().view(torch.int16).numpy().view(np.uint16), arrays["q"])
        proof = prove(engine, agent.subscriber.chain)
        assert list(proof.unproven) == ["p"]
        assert "rounded from F32" in proof.unproven["p"]
        assert not proof.holds
