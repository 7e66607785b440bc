"""Where a tensor is in a model, by its name: in which layer of which stack, and of which kind. Pure."""

from __future__ import annotations

from collections.abc import Iterable

STEPS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""Densities at which a heat map's next level begins."""

_ORDER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ENDINGS = ("weight", "bias")


def place_of(name: str) -> tuple[str, int, str] | None:
    """(stack, layer, kind) of a tensor, by its name; None for one outside layers.

    >>> place_of("model.layers.12.self_attn.q_proj.weight")
    ('model.layers', 12, 'q_proj')
    """
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isascii() and part.isdigit()), None)
    if at is None:
        return None
    return ".".join(parts[:at]), int(parts[at]), _kind(parts[at + 1 :])


def _kind(parts: list[str]) -> str:
    # Numbers further down are experts': they count together.
    named = [part for part in parts if not part.isdigit() and part not in _ENDINGS]
    kind = named[-1] if named else "weight"
    for ending in _ENDINGS:
        kind = kind.removesuffix(f"_{ending}")
    return "norm" if "norm" in kind or kind.startswith("ln_") else kind


def in_order(kinds: Iterable[str]) -> list[str]:
    """Each kind once, in the order in which a layer has them; norms are last."""
    known = {kind: place for place, kind in enumerate(_ORDER)}
    return sorted(dict.fromkeys(kinds), key=lambda kind: (kind == "norm", known.get(kind, 99)))
