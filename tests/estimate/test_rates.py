"""Files of rates: what is written is read, and what is no file of rates is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weightcast.errors import FormatError
from weightcast.estimate.measure import measure
from weightcast.estimate.rates import CODECS, PHASES, Rates, Work, dump, load

GIVEN = Rates("a machine", 4, {codec: dict.fromkeys(PHASES, Work(1e-9, 2e-9, 3e-6)) for codec in CODECS}, 1, 2, 3, 4)


def test_rates_are_read_as_they_were_written() -> None:
    assert load(dump(GIVEN).encode()) == GIVEN


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"threads": 0},
        {"threads": True},
        {"threads": "4"},
        {"hardware": 7},
        {"hardware": "x" * 201},
        {"copy": -1e-9},
        {"copy": "1"},
        {"copy": True},
        {"copy": 1e300},
        {"more": 1},
        {"codecs": {}},
        {"codecs": []},
        {"codecs": {codec: {phase: [1, 2] for phase in PHASES} for codec in CODECS}},
        {"codecs": {codec: {} for codec in CODECS}},
    ],
    ids=str,
)
def test_what_is_no_file_of_rates_is_refused(change: dict[str, Any]) -> None:
    fields = json.loads(dump(GIVEN)) | change
    with pytest.raises(FormatError):
        load(json.dumps(fields).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"null", b" " * 70_000, b'{"copy": NaN}', b"[" * 60_000])
def test_bytes_that_are_no_rates_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        load(data)


def test_measured_rates_are_those_of_a_machine() -> None:
    """Nothing of their size is decided here but that each is there, and that work takes time."""
    found = measure(threads=1, elements=1 << 20)
    assert load(dump(found).encode()) == found
    assert found.threads == 1
    assert min(found.copy, found.digest, found.sha256, found.disk) > 0
    for codec in CODECS:
        for phase in ("detect", "encode", "decode", "apply"):
            assert found.work(codec, phase).seconds(1e9, 1e7, 100) > 0
