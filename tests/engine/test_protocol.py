"""The messages between agent and worker: what is sent arrives, and every lie is one clear error."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from local_engine import Local, Training, attached  # noqa: E402

from weightcast.channel.keys import Position  # noqa: E402
from weightcast.channel.records import Channel  # noqa: E402
from weightcast.engine.box_digests import BoxDigest  # noqa: E402
from weightcast.engine.client import read_answers  # noqa: E402
from weightcast.engine.messages import (  # noqa: E402
    ANSWERS,
    REQUESTS,
    Digest,
    Digests,
    Done,
    Failed,
    Fit,
    Hello,
    JobReport,
    ReadFit,
    ReadJob,
    Request,
    StagePatches,
    Survey,
    SurveyResult,
    WorkerState,
)
from weightcast.engine.proof import prove  # noqa: E402
from weightcast.engine.protocol import (  # noqa: E402
    PROTOCOL,
    ProtocolError,
    decode_answer,
    decode_request,
    encode,
    kind_of,
)
from weightcast.engine.state import read_state  # noqa: E402
from weightcast.engine.worker import EngineWorker  # noqa: E402
from weightcast.errors import EngineError, FormatError  # noqa: E402
from weightcast.format.boxes import Box, Range  # noqa: E402
from weightcast.format.cut import MAX_PARTS, Cut  # noqa: E402
from weightcast.format.spec import TensorSpec, TensorTable  # noqa: E402

# -- round trips -------------------------------------------------------------------------------------------------------

numbers = st.integers(0, 2**64 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
positions = st.builds(Position, st.integers(0, 999), st.text("0123456789abcdef", min_size=64, max_size=64))
boxes = st.builds(
    BoxDigest,
    st.builds(Box, st.lists(st.builds(Range, numbers, numbers, numbers), max_size=3).map(tuple)),
    st.none() | numbers,
    st.none() | texts,
    st.booleans(),
)
TABLE = TensorTable.of([TensorSpec("a", "BF16", (2, 3)), TensorSpec("b", "F32", ())])
CHANNEL = Channel("0" * 32, TABLE)
PLAIN: dict[Any, st.SearchStrategy] = {
    int: numbers,
    str: texts,
    bool: st.booleans(),
    type(None): st.none(),
    Position: positions,
    BoxDigest: boxes,
    Channel: st.just(CHANNEL),
    Cut: st.builds(Cut, texts, st.integers(0, 63), st.integers(1, MAX_PARTS)),
}


def values(hint: Any) -> st.SearchStrategy:
    """What a field of that type may hold."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint in PLAIN:
        return PLAIN[hint]
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values, inner))
    if origin in (tuple, frozenset):
        return st.lists(values(inner[0]), max_size=3).map(origin)
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is Mapping:
        return st.dictionaries(texts, values(inner[1]), max_size=3)
    assert is_dataclass(hint), hint
    return messages(hint)


def messages(kind: Any) -> st.SearchStrategy:
    if kind is JobReport:
        results = values(get_type_hints(JobReport)["result"]).filter(lambda one: one is not None)
        return (
            st.sampled_from(["running", "gone"]).map(JobReport)
            | st.builds(JobReport, st.just("done"), results)
            | st.builds(JobReport, st.just("failed"), st.none(), texts)
        )
    hints = get_type_hints(kind)
    built = {one.name: values(hints[one.name]) for one in fields(kind)}
    if kind is WorkerState:
        ranks = st.integers(0, 7)
        return st.builds(WorkerState, **built | {"rank": ranks, "world": st.integers(8, 99)})
    return st.builds(kind, **built)


@given(st.data())
@pytest.mark.parametrize("kind", REQUESTS, ids=kind_of)
def test_request_survives_the_wire(kind: type, data: st.DataObject) -> None:
    message = data.draw(messages(kind))
    assert decode_request(encode(message)) == message


@given(st.data())
@pytest.mark.parametrize("kind", ANSWERS, ids=kind_of)
def test_answer_survives_the_wire(kind: type, data: st.DataObject) -> None:
    message = data.draw(messages(kind))
    assert decode_answer(encode(message)) == message


# -- lies --------------------------------------------------------------------------------------------------------------

STATE = WorkerState("w", 0, 1, Position(3, "a" * 64))
STAGE = StagePatches(("p",))
DIGESTS = JobReport("done", Digests({"a": (BoxDigest(Box((Range(0, 1),)), 5),)}))


def changed(message: object, **values: object) -> str:
    """A message with some of its JSON replaced."""
    return json.dumps({**json.loads(encode(message)), **values})


def without(message: object, name: str) -> str:
    return json.dumps({key: value for key, value in json.loads(encode(message)).items() if key != name})


def boxed(value: object) -> str:
    text = json.loads(encode(DIGESTS))
    text["result"]["live"]["a"] = value
    return json.dumps(text)


LIES = {
    "nothing": ("", "not JSON"),
    "not JSON": ("hello", "not JSON"),
    "deeply nested": ("[" * 100_000, "not JSON"),
    "a key twice": ('{"protocol": 1, "protocol": 1}', "a duplicate key"),
    "half a surrogate pair": (changed(STAGE, job="\ud800"), "surrogate"),
    "not an object": ("[]", "not an object"),
    "no protocol": (without(STAGE, "protocol"), "no protocol number"),
    "protocol as text": (changed(STAGE, protocol="1"), "no protocol number"),
    "protocol as a truth value": (changed(STAGE, protocol=True), "no protocol number"),
    "no kind": (without(STAGE, "kind"), "unknown kind None"),
    "unknown kind": (changed(STAGE, kind="explode"), "unknown kind 'explode'"),
    "kind that is no text": (changed(STAGE, kind=["hello"]), "unknown kind"),
    "missing field": (without(STAGE, "paths"), r"fields missing: \['paths'\]"),
    "extra field": (changed(STAGE, more=1), r"too many: \['more'\]"),
    "text instead of a list": (changed(STAGE, paths="p"), "stage_patches.paths: expected a list"),
    "number in a list of text": (changed(STAGE, paths=[1]), "stage_patches.paths: expected text"),
    "null where text is needed": (changed(STAGE, job=None), "stage_patches.job: expected text"),
    "number instead of a truth value": (changed(STATE, changing=0), "worker_state.changing: expected true or false"),
    "truth value instead of a number": (changed(STATE, updates=True), "worker_state.updates: expected a natural"),
    "fraction": (changed(STATE, updates=1.5), "worker_state.updates: expected a natural"),
    "negative number": (changed(STATE, updates=-1), "worker_state.updates: expected a natural"),
    "number over 64 bits": (changed(STATE, updates=2**64), "worker_state.updates: expected a natural"),
    "not a number": (changed(STATE, updates=float("nan")), "not JSON"),
    "rank outside of the world": (changed(STATE, rank=1), "rank 1 of 1 workers"),
    "position without digest": (changed(STATE, position=[3]), "a position is impossible"),
    "position with a short digest": (changed(STATE, position=[3, "a"]), "a digest is impossible"),
    "unknown state of a job": (changed(JobReport("gone"), state="lost"), "job_report.state: expected one of"),
    "job done without a result": (changed(JobReport("gone"), state="done"), "of another state"),
    "job running with a result": (changed(DIGESTS, state="running"), "of another state"),
    "job failed without a reason": (changed(JobReport("gone"), state="failed"), "of another state"),
    "result of an unknown kind": (changed(DIGESTS, result={"kind": "hello"}), "unknown kind 'hello'"),
    "result that is no object": (changed(DIGESTS, result=[]), "job_report.result: expected an object"),
    "box of two values": (boxed([[[[0, 1, 1]], 5]]), "box: expected four values"),
    "range of two numbers": (boxed([[[[0, 1]], 5, None, False]]), "box: expected three numbers"),
    "negative range": (boxed([[[[-1, 1, 1]], 5, None, False]]), "box: expected a natural"),
    "digest over 64 bits": (boxed([[[[0, 1, 1]], 2**64, None, False]]), "box digest: expected a natural"),
}


@pytest.mark.parametrize("lie", LIES)
def test_malformed_message_is_one_clear_error(lie: str) -> None:
    text, problem = LIES[lie]
    for decode in (decode_request, decode_answer):
        with pytest.raises(FormatError) as refused:
            decode(text)
        assert not isinstance(refused.value, ProtocolError)
    matching: list[Callable[[str], object]] = [decode_request] if "stage_patches" in text else [decode_answer]
    with pytest.raises(FormatError, match=problem):
        matching[0](text)


def test_malformed_channel_is_refused() -> None:
    for value in (1, "", "{}", None):
        with pytest.raises(FormatError):
            decode_request(json.dumps({"protocol": PROTOCOL, "kind": "learn", "channel": value}))


def test_request_and_answer_are_not_interchangeable() -> None:
    with pytest.raises(FormatError, match="unknown kind"):
        decode_answer(encode(Hello()))
    with pytest.raises(FormatError, match="unknown kind"):
        decode_request(encode(Done()))


HUGE = "x" * 1_000_000
WORDY = [
    Failed(HUGE),
    replace(STATE, failed=HUGE),
    JobReport("failed", problem=HUGE),
    JobReport("done", Digests({"a": (BoxDigest(Box(()), None, HUGE),)})),
    Fit(unknown={"a": HUGE}, cannot_reload=HUGE),
    SurveyResult(Fit(), HUGE, {}),
]


@pytest.mark.parametrize("message", WORDY, ids=lambda message: kind_of(type(message)))
def test_long_reason_is_cut_off(message: object) -> None:
    assert 2000 < len(str(decode_answer(encode(message)))) < 5000


def test_long_reason_of_a_worker_does_not_fill_the_agents_log() -> None:
    with pytest.raises(EngineError, match="worker 0: xxx") as refused:
        read_answers(Hello(), [encode(Failed(HUGE))], "url")
    assert len(str(refused.value)) < 2100


def test_long_name_is_refused() -> None:
    for message in (replace(STATE, instance=HUGE), Fit(unknown={HUGE: "a"}), Fit(absent=frozenset({HUGE}))):
        with pytest.raises(FormatError, match="text of at most 65,536 characters") as refused:
            decode_answer(encode(message))
        assert len(str(refused.value)) < 200


# -- whose error it is -------------------------------------------------------------------------------------------------

INSTALL = "Install the same weightcast"


def test_other_protocol_is_named_before_anything_else_is_checked() -> None:
    for text in (
        '{"protocol": 7}',
        '{"protocol": 7, "kind": "from the future", "more": []}',
        changed(STATE, protocol=7),
    ):
        with pytest.raises(ProtocolError) as refused:
            decode_answer(text)
        assert refused.value.found == 7


def test_engine_of_another_protocol_is_refused_with_the_remedy(training: Training, tmp_path: Path) -> None:
    class Newer(Local):
        def exchange(self, text: str) -> list[str]:
            return [changed_text(one, protocol=PROTOCOL + 1) for one in super().exchange(text)]

    engine = Newer(training.weights)
    with attached(training, engine, tmp_path) as agent, pytest.raises(EngineError) as refused:
        agent.step()
    assert f"uses protocol {PROTOCOL + 1}, this agent uses {PROTOCOL}" in str(refused.value)
    assert INSTALL in str(refused.value)
    assert engine.calls == ["hello"]


def changed_text(text: str, **values: object) -> str:
    return json.dumps({**json.loads(text), **values})


def test_worker_refuses_an_agent_of_another_protocol(training: Training) -> None:
    answer = Local(training.weights).workers[0].answer(changed(Hello(), protocol=PROTOCOL + 1))
    found = decode_answer(answer)
    assert isinstance(found, Failed)
    assert f"protocol {PROTOCOL + 1}" in found.problem


@pytest.mark.parametrize("lie", ["missing field", "unknown kind", "negative number", "job done without a result"])
def test_malformed_answer_is_not_reported_as_another_release(lie: str) -> None:
    text, _ = LIES[lie]
    for answer in (text, 7, None, {}):
        with pytest.raises(EngineError, match="worker 1 sent a malformed answer") as refused:
            read_answers(Hello(), [encode(STATE), answer], "url")
        assert INSTALL not in str(refused.value)


def test_answer_to_another_question_is_malformed() -> None:
    with pytest.raises(EngineError, match="Done does not answer Hello"):
        read_answers(Hello(), [encode(Done())], "url")


def test_engine_without_workers_is_an_error() -> None:
    with pytest.raises(EngineError, match="has no workers"):
        read_answers(Hello(), [], "url")


def test_bug_of_our_own_is_raised_unchanged(training: Training, tmp_path: Path) -> None:
    """A TypeError of the agent's code says nothing about the other side."""

    class Buggy(Local):
        def ask(self, request: Request[Any]) -> Any:
            raise TypeError("a bug")

    with attached(training, Buggy(training.weights), tmp_path) as agent, pytest.raises(TypeError, match="a bug"):
        agent.step()


def test_bug_in_a_worker_is_reported_by_its_name() -> None:
    def learn(table: TensorTable) -> Any:
        raise ZeroDivisionError("a bug")

    worker = EngineWorker(torch.nn.Module(), learn, print, "nowhere", 0, 1)
    assert decode_answer(worker.answer(encode(Survey(CHANNEL)))) == Failed("ZeroDivisionError: a bug")


def test_request_that_a_worker_refuses_is_not_reported_as_another_release(training: Training) -> None:
    with pytest.raises(EngineError, match="worker 0: no layout was learned yet") as refused:
        Local(training.weights).ask(ReadFit())
    assert INSTALL not in str(refused.value)


def test_worker_never_raises(training: Training) -> None:
    worker = Local(training.weights).workers[0]
    texts = [text for text, _ in LIES.values()]
    for text in [*texts, encode(Digest()), encode(ReadFit()), encode(Done())]:
        assert isinstance(decode_answer(worker.answer(text)), Failed), text
    assert decode_answer(worker.answer(encode(ReadJob("a")))) == JobReport("gone")


# -- reports that contradict the table ---------------------------------------------------------------------------------


def answering(engine: Local, answers: dict[type, list[Any]]) -> None:
    """Have some requests answered with what the test gives."""
    real = engine.exchange

    def exchange(text: str) -> list[str]:
        given = answers.get(type(decode_request(text)))
        return real(text) if given is None else [encode(one) for one in given]

    engine.exchange = exchange  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("live", "problem"),
    [
        ({"ghost": ()}, "a tensor that the channel does not have"),
        ({"norm": (BoxDigest(Box((Range(0, 9),)), 1),)}, "not inside"),
        ({"norm": (BoxDigest(Box((Range(0, 4), Range(0, 2))), 1),)}, "not inside"),
    ],
    ids=["unknown tensor", "box over the edge", "box of another rank"],
)
def test_digests_that_contradict_the_table_are_the_engines_error(
    live: Any, problem: str, training: Training, tmp_path: Path
) -> None:
    engine = Local(training.weights)
    answering(engine, {ReadJob: [JobReport("done", Digests(live))] * 2})
    with attached(training, engine, tmp_path) as agent, pytest.raises(EngineError, match=problem):
        prove(engine, agent.subscriber.chain)


def test_tensor_that_no_worker_reports_is_not_at_any_version(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights)
    answering(engine, {ReadJob: [JobReport("done", Digests({}))] * 2})
    with attached(training, engine, tmp_path) as agent:
        assert prove(engine, agent.subscriber.chain).position is None


def test_job_with_the_result_of_another_is_the_engines_error(training: Training, tmp_path: Path) -> None:
    engine = Local(training.weights)
    with attached(training, engine, tmp_path) as agent:
        agent.step()
        training.step(1)
        answering(engine, {ReadJob: [JobReport("done", Digests({}))] * 2})
        with pytest.raises(EngineError, match="answers a StagePatches with a Digests"):
            agent.step()


def test_missing_rank_is_an_error(training: Training) -> None:
    engine = Local(training.weights)
    first = engine.ask(Hello())[0]
    answering(engine, {Hello: [first, first]})
    with pytest.raises(EngineError, match="not all workers answer"):
        read_state(engine, training.weights.table)


def test_workers_at_different_positions_are_a_mix(training: Training) -> None:
    engine = Local(training.weights)
    one, other = engine.ask(Hello())
    answering(engine, {Hello: [replace(one, position=Position(1, "a" * 64)), other]})
    state = read_state(engine, training.weights.table)
    assert (state.position, state.changing, state.fit) == (None, True, Fit())
