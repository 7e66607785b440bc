"""A plot of lines over time as SVG, legible on light and dark pages; nothing but text is made here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import floor, log10

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 250, 60, 170, 34, 34
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#b58900")
GREY = "#808080"

Panel = tuple[str, float, Mapping[str, Sequence[float]]]
"""Its title, the minutes from one value to the next, and the lines by name."""


def plot(panels: Sequence[Panel]) -> str:
    """Panels under each other."""
    height = HEIGHT * len(panels)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12" role="img">'
    )
    parts = [_panel(title, lines, step, HEIGHT * i) for i, (title, step, lines) in enumerate(panels)]
    titles = "; ".join(title for title, _, _ in panels)
    return "\n".join([head, f"<title>{escape(titles)}</title>", *parts, "</svg>\n"])


def _panel(title: str, lines: Mapping[str, Sequence[float]], step: float, top: int) -> str:
    most = max(max(line) for line in lines.values()) or 1.0
    end = step * max(len(line) for line in lines.values())
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(minutes: float) -> float:
        return LEFT + wide * minutes / end

    def y(value: float) -> float:
        return top + TOP + high * (1 - value / most)

    parts = [f'<text x="{LEFT}" y="{top + 20}" fill="{GREY}" font-weight="bold">{escape(title)}</text>']
    for value in _ticks(most):
        parts.append(f'<path d="M{LEFT} {y(value):.1f}H{LEFT + wide}" stroke="{GREY}" stroke-opacity=".3"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" fill="{GREY}" text-anchor="end">{value:g}</text>')
    for value in _ticks(end):
        at = f'x="{x(value):.1f}" y="{top + HEIGHT - 14}"'
        parts.append(f'<text {at} fill="{GREY}" text-anchor="middle">{value:g} min</text>')
    for i, (name, line) in enumerate(lines.items()):
        points = " ".join(f"{x(step * (at + 1)):.1f},{y(value):.1f}" for at, value in enumerate(line))
        colour = COLOURS[i % len(COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
        parts.append(
            f'<text x="{LEFT + wide + 10}" y="{top + TOP + 12 + 18 * i}" fill="{colour}">{escape(name)}</text>'
        )
    return "\n".join(parts)


def _ticks(most: float) -> list[float]:
    """Round values from 0 up, about five."""
    rough = most / 5
    power = 10.0 ** floor(log10(rough))
    step = power * min((1, 2, 5, 10), key=lambda times: abs(times * power - rough))
    return [step * i for i in range(int(most / step) + 1)]
