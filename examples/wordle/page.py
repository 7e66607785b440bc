"""The page that people play on, served by OpenEnv at /web."""

from __future__ import annotations

from typing import Any

import gradio as gr

from examples.wordle.environment import Board, WordleAction, WordleEnvironment
from examples.wordle.game import ABSENT, ELSEWHERE, LENGTH, RIGHT, TURNS

_COLOURS = {ABSENT: "#787c7e", ELSEWHERE: "#c9b458", RIGHT: "#6aaa64"}
_TILE = (
    "display:inline-flex;width:56px;height:56px;margin:3px;align-items:center;justify-content:center;"
    "font:bold 30px sans-serif;text-transform:uppercase;border:2px solid #d3d6da;"
)


def draw(board: Board) -> str:
    """The board as HTML: a row for each turn, a tile for each letter."""
    rows = []
    for turn in range(TURNS):
        played = turn < len(board.guesses)
        pairs = zip(board.guesses[turn], board.marks[turn], strict=True) if played else [(" ", "")] * LENGTH
        rows.append("".join(_tile(letter, mark) for letter, mark in pairs))
    return "<div>" + "".join(f"<div>{row}</div>" for row in rows) + "</div>"


def _tile(letter: str, mark: str) -> str:
    colour = f"background:{_COLOURS[mark]};color:white;" if mark else ""
    return f'<span style="{_TILE}{colour}">{letter}</span>'


def say(board: Board) -> str:
    """What there is to tell beside the board."""
    if board.refused:
        return board.refused.capitalize() + "."
    if board.won:
        return f"Found in {len(board.guesses)} of {TURNS}. Reward {board.reward:.2f}."
    if board.done:
        return f"It was **{board.target}**. Reward {board.reward:.2f}."
    return f"Turn {len(board.guesses) + 1} of {TURNS}."


def begin() -> tuple[WordleEnvironment, str, str, str]:
    """A game of one's own for each visitor, or a new one."""
    environment = WordleEnvironment()
    (board,) = environment.reset().boards
    return environment, draw(board), say(board), ""


def guess(environment: WordleEnvironment | None, text: str) -> tuple[WordleEnvironment, str, str, str]:
    """Take a turn, unless the game is over."""
    if environment is None:
        return begin()
    (board,) = environment.observe().boards
    if not board.done:
        (board,) = environment.step(WordleAction(guesses=[text.strip().lower()[:32]])).boards
    return environment, draw(board), say(board), text if board.refused else ""


def build_page(*_: Any) -> gr.Blocks:
    """OpenEnv hands over its own parts of a page, which are for one player at a time; none is used."""
    with gr.Blocks() as page:
        game = gr.State()
        gr.Markdown("# Wordle\nGuess the word. Green: at its place. Yellow: at another place. Grey: not in the word.")
        board, words = gr.HTML(), gr.Markdown()
        text = gr.Textbox(label="Guess", max_length=LENGTH, autofocus=True, elem_id="guess")
        with gr.Row():
            play, again = gr.Button("Guess", variant="primary"), gr.Button("New game")
        shown = [game, board, words, text]
        page.load(begin, None, shown)
        again.click(begin, None, shown)
        play.click(guess, [game, text], shown)
        text.submit(guess, [game, text], shown)
    return page
