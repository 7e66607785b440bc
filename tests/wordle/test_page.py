"""The page for people: a game for each visitor, drawn as tiles."""

from __future__ import annotations

from examples.wordle.game import TURNS, words
from examples.wordle.page import begin, guess


def test_game_is_played_to_its_end() -> None:
    game, board, text, field = begin()
    assert (text, field) == ("Turn 1 of 6.", "")
    assert board.count("<span") == 30
    game, board, text, field = guess(game, "  ZZZZZ ")
    assert (text, field) == ("Zzzzz is not in the word list.", "  ZZZZZ "), "it stays to be corrected"
    for _ in range(TURNS):
        game, board, text, field = guess(game, words()[0].upper())
    assert "Reward" in text
    assert words()[0][0] in board
    assert guess(game, words()[1])[1:3] == (board, text), "nothing more happens to a game that is over"


def test_visitors_have_games_of_their_own() -> None:
    (mine, *_), (yours, *_) = begin(), begin()
    guess(mine, words()[0])
    assert len(mine.observe().boards[0].guesses) == 1
    assert yours.observe().boards[0].guesses == []


def test_guess_without_a_game_begins_one() -> None:
    assert guess(None, "crane")[2] == "Turn 1 of 6."
