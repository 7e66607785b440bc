"""Asynchronous GRPO: advantages, the clipped objective, and a step that makes good guesses likelier."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from examples.wordle.evaluation import Evaluation, interval
from examples.wordle.game import LENGTH, TURNS, words
from examples.wordle.grpo import CLIP, advantages, clipped_objective, learn
from examples.wordle.policy import CONTEXT, IDS, TOKENS, TURN, guess_ids, guess_logits, load, mark_ids, text_of
from examples.wordle.rollouts import Games, Rollouts


def test_advantages_compare_games_of_one_word() -> None:
    found = advantages(np.array([1.0, 0.0, 5.0, 5.0], np.float32), 2)
    assert found[0] == -found[1] > 0.9
    assert list(found[2:]) == [0, 0]


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected"),
    [(0.0, 2.0, 2.0), (1.0, 1.0, 1 + CLIP), (-1.0, -1.0, -(1 - CLIP)), (1.0, -1.0, -np.e), (-1.0, 1.0, 1 / np.e)],
)
def test_ratio_is_clipped_where_it_would_go_on_in_the_same_direction(
    log_ratio: float, advantage: float, expected: float
) -> None:
    found = clipped_objective(torch.tensor([log_ratio]), torch.tensor([0.0]), torch.tensor([advantage]))
    assert found.item() == pytest.approx(expected)


def game(*guesses: tuple[str, str]) -> np.ndarray:
    ids = [0]
    for guess, marks in guesses:
        ids += [IDS[letter] for letter in guess] + mark_ids(guess, marks)
    return np.array(ids + [0] * (CONTEXT - len(ids)))


def test_tokens_and_texts_are_inverse() -> None:
    assert len(set(TOKENS)) == len(TOKENS) == 105
    row = game(("crane", ".?!.."), ("slate", "....!"))
    assert text_of(row[1 : 1 + 2 * TURN]) == "cranec.r?a!n.e.slates.l.a.t.e!"
    assert text_of(guess_ids(torch.from_numpy(row)[None], 2)[0].tolist()) == "craneslate"


def logprobs(model: torch.nn.Module, tokens: np.ndarray, turns: int) -> torch.Tensor:
    rows = torch.from_numpy(tokens)
    found = torch.log_softmax(guess_logits(model, rows, turns), -1)
    return found.gather(2, guess_ids(rows, turns)[..., None])[..., 0].detach()


def test_step_makes_the_better_game_likelier_and_ignores_what_was_not_played() -> None:
    model = load()
    good, bad = words()[3], words()[200]
    tokens = np.stack([game((good, "!!!!!")), game((bad, "....."), (bad, "....."))])
    old = np.zeros((2, TURNS * LENGTH), np.float32)
    old[:, : 2 * LENGTH] = logprobs(model, tokens, 2)
    old[0, LENGTH:] = -1e9  # never played: must not matter
    rollouts = Rollouts(
        Games(0, 1, 2),
        tokens,
        old,
        np.array([1, 2]),
        np.array([1.9, 0.0], np.float32),
        np.array([True, False]),
        (0,),
        0.0,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    learned = learn(model, optimizer, rollouts)
    now = logprobs(model, tokens, 2).numpy()
    assert now[0, :LENGTH].sum() > old[0, :LENGTH].sum()
    assert now[1].sum() < old[1, : 2 * LENGTH].sum()
    assert learned.kl == pytest.approx(0, abs=1e-5)
    assert learned.clipped == 0
    assert np.isfinite(learned.norm)


def test_intervals_that_overlap_are_no_improvement() -> None:
    def of(wins: int) -> Evaluation:
        return Evaluation(0, 2048, wins, *interval(wins, 2048), 0.0)

    assert of(1000).is_beaten_by(of(1200))
    assert not of(1000).is_beaten_by(of(1020))
    assert interval(0, 10)[0] == pytest.approx(0)
    assert interval(10, 10)[1] == pytest.approx(1)
