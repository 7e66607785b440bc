"""JSON from outside: whatever it holds, a reader gets values it can work with, or a FormatError."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.errors import FormatError
from weightcast.format.json import parse_json
from weightcast.format.safetensors import FileSource, open_container
from weightcast.store import open_store

HALF = r'"\ud800"'


@pytest.mark.parametrize(
    "text",
    [
        HALF,
        f"[{HALF}]",
        f'{{"a": [["w", {HALF}]]}}',
        f'{{{HALF}: "a key"}}',
        r'["\udc00\ud800"]',
        r'["\uDBFF"]',
        r'{"a": "\ud83d x \ude00"}',
    ],
)
def test_half_a_surrogate_pair_is_refused_anywhere(text: str) -> None:
    with pytest.raises(FormatError, match="half a surrogate pair"):
        parse_json(text.encode(), "record")


def test_whole_pair_and_escaped_text_are_read() -> None:
    assert parse_json(rb'["\ud83d\ude00", "\u001b", "\\ud800", "\u00e9"]', "record") == ["😀", "\x1b", "\\ud800", "é"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "-" + "9" * 5000])
def test_number_that_cannot_be_held_is_refused(number: str) -> None:
    with pytest.raises(FormatError, match="the record is not JSON"):
        parse_json(f'{{"a": [1, {number}]}}'.encode(), "record")


def nested(opened: bytes, depth: int) -> bytes:
    closed = b"".join({b"[": b"]", b"{": b"}"}[bytes([byte])] for byte in reversed(opened) if byte in b"[{")
    return opened * depth + b"1" + closed * depth


@pytest.mark.parametrize("opened", [b"[", b'{"a":', b'[{"a":', rb'["\ud83d\ude00",'])
def test_depth_that_exhausts_the_stack_is_refused(opened: bytes) -> None:
    with pytest.raises(FormatError, match="the record is not JSON"):
        parse_json(nested(opened, 100_000), "record")
    parse_json(nested(opened, 50), "record")
    with suppress(FormatError):  # near the limit either answer will do, but no other error
        for depth in range(300, 1000, 20):
            parse_json(nested(opened, depth), "record")


def test_half_a_surrogate_in_a_channel_record_is_a_format_error(tmp_path: Path) -> None:
    wc.init(tmp_path / "channel", wc.Arrays({"w": np.zeros(8, np.float32)}))
    record = tmp_path / "channel" / "channel.json"
    fields = json.loads(record.read_text())
    fields["tensors"][0][0] = "\ud800"
    record.write_text(json.dumps(fields))
    with pytest.raises(FormatError, match="half a surrogate pair"):
        Chain.open(open_store(tmp_path / "channel"))


@pytest.mark.parametrize("content", [b'{"model_type": "llama"}', b"PK\x03\x04" + bytes(100), b"weightcast" * 20])
def test_file_of_another_kind_is_named_as_not_safetensors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with FileSource(tmp_path / "config.json") as source, pytest.raises(FormatError) as caught:
        open_container(source)
    assert "not a safetensors file" in str(caught.value)
    assert not any(character.isdigit() for character in caught.value.problem)
    assert caught.value.hint
