"""Numbers, times and text from outside, as people read them."""

import re
from datetime import UTC, datetime

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


def span(seconds: float) -> str:
    """A time for people; one in the future, because clocks differ, counts as now."""
    seconds = max(0.0, seconds)  # also for what is no number
    for limit, unit, length in ((9.95, "s", 1.0), (120, "s", 1.0), (7200, "min", 60.0), (172800, "h", 3600.0)):
        if seconds < limit:
            return f"{seconds / length:.{1 if limit < 10 else 0}f} {unit}"
    return f"{seconds / 86400:,.0f} d"


def moment(when: float) -> str:
    """A time in seconds since 1970 as a date; as a number if it is outside the calendar."""
    try:
        return f"{datetime.fromtimestamp(when, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return f"{when:.15g} s since 1970"


def ratio(full: int, nbytes: int) -> str:
    """How many times the bytes go into all of the model's."""
    return f"1 : {_three(full / max(nbytes, 1))}"
