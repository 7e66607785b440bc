"""JSON from outside, checked before anything is done with it."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from weightcast.errors import FormatError


def parse_json(data: bytes, what: str) -> Any:
    """JSON from outside, which holds only what can be worked with; `FormatError` for anything else.

    UTF-8, no key twice, no half characters, finite numbers, no depth that exhausts the stack.
    """

    def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise FormatError(f"the {what} has a key twice")
        return found

    try:
        found = json.loads(
            data.decode("utf-8"), object_pairs_hook=checked, parse_float=_finite, parse_constant=_no_number
        )
        if b"\\u" in data:
            # Only an escape can bring half a pair past the decoder. Writing the values out finds it anywhere in them.
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise FormatError(f"the {what} has half a surrogate pair for a character") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the {what} is no JSON: {error}") from None
    return found


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:20]} is no number")
