"""JSON from outside, checked before anything is done with it."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from weightcast.errors import FormatError


def parse_json(data: bytes, what: str) -> Any:
    """Parse JSON from outside; `FormatError` unless it is UTF-8 with unique keys, whole characters and finite numbers.

    Depth that would exhaust the stack is refused, too.
    """

    def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise FormatError(f"the {what} has a duplicate key")
        return found

    try:
        found = json.loads(
            data.decode("utf-8"), object_pairs_hook=checked, parse_float=_finite, parse_constant=_no_number
        )
        if b"\\u" in data:
            # Only an escape can get half a surrogate pair past the decoder. Encoding the values again finds it.
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise FormatError(f"the {what} has half a surrogate pair") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the {what} is not JSON: {error}") from None
    return found


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:20]} is not a finite number")
