"""Compilation is cached, announced, and possible where nothing can be written; every CPU path gives the same bytes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import weightcast as wc
from weightcast.format.kernels import cpu
from weightcast.format.kernels.bitio import MAX_RICE, SLACK, UNARY_LIMIT, get_rice, put_rice, rice_length
from weightcast.format.kernels.compile import expecting_compilation
from weightcast.format.kernels.lanes import deposit

WORK = """
import hashlib, sys, warnings
import numpy as np
import weightcast as wc
{before}
rng = np.random.default_rng(0)
old = wc.round_to("BF16", (rng.standard_normal(300_000) * 0.02).astype(np.float32))
new = old + (rng.random(old.size) < 0.02).astype(np.uint16)
old, new = (wc.Arrays({{"w": bits}}, {{"w": "BF16"}}) for bits in (old, new))
patch = wc.diff(old, new)
for codec in ("gap", "banded"):
    data = wc.encode(patch, codec, old)
    assert wc.decode(data, old) == patch
    print(hashlib.sha256(data).hexdigest())
print(wc.__path__[0], file=sys.stderr)
"""


def work(before: str = "", *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", WORK.format(before=before)]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def expected() -> str:
    done = work("wc.warm_up()", "-W", "error")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def filled_cache(tmp_path_factory: pytest.TempPathFactory, expected: str) -> Path:
    """A cache folder that one process has filled, being told so."""
    folder = tmp_path_factory.mktemp("cache")
    done = work(NUMBA_CACHE_DIR=str(folder))
    assert done.stdout == expected
    assert "CompileWarning: compiling weightcast's kernels inside a call" in done.stderr
    assert done.stderr.count("CompileWarning") == 1
    return folder


def test_second_process_compiles_nothing(filled_cache: Path, expected: str) -> None:
    files = sorted(filled_cache.rglob("*"))
    done = work("", "-W", "error", NUMBA_CACHE_DIR=str(filled_cache))
    assert done.stdout == expected, done.stderr
    assert sorted(filled_cache.rglob("*")) == files


def test_warm_up_without_a_cache_or_special_instructions_is_silent_and_gives_the_same_bytes(
    tmp_path: Path, expected: str
) -> None:
    """Files are where both cache folders would have to be: not even root can write there.

    One test for three promises, because each cold compilation takes most of a minute.
    """
    package = tmp_path / "weightcast"
    shutil.copytree(wc.__path__[0], package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "format" / "kernels" / "__pycache__").write_text("not a folder")
    plain = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    nowhere = {"PYTHONPATH": str(tmp_path), "HOME": os.devnull, "XDG_CACHE_HOME": os.devnull}
    done = work("wc.warm_up([16])", "-B", "-W", "error", **plain, **nowhere)
    assert done.stdout == expected, done.stderr
    assert done.stderr == f"{package}\n"
    assert (package / "format" / "kernels" / "__pycache__").is_file()


# -- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameter", [0, 1, 7, 24, 25, 40, MAX_RICE])
def test_rice_codes_come_back_at_every_bit_offset_6_3(parameter: int) -> None:
    edges = [0, 1, (1 << parameter) - 1, 1 << parameter, (UNARY_LIMIT << parameter) - 1, UNARY_LIMIT << parameter]
    values = [value for value in (*edges, 2**63, 2**64 - 1) if 0 <= value < 2**64]
    values = np.array(8 * values, np.uint64)
    data = np.full(4096, 0xFF, np.uint8)
    at, held, length = 0, np.uint64(0), 0
    with expecting_compilation():
        for value in values:
            length += rice_length(value, parameter, 64)
            at, held = put_rice(data, at, held, value, parameter, 64)
        assert at == length
        assert at // 8 + SLACK < data.size
        read = 0
        for value in values:
            found, read = get_rice(data, read, parameter, 64)
            assert int(found) == int(value)
    assert read == at


def test_deposit_puts_bits_where_the_mask_has_them() -> None:
    from numba import njit

    compiled = njit(lambda bits, mask: deposit(bits, mask))
    rng = np.random.default_rng(0)
    for mask, bits in rng.integers(0, 2**63, (200, 2), np.uint64):
        places = [i for i in range(64) if int(mask) >> i & 1]
        expected = sum((int(bits) >> j & 1) << place for j, place in enumerate(places))
        assert int(compiled(bits, mask)) == expected


@pytest.mark.parametrize("word", ["u1", "u2", "u4", "u8"])
def test_checksum_follows_changes_and_shows_each_of_them(word: str) -> None:
    rng = np.random.default_rng(7)
    old = np.frombuffer(rng.bytes(1000 * int(word[1])), word).copy()
    indices = np.sort(rng.choice(old.size, 100, replace=False))
    new = old.copy()
    new[indices] ^= np.array(1, word)
    change = cpu.checksum_change(indices, old[indices], new[indices])
    whole = sum(int(cpu.checksum(new[first : first + 300], first)) for first in range(0, new.size, 300)) % 2**64
    assert (int(cpu.checksum(old, 0)) + int(change)) % 2**64 == whole
    for i in indices:
        edited = old.copy()
        edited[i] = new[i]
        assert cpu.checksum(edited, 0) != cpu.checksum(old, 0)
