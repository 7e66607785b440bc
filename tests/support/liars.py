"""The weights that are lied to, and what must hold whatever the lie is: refused, in bounds, nothing touched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pytest
from cases import Bag, gaussian, moved, random_bits, write_file

from weightcast import Patch, TensorSpec, advance, anchor, decode, diff, encode, fingerprint
from weightcast.disk.apply import apply_in_place
from weightcast.errors import (
    WeightcastError,
)

E = TypeVar("E", bound=WeightcastError)


def tree(folder: Path) -> dict[str, bytes]:
    """All there is in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def sample() -> tuple[Bag, Bag]:
    """Two tensors before and after a step: in one only small weights move, in the other some move far."""
    rng = np.random.default_rng(7)
    a, b = TensorSpec("a", "BF16", (40, 25)), TensorSpec("b", "F32", (300,))
    old = {a: gaussian(rng, 1000), b: random_bits(rng, b)}
    small = old[a] & 0x7FFF < 0x3C00
    new = {a: np.where(small, moved(rng, old[a], 0.2), old[a]), b: moved(rng, old[b], 0.06, furthest=900)}
    return Bag(old), Bag(new)


class World:
    """Weights in memory and, the same, in a file; patches that lead on from them; and a place for lies."""

    def __init__(self, folder: Path):
        self.old, self.new = sample()
        self.changed = int((self.old.read("a") != self.new.read("a")).sum())
        self.fingerprint, self.reached = fingerprint(self.old), fingerprint(self.new)
        self.diff = diff(self.old, self.new, self.fingerprint)
        self.home = folder / "home"
        self.home.mkdir()
        self.target = self.home / "weights.safetensors"
        write_file(self.target, self.old)
        self.file = folder / "lie.patch"

    def patch(self, codec: str = "gap") -> bytes:
        return encode(self.diff, codec, self.old)

    def anchor(self) -> bytes:
        """The new weights as a patch without a base."""
        return encode(anchor(self.new), "plain")

    def read(self, patch: bytes) -> Patch:
        """Decode and prove in memory."""
        read = decode(patch, self.old)
        advance(self.fingerprint, read)
        return read

    def refuses(self, lie: bytes, kind: type[E], says: str) -> E:
        """Both ways to read a patch refuse it with this very error, and the target is as it was."""
        with pytest.raises(kind, match=says) as in_memory:
            self.read(lie)
        assert type(in_memory.value) is kind
        self.file.write_bytes(lie)
        before = tree(self.home)
        with pytest.raises(kind, match=says) as caught:
            apply_in_place(self.file, self.target)
        assert type(caught.value) is kind
        assert tree(self.home) == before
        return caught.value


class Outcome(NamedTuple):
    kind: str
    text: str


HEADROOM = 2 << 30
CHILD = f"""
import json, resource, sys
from pathlib import Path
import weightcast
from weightcast.disk.apply import apply_in_place, resume

weightcast.warm_up()
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + {HEADROOM}, size + {HEADROOM}))
target, *patches = map(Path, sys.argv[1:])
for run in [lambda p=p: apply_in_place(p, target) for p in patches] or [lambda: resume(target)]:
    try:
        kind, text = "accepted", run().digest
    except (weightcast.WeightcastError, MemoryError, LookupError) as error:
        kind, text = type(error).__name__, str(error)
    print(json.dumps([kind, text]), flush=True)
"""


def bounded(target: Path, *patches: Path, seconds: float = 120) -> list[Outcome]:
    """What applying them says, in a process of its own that may neither crash nor take much memory or time.

    Without patches: what resuming says.
    """
    command = [sys.executable, "-c", CHILD, str(target), *map(str, patches)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"the reader died with {done.returncode}: {done.stderr[-2000:]}"
    return [Outcome(*json.loads(line)) for line in done.stdout.splitlines()]


def refused_in_bounds(world: World, lie: bytes) -> Outcome:
    world.file.write_bytes(lie)
    before = tree(world.home)
    (outcome,) = bounded(world.target, world.file)
    assert tree(world.home) == before
    return outcome
