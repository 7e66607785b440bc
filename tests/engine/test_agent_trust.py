"""An agent that trusts a key: its engine gets nothing that the key does not vouch for, with a mirror and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from local_engine import Local, Training, attached, must_be  # noqa: E402
from signed_channel import SignedChannel  # noqa: E402

from weightcast.channel.keys import manifest_key  # noqa: E402
from weightcast.engine.agent import Agent  # noqa: E402
from weightcast.errors import TrustError, WeightcastError  # noqa: E402


@pytest.fixture
def keys(tmp_path: Path) -> SignedChannel:
    (tmp_path / "keys").mkdir()
    return SignedChannel(tmp_path / "keys")


@pytest.fixture
def training(keys: SignedChannel, tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path, sign=keys.file("root"), trust=keys.trust)
    yield made
    made.close()


def agent_of(training: Training, engine: Local, tmp_path: Path, trust: str, mirror: bool) -> Agent:
    if mirror:
        return attached(training, engine, tmp_path, trust=trust)
    return Agent(training.url, engine, None, trust=trust)


@pytest.mark.parametrize("mirror", [True, False], ids=["mirror", "none"])
def test_engine_stays_at_its_version_until_the_next_is_signed(
    training: Training, keys: SignedChannel, tmp_path: Path, mirror: bool
) -> None:
    engine = Local(training.weights, ranks=1)
    with agent_of(training, engine, tmp_path, keys.trust, mirror) as agent:
        agent.step()
        training.step(1)
        agent.step()
        must_be(engine, agent, 1)
        training.step(2)
        commit = Path(training.url) / manifest_key(2)
        genuine = commit.read_bytes()
        commit.write_bytes(genuine.replace(b'"changed":', b'"changed":1'))
        with pytest.raises(TrustError) as raised:
            agent.step()
        assert raised.value.reason == "forged"
        assert (engine.served, engine.paused) == ("1", False)
        commit.write_bytes(genuine)
        agent.step()
        must_be(engine, agent, 2)


@pytest.mark.parametrize("mirror", [True, False], ids=["mirror", "none"])
def test_agent_with_another_root_does_not_ask_the_engine(
    training: Training, keys: SignedChannel, tmp_path: Path, mirror: bool
) -> None:
    engine = Local(training.weights, ranks=1)
    engine.calls.clear()
    with pytest.raises(TrustError):
        agent_of(training, engine, tmp_path, str(keys.public("stranger")), mirror)
    assert engine.calls == []


def test_object_of_a_signed_version_with_other_bytes_reaches_no_worker(
    training: Training, keys: SignedChannel, tmp_path: Path
) -> None:
    engine = Local(training.weights, ranks=1)
    with Agent(training.url, engine, None, trust=keys.trust) as agent:
        agent.step()
        training.step(1)
        (path,) = (Path(training.url) / "deltas").iterdir()
        genuine = path.read_bytes()
        path.write_bytes(genuine[:-1] + bytes([genuine[-1] ^ 1]))
        engine.calls.clear()
        with pytest.raises(WeightcastError, match=r"sha256|SHA-256|damaged"):
            agent.step()
        assert "pause" not in engine.calls
    assert engine.served == "0"
