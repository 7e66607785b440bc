"""The environment, over OpenEnv's own server and client."""

from __future__ import annotations

import urllib.request

import pytest

from examples.wordle.client import WordleEnv
from examples.wordle.environment import MOST_GAMES, WordleAction, WordleEnvironment
from examples.wordle.game import TURNS, marks, words


def targets(seed: int, games: int) -> list[str]:
    """What a session with this seed plays: lose it, and look."""
    environment = WordleEnvironment()
    boards = environment.reset(seed=seed, games=games).boards
    while not all(board.done for board in boards):
        boards = environment.step(WordleAction(guesses=[words()[0]] * sum(not board.done for board in boards))).boards
    found = [board.target for board in boards]
    assert all(found)
    return [target for target in found if target]


def test_games_are_played_side_by_side_over_a_session(environment: str) -> None:
    first, second = targets(7, 2)
    assert first != second
    with WordleEnv(base_url=environment).sync() as session:
        result = session.reset(seed=7, games=2, repeats=2)
        assert [board.target for board in result.observation.boards] == [None] * 4, "targets are not shown"
        result = session.step(WordleAction(guesses=[first, second, second, second]))
        assert [board.won for board in result.observation.boards] == [True, False, True, True]
        assert result.observation.boards[1].marks == [marks(second, first)]
        assert not result.done
        result = session.step(WordleAction(guesses=[first]))
        assert (result.done, result.reward) == (True, pytest.approx((3 * 1.9 + 1.8) / 4))
        assert session.state().step_count == 2


def test_sessions_do_not_see_each_other(environment: str) -> None:
    with WordleEnv(base_url=environment).sync() as one, WordleEnv(base_url=environment).sync() as other:
        one.reset(seed=1)
        other.reset(seed=2)
        (wrong,) = targets(2, 1)
        result = one.step(WordleAction(guesses=[wrong]))
        assert not result.done
        assert other.step(WordleAction(guesses=[wrong])).done


def test_refused_guesses_cost_no_turn_if_strict() -> None:
    environment = WordleEnvironment()
    environment.reset(seed=1)
    for guess, why in (("zzzzz", "not in the word list"), ("four", "five letters"), ("", "five letters")):
        (board,) = environment.step(WordleAction(guesses=[guess])).boards
        assert why in (board.refused or "")
        assert (board.guesses, board.done) == ([], False)
    (board,) = environment.step(WordleAction(guesses=[words()[0]])).boards
    assert (board.refused, board.guesses) == (None, [words()[0]])


def test_every_five_letters_are_a_guess_and_others_end_the_game_if_not_strict() -> None:
    environment = WordleEnvironment()
    environment.reset(seed=1, games=2, strict=False)
    spelled, broken = environment.step(WordleAction(guesses=["zzzzz", "zz.zz"])).boards
    assert (spelled.guesses, spelled.done) == (["zzzzz"], False)
    assert (broken.guesses, broken.done, broken.won, broken.reward) == ([], True, False, 0.0)


@pytest.mark.parametrize("reset", [{"games": 0}, {"games": 257}, {"repeats": 0}, {"games": 256, "repeats": 5}])
def test_impossible_sessions_are_refused(reset: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=str(MOST_GAMES)):
        WordleEnvironment().reset(**reset)


def test_wrong_number_of_guesses_changes_nothing() -> None:
    environment = WordleEnvironment()
    before = environment.reset(seed=1, games=3)
    with pytest.raises(ValueError, match="3 games are not over, but there are 1"):
        environment.step(WordleAction(guesses=["crane"]))
    assert environment.observe() == before


def test_step_before_a_reset_says_so() -> None:
    with pytest.raises(ValueError, match="reset first"):
        WordleEnvironment().step(WordleAction(guesses=[]))


def test_lost_game_ends_after_six_turns_and_shows_the_word() -> None:
    environment = WordleEnvironment()
    environment.reset(seed=1)
    for turn in range(TURNS):
        (board,) = environment.step(WordleAction(guesses=[words()[0]])).boards
        assert board.done == (turn == TURNS - 1)
    assert board.target == targets(1, 1)[0]


def test_people_find_a_page(environment: str) -> None:
    with urllib.request.urlopen(f"{environment}/web/") as response:
        assert "Wordle" in response.read().decode()
