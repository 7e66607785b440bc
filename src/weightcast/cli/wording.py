"""Numbers, times and text from outside, as people read them; durations, dates and rates, as people write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from weightcast.errors import UsageError

_INVISIBLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
"""Characters that count as printable and show nothing: fillers, joiners, selectors of variants."""


def one_line(text: str) -> str:
    """Text from outside as a line on which all of it can be seen, and nothing acts on the terminal.

    What is not printable is spelled out as in a Python string: control characters and escapes, line ends, marks that
    reverse the direction of writing, spaces of no width, halves of characters.

    >>> print(one_line("w\\x1b[2J\\n\\u202e"))
    w\\x1b[2J\\n\\u202e
    """
    if text.isprintable() and not _INVISIBLE.search(text):
        return text
    return "".join(map(_spelled, text))


def _spelled(character: str) -> str:
    if character.isprintable() and not _INVISIBLE.match(character):
        return character
    return character.encode("unicode_escape").decode()


# -- numbers -----------------------------------------------------------------------------------------------------------


def _three(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def size(nbytes: float) -> str:
    """Bytes for people."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        nbytes /= 1000
        if nbytes < 999.5:
            return f"{_three(nbytes)} {unit}"
    return f"{_three(nbytes / 1000)} TB"


def ratio(full: int, nbytes: int) -> str:
    """How many times the bytes go into all of the model's."""
    return f"1 : {_three(full / max(nbytes, 1))}"


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


def ranges(versions: Sequence[int]) -> str:
    """Versions in rising order as `3–17, 20`."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and version == runs[-1][1] + 1:
            runs[-1][1] = version
        else:
            runs.append([version, version])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)


def in_words(values: dict[str, Any]) -> dict[str, str]:
    """Facts of a JSON object under names and with units for people."""
    names = {"density": "changed share"}
    return {names.get(key, key.replace("_", " ")): _shown(key, value) for key, value in values.items()}


def _shown(key: str, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, str):
        return value
    if key == "bytes" or key.endswith("_bytes"):
        return size(value) if value < 1000 else f"{size(value)} ({value:,} bytes)"
    if key == "density":
        return f"{value:.3%}"
    if key == "ratio_to_full":
        return f"1 : {value:,.4g}"
    if key == "seconds":
        return span(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


# -- times -------------------------------------------------------------------------------------------------------------

_SKEW = 2.0
"""Seconds by which clocks may differ before it is worth a word."""


def span(seconds: float) -> str:
    """A time for people; one in the future, because clocks differ, counts as now."""
    seconds = max(0.0, seconds)  # also for NaN
    for limit, unit, length in ((9.95, "s", 1.0), (120, "s", 1.0), (7200, "min", 60.0), (172800, "h", 3600.0)):
        if seconds < limit:
            return f"{seconds / length:.{1 if limit < 10 else 0}f} {unit}"
    return f"{seconds / 86400:,.0f} d"


def brief(seconds: float) -> str:
    """A short time for people, in milliseconds below a second."""
    return f"{1000 * seconds:.0f} ms" if seconds < 0.9995 else span(seconds)


def moment(when: float) -> str:
    """A time in seconds since 1970 as a date; as a number if it is outside the calendar."""
    try:
        return f"{datetime.fromtimestamp(when, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return f"{when:.15g} s since 1970"


def ago(seconds: float) -> str:
    """How long ago; a time in the future is called so, since then two clocks disagree."""
    return f"in the future by {span(-seconds)}: check the clocks" if is_ahead(seconds) else f"{span(seconds)} ago"


def is_ahead(seconds: float) -> bool:
    """Whether an age is that of something from the future."""
    return seconds < -_SKEW


# -- what people write -------------------------------------------------------------------------------------------------


def seconds(text: str) -> float:
    """A duration such as 90s, 15m, 12h, 7d; `UsageError` for anything else."""
    found = re.fullmatch(r"(\d{1,12}(?:\.\d+)?)([smhd])", text, re.ASCII)
    if not found:
        hint = "Write a number and s, m, h or d: 90s, 15m, 12h, 7d."
        raise UsageError(f"{text[:100]!r} is not a duration", hint=hint)
    return float(found[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}[found[2]]


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


def rate_of(text: str) -> float:
    """Bytes per second.

    >>> rate_of("50M"), rate_of("1.5MB/s"), rate_of("1kiB/s"), rate_of("800")
    (50000000.0, 1500000.0, 1024.0, 800.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?)b?(?:/s|ps)?", text.strip(), re.IGNORECASE)
    rate = 0.0
    if found is not None:
        rate = float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " ")
    if not 1 <= rate < float("inf"):
        hint = "Write bytes per second, at least 1: 800k, 50M or 1.5GB/s."
        raise UsageError(f"{text[:100]!r} is not a rate", hint=hint)
    return rate
