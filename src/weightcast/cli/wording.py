"""Numbers, times and text from outside, as people read them."""


def one_line(text: str) -> str:
    """Text from outside as a line: nothing in it moves the cursor."""
    return "".join(character if character.isprintable() else " " for character in text)


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
    """A time for people; one that lies ahead, by clocks that differ, is none."""
    seconds = max(0.0, seconds)
    for limit, unit, length in ((9.95, "s", 1.0), (120, "s", 1.0), (7200, "min", 60.0), (172800, "h", 3600.0)):
        if seconds < limit:
            return f"{seconds / length:.{1 if limit < 10 else 0}f} {unit}"
    return f"{seconds / 86400:.0f} d"


def ratio(full: int, nbytes: int) -> str:
    """How many times the bytes go into all of the model's."""
    return f"1 : {_three(full / max(nbytes, 1))}"
