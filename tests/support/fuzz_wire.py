"""Hostile patches, as many as there is time for: `python tests/support/fuzz_wire.py --seconds 60 --seed 1`.

Each is an honest patch with a few lies in it. Reading it must end in a `WeightcastError` or in exactly the right
weights. Patches are read in a child process, under a memory limit: if it dies or hangs, that is a finding too, and the
next child goes on behind it. Which patch has which number depends on the seed alone, so a finding is two numbers; the
patch itself is kept in a file as well.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from cases import same_bits
from fuzz_models import Model, models
from surgery import BLOCKS, DIGESTS, TABLE, Parts, Stream, Table, opened, sealed, varint

from weightcast import advance, decode, warm_up
from weightcast.errors import WeightcastError

HEADROOM = 768 << 20
"""Address space for reading one patch; the largest model here has 2 MB, the largest patch less."""
PATIENCE = 30.0
"""Seconds after which a patch hangs."""
ENOUGH = 10
"""Findings after which there is no point in going on."""

KINDS = ("accepted", "FormatError", "VersionError", "BaseError", "ResultError", "UsageError", "CheckpointError")

# -- lies: in the parts of a patch, in its header, in its bytes --------------------------------------------------------

NATURALS = (0, 1, 2, 3, 7, 8, 9, 16, 17, 63, 64, 65, 127, 128, 255, 256, 1 << 18, (1 << 18) + 1, 1 << 26, 1 << 31)
NATURALS += ((1 << 32) - 1, 1 << 32, 1 << 47, 1 << 48, (1 << 48) + 1, 1 << 61, 1 << 62, (1 << 63) - 1)
VALUES: tuple[Any, ...] = (
    *NATURALS,
    -1,
    0.5,
    float("nan"),
    1 << 64,
    None,
    True,
    "",
    "U8",
    "gap",
    "\ud800",
    [],
    {},
    [[]],
)


@dataclass
class Draft:
    """A patch in parts, its table too until it becomes an entry like the others."""

    parts: Parts
    table: Table | None

    def settle(self) -> None:
        """From here on the table is an entry."""
        if self.table is not None:
            put_table(self.parts, self.table.raw())
            self.table = None

    def joined(self) -> bytes:
        self.settle()
        return self.parts.joined()


def put_table(parts: Parts, raw: bytes) -> None:
    """Past zlib and past the stated size."""
    packed = zlib.compress(raw, 1)
    parts.entries[TABLE] = Stream("U8", [len(packed)], packed)
    parts.meta["table"] = len(raw)


def another_natural(rng: random.Random, value: int) -> int:
    near = (value + 1, abs(value - 1), value ^ 1 << rng.randrange(20), rng.randrange(2 * abs(value) + 2))
    return rng.choice(near) if rng.random() < 0.6 else rng.choice(NATURALS)


def lie_in_metadata(rng: random.Random, draft: Draft) -> None:
    draft.settle()  # or the stated size of the table would be set right again
    meta = draft.parts.meta
    meta[rng.choice(list(meta))] = rng.choice(VALUES) if rng.random() < 0.8 else rng.choice(list(meta.values()))


def lie_in_a_column(rng: random.Random, draft: Draft) -> None:
    if draft.table is None:
        return
    column = rng.choice([one.name for one in fields(Table)[1:]])
    cells = getattr(draft.table, column)
    change = rng.random()
    if cells and change < 0.8:
        i = rng.randrange(len(cells))
        cells[i] = another_natural(rng, cells[i])
    elif cells and change < 0.9:
        del cells[rng.randrange(len(cells))]
    else:
        cells.insert(rng.randrange(len(cells) + 1), rng.choice(NATURALS))


def lie_in_a_name(rng: random.Random, draft: Draft) -> None:
    if draft.table is None:
        return
    i = rng.randrange(len(draft.table.names))
    shared, rest = draft.table.names[i]
    if rng.random() < 0.5:
        draft.table.names[i] = (another_natural(rng, shared), rest)
    else:
        draft.table.names[i] = (shared, lie_in_bytes(rng, rest))


def lie_in_raw_table(rng: random.Random, draft: Draft) -> None:
    """Bytes of the table, zlib and size being right; sometimes very many of them."""
    if draft.table is None:
        return
    raw = lie_in_bytes(rng, draft.table.raw())
    if rng.random() < 0.05:
        raw += bytes([rng.choice([0, 1, 127, 128, 255])]) * rng.choice([1000, 1 << 20])
    put_table(draft.parts, raw)
    draft.table = None


def lie_in_rows(rng: random.Random, draft: Draft) -> None:
    """More or fewer digests than rows."""
    if DIGESTS not in draft.parts.entries:
        return
    data = draft.parts.entries[DIGESTS].data
    data = rng.choice([data[:-8], data + data[-8:], data[:8] * rng.choice([0, 2, 5, 1000])])
    draft.parts.entries[DIGESTS] = Stream("U64", [len(data) // 8], data)


def lie_in_a_block(rng: random.Random, draft: Draft) -> None:
    """Other bytes in one block, of another length perhaps, while table and header speak the truth of it."""
    if draft.table is None or not draft.table.lengths or BLOCKS not in draft.parts.entries:
        return
    i = rng.randrange(len(draft.table.lengths))
    begin = sum(draft.table.lengths[:i])
    data = draft.parts.entries[BLOCKS].data
    end = begin + draft.table.lengths[i]
    block = lie_in_bytes(rng, data[begin:end]) if rng.random() < 0.9 else rng.randbytes(rng.randrange(1, 400))
    if rng.random() < 0.1:
        block = bytes([rng.randrange(18)]) + block[1:]
    data = data[:begin] + block + data[end:]
    draft.table.lengths[i] = len(block)
    draft.parts.entries[BLOCKS] = Stream("U8", [len(data)], data)


def lie_in_a_stream(rng: random.Random, draft: Draft) -> None:
    """Other bytes, dtype or shape of an entry, or none; everything else moves to its right place."""
    name = rng.choice([*draft.parts.entries, TABLE])
    if name == TABLE:
        draft.settle()
    if name not in draft.parts.entries:
        return
    dtype, shape, data = draft.parts.entries[name]
    change = rng.random()
    if change < 0.1:
        del draft.parts.entries[name]
    elif change < 0.2:
        draft.parts.entries[name] = Stream(rng.choice(["U8", "I8", "I32", "I64", "F64"]), shape, data)
    elif change < 0.3:
        draft.parts.entries[rng.choice(["x", "w.values", "w.indices", BLOCKS, ""])] = Stream(dtype, shape, data)
    elif data:
        other = bytearray(data)
        for _ in range(rng.choice([1, 1, 4])):
            other[rng.randrange(len(data))] = rng.randrange(256)
        draft.parts.entries[name] = Stream(dtype, shape, bytes(other))


def lie_in_indices(rng: random.Random, draft: Draft) -> None:
    words = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}
    entries = {name: entry for name, entry in draft.parts.entries.items() if name.endswith(".indices")}
    names = [name for name, (dtype, _, data) in entries.items() if dtype in words and len(data) % 8 == 0 and data]
    if not names:
        return
    name = rng.choice(names)
    dtype, shape, data = entries[name]
    indices = np.frombuffer(data, words[dtype]).astype(np.int64)
    i = rng.randrange(indices.size)
    if rng.random() < 0.2:
        pair = [rng.choice(NATURALS), -rng.choice(NATURALS) - 1]  # a step up from each to the next, modulo 2**64
        indices[i : i + 2] = pair[: indices[i : i + 2].size]
    else:
        indices[i] = rng.choice([-1, ~indices[i], indices[i] ^ 1, indices[i - 1], *NATURALS])
    draft.parts.entries[name] = Stream(dtype, shape, indices.astype(words[dtype]).tobytes())


def lie_in_header(rng: random.Random, patch: bytes) -> bytes:
    """Another value, field or entry somewhere in the JSON, and the data as they were."""
    header, data = opened(patch)
    at: Any = header
    for _ in range(rng.randrange(1, 4)):
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        inner = [key for key in keys if isinstance(at[key], dict | list)]
        if not inner:
            break
        at = at[rng.choice(inner)]
    keys = list(at) if isinstance(at, dict) else list(range(len(at)))
    change = rng.random()
    if keys and change < 0.6:
        key = rng.choice(keys)
        near = isinstance(at[key], int) and rng.random() < 0.5
        at[key] = another_natural(rng, at[key]) if near else rng.choice(VALUES)
    elif keys and change < 0.8:
        del at[rng.choice(keys)]
    elif isinstance(at, dict):
        at[rng.choice(["x", "dtype", "__metadata__", "weightcast"])] = rng.choice(VALUES)
    else:
        at.append(rng.choice(VALUES))
    return sealed(header, data)


def lie_in_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flip, set, cut, repeat, drop or insert some."""
    if not data:
        return rng.randbytes(rng.randrange(4))
    out = bytearray(data)
    at, span = rng.randrange(len(out)), rng.choice([1, 1, 2, 4, 8, 30])
    match rng.randrange(8):
        case 0 | 1:
            for _ in range(rng.choice([1, 1, 2, 6])):
                out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
        case 2:
            out[at] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        case 3:
            out[at : at + 8] = varint(rng.choice(NATURALS))[: len(out) - at]
        case 4:
            del out[at:]
        case 5:
            del out[at : at + span]
        case 6:
            out[at:at] = out[at : at + span]
        case 7:
            out[at:at] = rng.randbytes(span)
    return bytes(out)


def splice(rng: random.Random, patch: bytes, other: bytes) -> bytes:
    """The beginning of one patch, the end of another."""
    return patch[: rng.randrange(len(patch) + 1)] + other[rng.randrange(len(other) + 1) :]


IN_PARTS: tuple[Callable[[random.Random, Draft], None], ...] = (
    lie_in_metadata,
    lie_in_a_column,
    lie_in_a_column,
    lie_in_a_name,
    lie_in_raw_table,
    lie_in_rows,
    lie_in_a_block,
    lie_in_a_block,
    lie_in_a_block,
    lie_in_a_stream,
    lie_in_indices,
    lie_in_indices,
)


def hostile(seed: int, number: int) -> tuple[Model, bytes]:
    """Patch ``number`` of a seed, and the model it is aimed at."""
    rng = random.Random(f"{seed} {number}")
    model = rng.choices(models(), [6, 4, 4, 1])[0]
    patch = rng.choice(model.patches)
    how = rng.random()
    if how < 0.7:
        draft = Draft(Parts.of(patch), Table.of(patch))
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            rng.choice(IN_PARTS)(rng, draft)
        patch = draft.joined()
    elif how < 0.85:
        for _ in range(rng.choice([1, 1, 2])):
            patch = lie_in_header(rng, patch)
    elif how < 0.9:
        patch = splice(rng, patch, rng.choice(model.patches))
    if how >= 0.9 or rng.random() < 0.05:
        patch = lie_in_bytes(rng, patch)
    return model, patch


# -- reading them ------------------------------------------------------------------------------------------------------


def outcome(model: Model, patch: bytes) -> str:
    """One of `KINDS`; anything that must not happen is raised."""
    try:
        read = decode(patch, model.old)
        reached = advance(model.fingerprint, read)
    except WeightcastError as error:
        return type(error).__name__ if str(error) else "an error without a text"
    weights = model.old.copy()
    for tensor in read.tensors:
        tensor.scatter(weights.read(tensor.spec.name))
    assert reached.digest == model.reached, "accepted, and leads elsewhere"
    assert same_bits(weights, model.new), "accepted, with other bits"
    return "accepted"


def limit_memory() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + HEADROOM, size + HEADROOM))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def progress_in(file: Path) -> np.ndarray:
    """Shared by parent and child: the number of the patch being read, then how often each kind of outcome."""
    return np.memmap(file, np.uint64, "r+", shape=(1 + len(KINDS),))


def child(seconds: float, seed: int, first: int, last: int, progress_file: Path) -> None:
    """Read patches until the last or until the time is over; die of the first that does what must not be."""
    warm_up()
    models()
    progress = progress_in(progress_file)
    limit_memory()
    end, number = time.monotonic() + seconds, first
    while number <= last and time.monotonic() < end:
        progress[0] = number
        progress[1 + KINDS.index(outcome(*hostile(seed, number)))] += 1
        number += 1


# -- watching over the reader ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """A patch that did something else than to be refused or to be right."""

    seed: int
    number: int
    what: str
    file: Path


@dataclass
class Report:
    outcomes: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def patches(self) -> int:
        return sum(self.outcomes.values()) + len(self.findings)


Command = Callable[[float, int, Path], Sequence[str]]
"""How to start a child: (seconds, number of its first patch, progress file)."""


def reader(seed: int, last: int) -> Command:
    def command(seconds: float, first: int, progress: Path) -> list[str]:
        return [sys.executable, __file__, "--child", f"{seconds},{seed},{first},{last},{progress}"]

    return command


def run(
    seconds: float,
    seed: int = 0,
    keep: Path | None = None,
    command: Command | None = None,
    patience: float = PATIENCE,
    last: int = 1 << 60,
) -> Report:
    """Read hostile patches for a while, or until the ``last`` number; findings are kept in ``keep``."""
    keep = keep or Path(tempfile.gettempdir()) / "weightcast-fuzz"
    keep.mkdir(parents=True, exist_ok=True)
    report, first, end = Report(), 0, time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        progress_file = Path(folder) / "progress"
        progress_file.write_bytes(bytes(8 * (1 + len(KINDS))))
        progress = progress_in(progress_file)
        while first <= last and (left := end - time.monotonic()) > 0 and len(report.findings) < ENOUGH:
            started = (command or reader(seed, last))(left, first, progress_file)
            what = watch(started, progress, Path(folder) / "stderr", patience)
            if what is None:
                break
            number = int(progress[0])
            file = keep / f"{seed}-{number}.patch"
            file.write_bytes(hostile(seed, number)[1])
            report.findings.append(Finding(seed, number, what, file))
            first = number + 1
        report.outcomes = dict(zip(KINDS, progress[1:].tolist(), strict=True))
    return report


def watch(command: Sequence[str], progress: np.ndarray, stderr: Path, patience: float) -> str | None:
    """Wait for a child; None if it ended well, else what became of it."""
    with stderr.open("w+") as said, subprocess.Popen(command, stdout=said, stderr=said) as process:
        seen, since = int(progress[0]), time.monotonic()
        while process.poll() is None:
            time.sleep(0.05)
            if int(progress[0]) != seen:
                seen, since = int(progress[0]), time.monotonic()
            elif time.monotonic() - since > patience:
                process.kill()
                process.wait()
                return f"no end after {patience} s"
        if process.returncode == 0:
            return None
        last = (stderr.read_text().strip() or "nothing was said").splitlines()[-1]
        return f"signal {-process.returncode}" if process.returncode < 0 else last


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for patches that were findings")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        seconds, seed, first, last, progress = chosen.child.split(",", 4)
        child(float(seconds), int(seed), int(first), int(last), Path(progress))
        return 0
    report = run(chosen.seconds, chosen.seed, chosen.keep)
    print(f"{report.patches} patches with seed {chosen.seed}: {json.dumps(report.outcomes)}")
    for finding in report.findings:
        print(f"FINDING seed {finding.seed} number {finding.number}: {finding.what}, kept in {finding.file}")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
