"""The worked example of docs/SPEC.md 6.7: the writer writes those bytes, and the table of bits is those bytes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import simple_reader

import weightcast as wc

_PAGE = (Path(__file__).parents[2] / "docs" / "SPEC.md").read_text(encoding="utf-8")
EXAMPLE = _PAGE.split("### 6.7", 1)[1].split("\n## ", 1)[0]
BLOCK = bytes.fromhex(re.findall(r"```\n([0-9a-f ]+)\n```", EXAMPLE)[0])
ROWS = re.findall(r"^\| `([01]+)` \|(?: `(u|rice)\((\d+)(?:, (\d+))?\)` = (\d+))?", EXAMPLE, re.MULTILINE)


def states() -> tuple[list[int], list[int]]:
    """The old and the new bits, as the example's first paragraph has them."""
    old = [0x3C23 if i % 2 else 0x3F80 for i in range(40)]
    new = [0x3C24 if i % 2 else 0x3F80 for i in range(40)]
    new[5] = new[31] = 0x3C23
    new[3], new[7], new[4] = 0x3C22, 0x3C28, 0x3F81
    return old, new


def test_writer_writes_the_block_of_the_example() -> None:
    old, new = (wc.Arrays({"w": np.array(bits, np.uint16)}, {"w": "BF16"}) for bits in states())
    data = wc.encode(wc.diff(old, new), "banded", old=old)
    _, entries = simple_reader.read_container(data)
    assert entries["weightcast.blocks"].raw == BLOCK


def test_both_readers_read_the_block_of_the_example() -> None:
    old, new = states()
    assert simple_reader.read_block(BLOCK, old, "BF16") == new
    here, there = (wc.Arrays({"w": np.array(bits, np.uint16)}, {"w": "BF16"}) for bits in (old, new))
    wc.decode(wc.encode(wc.diff(here, there), "banded", old=here), old=here).apply(here, wc.fingerprint(here))
    assert here.read("w").tolist() == new


def test_rows_of_the_example_are_the_bits_of_its_bytes() -> None:
    assert len(ROWS) == 21
    assert "".join(bits for bits, *_ in ROWS) == "".join(f"{byte:08b}"[::-1] for byte in BLOCK)


def test_rows_of_the_example_have_the_values_they_state() -> None:
    bits = simple_reader.Bits(BLOCK)
    for written, code, first, second, value in ROWS:
        if code == "rice":
            assert bits.rice(int(first), int(second)) == int(value)
        elif code == "u":
            assert bits.u(int(first)) == int(value)
        else:
            bits.u(len(written))
    bits.close()
