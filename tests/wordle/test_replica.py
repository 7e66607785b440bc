"""A rollout replica: completions with log-probabilities and versions, while versions arrive."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
import torch
from wordle_boxes import PATIENCE, box, post

import weightcast as wc
from examples.wordle.game import LENGTH, words
from examples.wordle.policy import BEGIN, CHECKPOINT, LETTERS, guess_ids, guess_logits, load
from examples.wordle.rollouts import EngineClient, Games, play


def wait_for(url: str, version: int) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            if EngineClient(url).version() == version:
                return
        except OSError:
            pass  # not up yet
        assert time.monotonic() < end, f"version {version} does not arrive"
        time.sleep(0.05)


@contextmanager
def following(folder: Path) -> Iterator[str]:
    """A replica at version 0 of a channel in ``folder``."""
    with wc.Checkpoint(CHECKPOINT) as weights:
        wc.init(folder, weights)
    with box("replica", "--channel", str(folder), "--name", "test") as url:
        wait_for(url, 0)
        yield url


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with following(tmp_path_factory.mktemp("replica") / "bucket") as url:
        yield url


def test_answers_name_the_version_that_made_them_while_versions_arrive(tmp_path: Path) -> None:
    with following(tmp_path / "bucket") as replica:
        seen, head = asked_while_published(replica, tmp_path / "bucket")
        assert seen == sorted(seen), "versions only grow"
        assert set(seen) <= set(range(6))
        with urllib.request.urlopen(f"{replica}/proof") as response:
            assert json.load(response) == {"version": head.version, "digest": head.digest}


def asked_while_published(replica: str, channel: Path) -> tuple[list[int], wc.Position]:
    """The versions of answers while five are published, and the last one."""
    model = load()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with wc.Publisher(channel, model, optimizer=optimizer, dtype="BF16") as publisher:
        seen: list[int] = []
        asking = Thread(target=lambda: [seen.extend(ask(replica)) for _ in range(60)], daemon=True)
        asking.start()
        for step in range(1, 6):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter[..., step] += 0.25
            head = publisher.publish(step=step).result().position
        wait_for(replica, head.version)
        asking.join(PATIENCE)
    return seen, head


def ask(url: str) -> tuple[int, ...]:
    return EngineClient(url).complete([[BEGIN]] * 8).versions


def test_logprobs_are_those_of_the_tokens(replica: str) -> None:
    prompts = [[BEGIN]] * 32
    sample = EngineClient(replica).complete(prompts)
    model = load(dtype=torch.bfloat16)
    rows = torch.tensor([[BEGIN, *tokens, *[0] * 55] for tokens in sample.tokens])
    expected = torch.log_softmax(guess_logits(model, rows, 1).float(), -1).gather(2, guess_ids(rows, 1)[..., None])
    assert torch.allclose(torch.tensor(sample.logprobs), expected[..., 0].detach(), atol=0.1)  # bf16, other batches


def test_greedy_answers_repeat_and_sampled_ones_differ(replica: str) -> None:
    def answers(temperature: float) -> set[str]:
        _, _, answer = post(f"{replica}/v1/completions", {"prompt": [[BEGIN]] * 64, "temperature": temperature})
        return {choice["text"] for choice in answer["choices"]}

    assert len(answers(0)) == 1
    assert len(answers(1)) > 8


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [[-1]]},
        {"prompt": [[105]]},
        {"prompt": [[0] * 62]},
        {"prompt": [[0], [0, 1]]},
        {"prompt": [[0]], "max_tokens": 0},
        {"prompt": [[0]], "temperature": -1},
        {"prompt": "text"},
    ],
    ids=str,
)
def test_malformed_requests_are_refused(replica: str, body: object) -> None:
    assert post(f"{replica}/v1/completions", body)[0] == 422
    assert EngineClient(replica).version() == 0, "it goes on"


def test_games_are_played_through_both_boxes(environment: str, replica: str) -> None:
    rollouts = play(environment, EngineClient(replica), Games(seed=3, words=16, repeats=2))
    assert set(rollouts.versions) == {0}
    assert rollouts.tokens.shape == (32, 61)
    assert (rollouts.turns >= 1).all()
    assert (rollouts.logprobs[rollouts.turns == 1, LENGTH:] == 0).all()
    letters = rollouts.tokens[:, 1 : 1 + LENGTH] - 1
    spelled = ["".join(LETTERS[letter] for letter in row) for row in letters.tolist()]
    assert sum(word in words() for word in spelled) > 16, "the checkpoint knows most words"
    assert rollouts.won.any()
    assert rollouts.rewards[rollouts.won].min() >= 1


def test_replica_without_a_version_says_so(tmp_path: Path) -> None:
    with box("replica", "--channel", str(tmp_path / "nothing")) as url:
        status, _, answer = post(f"{url}/v1/completions", {"prompt": [[BEGIN]]})
        assert (status, answer["detail"]) == (503, "no version has arrived yet")
