"""An agent and the workers of an engine without vLLM: two of them, fused and sharded, in this very process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import Bag
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from changes import changed  # noqa: E402
from local_engine import Local, Training, _pack, attached, must_be  # noqa: E402
from sharded_engine import SHAPES, Engine, model_of, stream, weights_of  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.disk.checkpoint import save  # noqa: E402
from weightcast.engine import worker  # noqa: E402
from weightcast.engine.agent import Agent, Update  # noqa: E402
from weightcast.engine.learn import learn  # noqa: E402
from weightcast.engine.live import LiveParameters  # noqa: E402
from weightcast.engine.meeting import PROTOCOL  # noqa: E402
from weightcast.engine.packing import packing_of, probed, repacked  # noqa: E402
from weightcast.engine.proof import prove  # noqa: E402
from weightcast.engine.vllm.compatibility import refuse_other_vllm  # noqa: E402
from weightcast.engine.vllm.middleware import WeightVersions  # noqa: E402
from weightcast.engine.worker import EngineWorker  # noqa: E402
from weightcast.errors import EngineError, EngineGoneError, StoreError, UsageError  # noqa: E402
from weightcast.format.spec import TensorSpec, TensorTable  # noqa: E402


def test_an_engine_follows_and_every_version_is_proven(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        assert agent.step() is None
        must_be(engine, agent, 0)
        for version in range(1, 12):  # past a fold of the mirror
            assert training.step(version) == version
            engine.calls.clear()
            update = agent.step()
            assert isinstance(update, Update)
            assert (update.position.version, update.reloaded, update.unproven) == (version, 0, ())
            assert engine.calls.index("stage_patches") < engine.calls.index("pause") < engine.calls.index("update")
            must_be(engine, agent, version)
        assert agent.step() is None
        assert agent.behind == 0


def test_several_versions_at_once_are_one_pause(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        for version in (1, 2, 3, 4):
            training.step(version, density=0.05 if version != 3 else 0.9)
        engine.calls.clear()
        agent.step()
        assert engine.calls.count("pause") == 1
        must_be(engine, agent, 4)


def test_an_engine_with_other_weights_is_known_by_what_it_loaded(training: Training, tmp_path: Path) -> None:
    other = changed(weights_of(SHAPES), 0.5, 99)
    (tmp_path / "begun").mkdir()
    save(other, tmp_path / "begun")
    engine = Local(other, tmp_path / "begun")
    with attached(training, engine, tmp_path) as agent:
        training.step(1)
        update = agent.step()
        assert update is not None
        assert update.reloaded == 0
        must_be(engine, agent, 1)


def test_an_engine_of_which_nothing_is_known_is_reloaded_once(training: Training, tmp_path: Path) -> None:
    engine = Local(changed(weights_of(SHAPES), 0.5, 99))
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


def test_what_an_engine_changes_after_loading_is_never_written_through_the_layout(
    training: Training, tmp_path: Path
) -> None:
    (tmp_path / "begun").mkdir()
    save(training.weights, tmp_path / "begun")
    engine = Local(training.weights, tmp_path / "begun", packed=True)
    with attached(training, engine, tmp_path) as agent:
        update = agent.step()
        assert update is not None
        assert set(update.unproven) == {"gate", "up"}
        for version, names in enumerate([{"q", "norm"}, {"gate"}, None], 1):
            training.step(version, names)
            engine.calls.clear()
            update = agent.step()
            assert update is not None
            assert bool(update.reloaded) == (names != {"q", "norm"})
            assert set(update.unproven) == {"gate", "up"}
            for rank, model in enumerate(engine.models):
                same = Engine(rank).make()
                Engine(rank).load(same, stream(training.weights))
                _pack(same)
                for name, tensor in same.named_parameters():
                    assert torch.equal(
                        tensor.view(-1).view(torch.uint8),
                        dict(model.named_parameters())[name].view(-1).view(torch.uint8),
                    ), name
        proof = prove(engine, agent.subscriber.chain)
        assert set(proof.unproven) == {"gate", "up"}
        assert not proof.holds


def test_an_update_that_fails_on_one_worker_is_made_good_before_the_engine_goes_on(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        training.step(1)
        real, failures = LiveParameters.apply, [1]

        def apply(self: LiveParameters, *rest: Any) -> None:
            if self._model is engine.models[1] and failures:
                failures.pop()
                raise MemoryError("no room")
            real(self, *rest)

        monkeypatch.setattr(LiveParameters, "apply", apply)
        engine.calls.clear()
        update = agent.step()
        assert update is not None
        assert update.reloaded == len(SHAPES)
        assert engine.calls.count("resume") == 1
        assert engine.calls.index("resume") > engine.calls.index("reload 1")
        must_be(engine, agent, 1)


def test_an_engine_that_cannot_be_updated_stays_paused_until_it_can(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        training.step(1)
        with monkeypatch.context() as broken:
            broken.setattr(EngineWorker, "_write", lambda *_: 1 // 0)
            with pytest.raises(EngineError, match="cannot be updated: ZeroDivisionError"):
                agent.step()
            assert engine.paused
            assert engine.served == "updating"
            assert agent.position is None
        assert agent.step() is not None
        must_be(engine, agent, 1)


@pytest.mark.parametrize("touched", [True, False])
def test_a_flipped_bit_is_named_and_mended(touched: bool, training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path, prove=True) as agent:
        agent.step()
        with torch.no_grad():
            engine.models[1].qkv.view(torch.int16)[0, 0] ^= 4
        proof = prove(engine, agent.subscriber.chain)
        assert (proof.version, list(proof.wrong)) == (None, ["q"])
        training.step(1, {"q", "o"} if touched else {"o"})
        for _ in range(3):
            try:
                if agent.step() is None:
                    break
            except EngineError as error:
                assert error.tensor == "q"  # noqa: PT017
        must_be(engine, agent, 1)


def test_a_new_agent_goes_on_where_another_was_killed(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights)
    points = ["stage_patches", "pause", "update", "finish", "resume"]
    with attached(training, engine, tmp_path) as agent:
        agent.step()
    for version, point in enumerate([*points, *points], 1):
        training.step(version)
        agent = attached(training, engine, tmp_path)
        _die_at(engine, point, before=version <= len(points))
        with pytest.raises(KeyboardInterrupt):
            agent.step()
        agent.subscriber.close()  # the dead let go of their files, and of nothing else
        _live_again(engine)
        with attached(training, engine, tmp_path) as agent:
            agent.step()
            must_be(engine, agent, version)


def _die_at(engine: Local, point: str, before: bool) -> None:
    method = "ask" if point == "stage_patches" else point
    real = getattr(engine, method)

    def dying(*args: Any) -> Any:
        if method == "ask" and args[0]["do"] != point:
            return real(*args)
        if not before:
            real(*args)
        raise KeyboardInterrupt

    setattr(engine, method, dying)


def _live_again(engine: Local) -> None:
    for method in ("ask", "pause", "update", "finish", "resume"):
        engine.__dict__.pop(method, None)


def test_an_engine_that_restarts_in_an_outage_gets_what_the_mirror_has(training: Training, tmp_path: Path) -> None:
    (tmp_path / "begun").mkdir()
    save(training.weights, tmp_path / "begun")
    with attached(training, Local(training.weights), tmp_path) as agent:
        training.step(1)
        agent.step()
        Path(training.url).rename(tmp_path / "away")
        engine = Local(weights_of(SHAPES), tmp_path / "begun")
        agent.engine = engine
        with pytest.raises((StoreError, wc.errors.ChannelError)):
            agent.step()
        (tmp_path / "away").rename(training.url)
        must_be(engine, agent, 1)


def test_who_paused_the_engine_resumes_it(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        training.step(1)
        engine.paused = True
        agent.step()
        assert engine.paused
        assert engine.served == "1"


def test_without_memory_it_is_written_from_the_mirror(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_available", lambda: 0)
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        training.step(1)
        update = agent.step()
        assert update is not None
        assert update.nbytes == 0
        must_be(engine, agent, 1)


def test_a_worker_of_another_release_is_refused(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "PROTOCOL", PROTOCOL + 1)
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent, pytest.raises(EngineError, match="Install the same weightcast"):
        agent.step()
    assert engine.calls == ["hello"]


class Ignoring(Local):
    """An engine that has no use for one of the tensors, and follows a loader that skips it."""

    def _worker(self, engine: Engine, model: torch.nn.Module, *rest: Any) -> EngineWorker:
        real = engine.load
        object.__setattr__(engine, "load", lambda m, given: real(m, ((n, t) for n, t in given if n != "norm")))
        return super()._worker(engine, model, *rest)


@pytest.mark.parametrize("proving", [True, False])
def test_a_tensor_that_the_engine_has_no_use_for_is_no_trouble(
    proving: bool, training: Training, tmp_path: Path
) -> None:
    (tmp_path / "begun").mkdir()
    save(training.weights, tmp_path / "begun")
    engine = Ignoring(training.weights, tmp_path / "begun")
    with attached(training, engine, tmp_path, prove=proving) as agent:
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


class Rounder:
    """One worker that holds float32 tensors as bf16."""

    def make(self) -> torch.nn.Module:
        return model_of(p=torch.empty(40, 6, dtype=torch.bfloat16), q=torch.empty(50, dtype=torch.bfloat16))

    def load(self, model: torch.nn.Module, given: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in given:
            model.get_parameter(name).data.copy_(tensor)


def test_a_tensor_that_the_engine_rounds_is_patched_and_called_unproven(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {"p": rng.standard_normal((40, 6), np.float32), "q": rng.integers(0, 2**14, 50).astype(np.uint16)}
    weights = wc.Arrays(arrays, dtypes={"q": "BF16"})
    (tmp_path / "begun").mkdir()
    save(weights, tmp_path / "begun")
    engine = Local.__new__(Local)
    engine.calls, engine.paused, engine.served = [], False, "default"
    model = Rounder().make()
    Rounder().load(
        model,
        [
            ("p", torch.from_numpy(arrays["p"])),
            ("q", torch.from_numpy(arrays["q"].view(np.int16)).view(torch.bfloat16)),
        ],
    )
    learner = partial(learn, model, partial(Rounder().load, model))
    engine.models = [model]
    engine.workers = [EngineWorker(model, learner, partial(Rounder().load, model), str(tmp_path / "begun"), 0, 1)]
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


def test_the_heartbeat_is_the_engines(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path, replica="gpu-1") as agent:
        training.step(1)
        update = next(agent.follow(every=0.01))
        assert update.position.version == 1
        beat = json.loads(Path(training.url, "replicas", "gpu-1.json").read_text())
        assert beat["position"][0] == 1


def test_what_an_engine_does_to_its_weights_by_itself_is_noticed(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        for one, model in zip(engine.workers, engine.models, strict=True):
            one.forget()
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor.zero_()
        assert agent.step() is not None
        must_be(engine, agent, 0)


def test_a_look_in_between_does_not_take_away_what_was_staged(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        training.step(1)
        real = engine.pause

        def pause(clear_cache: bool) -> None:
            prove(engine, agent.subscriber.chain)
            real(clear_cache)

        monkeypatch.setattr(engine, "pause", pause)
        update = agent.step()
        assert update is not None
        assert update.reloaded == 0
        must_be(engine, agent, 1)


def test_an_engine_that_restarts_before_it_is_written_to_is_met_again(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        training.step(1)
        real = engine.pause

        def pause(clear_cache: bool) -> None:
            for one in engine.workers:
                one.close()  # what was staged is gone
            real(clear_cache)

        engine.pause = pause  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="of no use"):
            agent.step()
        assert (engine.paused, engine.served) == (False, "0")
        engine.pause = real  # type: ignore[method-assign]
        agent.step()
        must_be(engine, agent, 1)


def test_an_engine_that_is_gone_is_at_no_version(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        assert agent.position is not None
        training.step(1)

        def gone(request: object) -> Any:
            raise EngineGoneError("it does not answer", url="a test")

        engine.ask = gone  # type: ignore[method-assign]
        with pytest.raises(EngineGoneError):
            agent.step()
        assert agent.position is None
        assert agent.subscriber.position is not None
        assert agent.subscriber.position.version == 1  # the mirror goes on


@pytest.mark.parametrize("answer", [{}, {"protocol": PROTOCOL}, {"protocol": PROTOCOL, "rank": "x", "world": []}])
def test_answers_that_make_no_sense_are_an_error(answer: object, training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights)
    engine.ask = lambda request: [answer]  # type: ignore[method-assign,list-item,assignment,return-value]
    with attached(training, engine, tmp_path) as agent, pytest.raises(EngineError):
        agent.step()


def test_a_folder_that_moved_on_says_nothing_of_what_was_loaded(training: Training, tmp_path: Path) -> None:
    other = changed(weights_of(SHAPES), 0.5, 99)
    (tmp_path / "begun").mkdir()
    save(other, tmp_path / "begun")
    engine = Local(other, tmp_path / "begun")
    for path in (tmp_path / "begun").iterdir():
        path.unlink()
    save(training.weights, tmp_path / "begun")
    with attached(training, engine, tmp_path) as agent:
        update = agent.step()
        assert update is not None
        assert update.reloaded == len(SHAPES)
        assert update.unproven == ()
        must_be(engine, agent, 0)


def test_a_worker_never_raises(training: Training) -> None:
    answers = [
        Local(training.weights).workers[0].answer(text)
        for text in ("", "[]", "{}", '{"do": "no"}', '{"do": "digest", "job": "a"}', '{"do": "hello", "more": 1}')
    ]
    assert all("error" in json.loads(answer["json"]) for answer in answers)


def test_other_releases_of_vllm_are_refused_by_name() -> None:
    refuse_other_vllm("0.32.1")
    for version in ("0.31.2", "0.33.0", "1.0"):
        with pytest.raises(UsageError, match=r"Install vLLM 0\.32\.x"):
            refuse_other_vllm(version)


# -- packing -----------------------------------------------------------------------------------------------------------


@given(
    rows=st.sampled_from([16, 32, 48]),
    columns=st.sampled_from([4, 8, 24]),
    group=st.sampled_from([1, 4, 16]),
    pair=st.sampled_from([1, 2]),
    first=st.integers(0, 8),
    count=st.integers(1, 8),
)
def test_a_packed_stack_is_followed(rows: int, columns: int, group: int, pair: int, first: int, count: int) -> None:
    def pack(matrix: np.ndarray) -> np.ndarray:
        split = matrix.reshape(rows // group, group, columns // pair, pair)
        return np.ascontiguousarray(split.transpose(0, 2, 1, 3)).reshape(rows, columns)

    places = probed((rows, columns), pack)
    assert places is not None
    packing = packing_of(places)
    assert packing is not None
    shape = (count, columns)
    table = TensorTable.of([TensorSpec("a", "BF16", shape), TensorSpec("b", "BF16", shape)])
    model = model_of(p=torch.zeros(2, rows, columns, dtype=torch.bfloat16))

    def load(given: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in given:
            model.p.data[int(name == "b"), first : first + count].copy_(tensor)

    layout = repacked(learn(model, load, table), ["p"], packing)
    assert not layout.unknown
    rng = np.random.default_rng(0)
    weights = Bag({spec: rng.integers(0, 2**16, spec.elements, np.uint16) for spec in table})
    load(stream(weights))
    with torch.no_grad():
        for matrix in model.p:
            matrix.view(torch.int16).copy_(torch.from_numpy(pack(matrix.view(torch.int16).numpy())))
    live = LiveParameters(model, layout)
    for spec in table:
        assert sum(one.digest or 0 for one in live.held(spec)) % 2**64 == wc.fingerprint(weights)[spec.name]


def test_what_does_more_than_move_is_no_packing() -> None:
    assert probed((4, 4), lambda matrix: matrix * 0) is None
    rng = np.random.default_rng(0)
    assert packing_of(rng.permutation(64 * 64).reshape(64, 64)) is None


# -- versions in requests ----------------------------------------------------------------------------------------------


class Client:
    def __init__(self, *versions: str):
        self._versions = list(versions)
        self.asked = 0

    async def get_weight_version(self) -> str:
        self.asked += 1
        return self._versions.pop(0) if len(self._versions) > 1 else self._versions[0]


def asked(client: Client, path: str = "/v1/completions", **headers: str) -> tuple[int, str | None]:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    state = type("State", (), {"engine_client": client})
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "headers": pairs, "app": type("App", (), {"state": state})}
    asyncio.run(WeightVersions(app)(scope, receive, send))
    return sent[0]["status"], dict(sent[0]["headers"]).get(b"x-weight-version", b"").decode() or None


def test_responses_name_their_version() -> None:
    assert asked(Client("7")) == (200, "7")
    assert asked(Client("7", "8")) == (200, "7-8")
    assert asked(Client("default", "default", "3")) == (200, "3"), "not before there is one"
    assert asked(Client("default"), x_weight_version_wait="0") == (200, "default")
    assert asked(Client("7"), path="/health") == (200, None)


def test_requests_wait_for_a_version() -> None:
    assert asked(Client("6", "6", "7"), x_weight_version_at_least="7") == (200, "7")
    assert asked(Client("6"), x_weight_version_at_least="7", x_weight_version_wait="0") == (503, None)
    assert asked(Client("default"), x_weight_version_at_least="0", x_weight_version_wait="0") == (503, None)
    for bad in ("-1", "x", "9" * 13):
        assert asked(Client("6"), x_weight_version_at_least=bad) == (400, None)
