"""The parts of tensors that an engine's workers hold, for whoever writes the channel."""

from __future__ import annotations

import re
from collections import Counter

from weightcast.engine.layout import Layout
from weightcast.format.boxes import Range
from weightcast.format.cut import MAX_CUTS, MAX_PARTS, MAX_PATTERN, Cut


def cuts_of(layout: Layout) -> tuple[Cut, ...]:
    """Cuts after which each tensor that a worker holds a part of has a box for just that part.

    Tensors whose names differ in numbers alone, such as those of all layers, are named together. What is not one of
    several equal parts is left out.
    """
    found: Counter[Cut] = Counter()
    for part in layout:
        shape = layout.table[part.name].shape
        for axis, (along, size) in enumerate(zip(part.box.ranges, shape, strict=True)):
            parts, pattern = _parts(along, size), _pattern(part.name)
            if parts > 1 and len(pattern) <= MAX_PATTERN:
                found[Cut(pattern, axis, parts)] += part.box.elements
    return tuple(cut for cut, _ in found.most_common(MAX_CUTS))


def _parts(along: Range, size: int) -> int:
    """Into how many equal parts a dimension is cut if this is one of them; 1 if it is not cut, or otherwise."""
    if along.step != 1 or not 0 < along.count < size or along.start % along.count:
        return 1
    parts = -(-size // along.count)
    return parts if parts <= MAX_PARTS and -(-size // parts) == along.count else 1


def _pattern(name: str) -> str:
    """A name with a star for each number in it."""
    literal = re.sub(r"[*?[]", lambda special: f"[{special[0]}]", name)
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", literal)
