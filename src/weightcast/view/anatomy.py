"""The page of `weightcast analyze`: plots of what it found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightcast.view.page import page

MOST_TENSORS = 500
"""Tensors that the page lists, the most changed; a model may have 20,000."""


def anatomy_page(found: Mapping[str, Any]) -> str:
    """The whole page, for what the verb tells programs."""
    tensors = found["tensors"]
    shown = {**found, "tensors": tensors[:MOST_TENSORS], "tensors_left_out": max(0, len(tensors) - MOST_TENSORS)}
    return page("Anatomy of a delta", scripts=["anatomy.js"], data={"found": shown}).html
