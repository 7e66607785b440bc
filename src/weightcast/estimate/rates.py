"""What a machine needs for each step of a sync: measured, or read from a file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from weightcast.errors import FormatError
from weightcast.format.json import parse_json

CODECS = ("plain", "gap", "banded")
PHASES = ("detect", "resolve", "encode", "decode", "verify", "stage", "apply")
"""Of a sync, those that compute: their names are those of `weightcast.events`."""

FORMAT = 1
MAX_BYTES = 1 << 16
"""Of a file of rates."""


@dataclass(frozen=True)
class Work:
    """Seconds that a phase takes for each element, for each change, and for each tensor."""

    element: float = 0.0
    change: float = 0.0
    tensor: float = 0.0

    def seconds(self, elements: float, changes: float, tensors: float) -> float:
        return self.element * elements + self.change * changes + self.tensor * tensors


@dataclass(frozen=True)
class Rates:
    """Of one process of a trainer, and one of a replica; seconds."""

    hardware: str
    """In words, for people."""
    threads: int
    codecs: Mapping[str, Mapping[str, Work]]
    """By codec and phase."""
    copy: float
    """For each byte of weights that is written over others."""
    digest: float
    """For each element whose bits are digested."""
    sha256: float
    """For each byte."""
    disk: float
    """For each byte that is written and synced."""

    def work(self, codec: str, phase: str) -> Work:
        return self.codecs[codec][phase]


def to_json(rates: Rates) -> dict[str, Any]:
    """As a file holds them."""
    codecs = {
        codec: {phase: list(asdict(work).values()) for phase, work in phases.items()}
        for codec, phases in rates.codecs.items()
    }
    return {"format": FORMAT, **asdict(rates), "codecs": codecs}


def dump(rates: Rates) -> str:
    """The text of a file, one line for each codec's phase."""
    return json.dumps(to_json(rates), indent=1).replace("[\n    ", "[").replace(",\n    ", ", ").replace("\n   ]", "]")


def load(data: bytes) -> Rates:
    """The rates in a file; `FormatError` for anything else."""
    if len(data) > MAX_BYTES:
        raise FormatError(f"a file of rates has at most {MAX_BYTES:,} bytes")
    fields = parse_json(data, "file of rates")
    names = {"format", *Rates.__dataclass_fields__}
    if not isinstance(fields, dict) or fields.get("format") != FORMAT or fields.keys() != names:
        hint = "Let `weightcast estimate 1B --save-rates FILE` write one."
        raise FormatError(f"these are no rates of format {FORMAT}", hint=hint)
    threads, hardware = fields["threads"], fields["hardware"]
    if type(threads) is not int or threads < 1 or not isinstance(hardware, str) or len(hardware) > 200:
        raise FormatError("`threads` must be a number of threads, and `hardware` a line of text")
    codecs = _named(fields["codecs"], CODECS, "codecs")
    works = {
        codec: {phase: _work(value) for phase, value in _named(phases, PHASES, codec).items()}
        for codec, phases in codecs.items()
    }
    simple = {name: _seconds(fields[name]) for name in ("copy", "digest", "sha256", "disk")}
    return Rates(hardware=hardware, threads=threads, codecs=works, **simple)


def _named(value: object, names: tuple[str, ...], what: str) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != set(names):
        raise FormatError(f"`{what}` must have {', '.join(names)}, and nothing else")
    return value


def _work(value: object) -> Work:
    if not isinstance(value, list) or len(value) != 3:
        raise FormatError("a phase must be a list of three numbers: seconds for an element, a change and a tensor")
    return Work(*map(_seconds, value))


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6 or math.isnan(value):
        raise FormatError(f"a rate must be a number of seconds, got {str(value)[:40]!r}")
    return float(value)
