"""The rules: marks, turns, rewards."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.wordle.game import ABSENT, ELSEWHERE, LENGTH, MARKS, RIGHT, TURNS, Game, is_guess, marks, words

WORD = st.text("abcde", min_size=LENGTH, max_size=LENGTH)


@pytest.mark.parametrize(
    ("guess", "target", "expected"),
    [
        ("crane", "crane", "!!!!!"),
        ("crane", "bully", "....."),
        ("speed", "abide", "..?.?"),  # two e, one in the word: the first is marked
        ("speed", "erase", "?.??."),  # both are in the word
        ("speed", "steal", "!.!.."),  # one is at its place, so the other is not marked
        ("allee", "eagle", "??.?!"),
        ("geese", "eject", ".?!.."),
        ("mamma", "maxim", "!!?.."),
        ("aabbb", "bbaaa", "????."),
    ],
)
def test_marks(guess: str, target: str, expected: str) -> None:
    assert marks(guess, target) == expected


@given(WORD, WORD)
def test_marks_count_each_letter_as_often_as_the_word_has_it(guess: str, target: str) -> None:
    found = marks(guess, target)
    assert set(found) <= set(MARKS)
    assert [mark == RIGHT for mark in found] == [ours == theirs for ours, theirs in zip(guess, target, strict=True)]
    marked = Counter(letter for letter, mark in zip(guess, found, strict=True) if mark != ABSENT)
    assert marked == Counter(guess) & Counter(target)
    for letter in set(guess):
        others = [mark for ours, mark in zip(guess, found, strict=True) if ours == letter and mark != RIGHT]
        assert others == sorted(others, key=[ELSEWHERE, ABSENT].index), "the first places are marked"


def test_list_has_256_different_words_of_five_letters() -> None:
    assert len(words()) == 256 == len(set(words()))
    assert all(map(is_guess, words()))
    assert list(words()) == sorted(words())


@pytest.mark.parametrize("text", ["", "cran", "cranes", "Crane", "cr ne", "cr4ne", "crâne", "c.rane"])
def test_other_texts_are_no_guesses(text: str) -> None:
    assert not is_guess(text)


def test_game_ends_with_the_word_or_after_six_turns() -> None:
    game = Game("crane")
    for _ in range(TURNS - 1):
        game.guess("slate")
        assert not game.over
    game.guess("slate")
    assert (game.over, game.won) == (True, False)
    with pytest.raises(ValueError, match="over"):
        game.guess("crane")
    quick = Game("crane")
    quick.guess("crane")
    assert (quick.over, quick.won) == (True, True)


def test_reward_prefers_the_word_soon_then_listed_words_then_hits() -> None:
    def played(*guesses: str) -> float:
        game = Game(words()[0])
        for guess in guesses:
            game.guess(guess)
        return game.reward

    target, other = words()[0], words()[100]
    assert played(target) == pytest.approx(1.9)
    assert played(target) > played(other, target) > played(other, other) > played("zzzzz", "zzzzz") == 0
    assert Game(target).reward == 0
