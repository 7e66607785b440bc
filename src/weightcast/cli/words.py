"""Facts and times in words. A program gets the same facts as JSON, under their keys."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

from weightcast.cli.console import facts, tell
from weightcast.cli.wording import size, span
from weightcast.errors import UsageError

_WORDS = {
    "bits_per_change": "bits per change",
    "density": "changed share",
    "ratio_to_full": "ratio to full",
}
"""What people call a fact, where its key with spaces is not clear enough."""

_SKEW = 2.0
"""Seconds by which clocks may differ before it is worth a word."""


def report(values: dict[str, Any], as_json: bool) -> None:
    """Facts, one per line and in words, or as one JSON object."""
    if as_json:
        tell(values)
    else:
        facts({_WORDS.get(key, key.replace("_", " ")): _shown(key, value) for key, value in values.items()}, False)


def _shown(key: str, value: Any) -> Any:
    """A value with its unit."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if key == "bytes" or key.endswith("_bytes"):
        return size(value) if value < 1000 else f"{size(value)} ({value:,} bytes)"
    if key == "density":
        return f"{value:.3%}"
    if key == "ratio_to_full":
        return f"1 : {value:,.4g}"
    if key == "seconds":
        return span(value)
    return ", ".join(map(str, value)) or "none" if isinstance(value, (list, tuple)) else value


def count(number: int, what: str) -> str:
    """`1 version`, `2 versions`, `1 squash`, `2 squashes`."""
    return f"{number:,} {what}{'' if number == 1 else 'es' if what.endswith(('s', 'sh', 'x')) else 's'}"


def natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts names as people count: layer 2 before layer 10.

    >>> sorted(["layers.10.up", "layers.2.up", "embed"], key=natural)
    ['embed', 'layers.2.up', 'layers.10.up']
    """
    # ASCII digits only, and a bounded number of them: names come from outside.
    parts = re.split(r"([0-9]{1,18})", name)
    return [(0, int(part), "") if at % 2 else (1, 0, part) for at, part in enumerate(parts)]


def ago(seconds: float) -> str:
    """How long ago; a moment that lies ahead is called so, since then two clocks disagree."""
    return f"in the future by {span(-seconds)}: check the clocks" if is_ahead(seconds) else f"{span(seconds)} ago"


def is_ahead(seconds: float) -> bool:
    """Whether an age is that of something from the future."""
    return seconds < -_SKEW


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str) -> float:
    """A duration such as 90s, 15m, 12h, 7d; `UsageError` for anything else."""
    found = re.fullmatch(r"(\d{1,12}(?:\.\d+)?)([smhd])", text, re.ASCII)
    if not found:
        hint = "Write a number and s, m, h or d: 90s, 15m, 12h, 7d."
        raise UsageError(f"{text[:100]!r} is not a duration", hint=hint)
    return float(found[1]) * _UNITS[found[2]]


def moment_named(text: str, now: float) -> float:
    """A point in time: a date and perhaps a time of day in UTC, or how long ago it was."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        try:
            return now - seconds(text)
        except UsageError:
            hint = "Write a date (2026-11-30, 2026-11-30T18:00) or an age (90s, 15m, 12h, 7d)."
            raise UsageError(f"{text[:100]!r} is not a time", hint=hint) from None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def ranges(versions: list[int] | tuple[int, ...]) -> str:
    """Versions in rising order as `3–17, 20`."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and version == runs[-1][1] + 1:
            runs[-1][1] = version
        else:
            runs.append([version, version])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)
