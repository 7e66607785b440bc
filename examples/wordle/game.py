"""The rules of Wordle."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

LENGTH = 5
TURNS = 6

ABSENT, ELSEWHERE, RIGHT = MARKS = ".?!"
"""What a letter of a guess is marked with: not in the word (any more often), at another place, at this place."""


@cache
def words() -> tuple[str, ...]:
    """The words that are played, in alphabetical order."""
    return tuple((Path(__file__).parent / "words.txt").read_text().split())


def marks(guess: str, target: str) -> str:
    """One mark for each letter of the guess.

    A letter that occurs twice in the guess and once in the target is marked once: at its place if it is there,
    otherwise where it is guessed first.

    >>> marks("allee", "eagle")
    '??.?!'
    """
    found = [RIGHT if ours == theirs else ABSENT for ours, theirs in zip(guess, target, strict=True)]
    left = Counter(theirs for theirs, mark in zip(target, found, strict=True) if mark != RIGHT)
    for place, letter in enumerate(guess):
        if found[place] == ABSENT and left[letter]:
            found[place] = ELSEWHERE
            left[letter] -= 1
    return "".join(found)


def is_guess(text: str) -> bool:
    """Whether it is five letters."""
    return len(text) == LENGTH and text.isascii() and text.isalpha() and text.islower()


@dataclass
class Game:
    """One word, and what was guessed so far."""

    target: str
    guesses: list[str] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    forfeited: bool = False

    @property
    def won(self) -> bool:
        return bool(self.guesses) and self.guesses[-1] == self.target

    @property
    def over(self) -> bool:
        return self.won or self.forfeited or len(self.guesses) == TURNS

    def guess(self, word: str) -> None:
        """Take a turn."""
        if self.over:
            raise ValueError("this game is over")
        self.guesses.append(word)
        self.marks.append(marks(word, self.target))

    @property
    def reward(self) -> float:
        """1 for the word and 0.1 for each turn left, 0.2 for guessing words of the list, 0.2 for the last guess's hits.

        The last two tell guesses apart long before a game is won.
        """
        if not self.guesses:
            return 0.0
        listed = sum(guess in words() for guess in self.guesses) / len(self.guesses)
        hits = self.marks[-1].count(RIGHT) / LENGTH
        return self.won * (1 + 0.1 * (TURNS - len(self.guesses))) + 0.2 * listed + 0.2 * hits
