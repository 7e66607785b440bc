"""How much memory a store takes to send and to fetch a large file, in a process that does nothing else."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

CODE = """
import resource, sys
from pathlib import Path
from weightcast.store import open_store
from weightcast.store.download import fetch, sha256_of
store, source, target = open_store(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
store.put("warm", bytes(1000))
store.get("warm")
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before = peak()
store.put("large", source)
sent = peak()
fetch(store, "large", source.stat().st_size, sha256_of(source), target, parts=4, part_size=8 << 20)
print(sent - before, peak() - sent)
"""


def sent_and_taken(url: str, folder: Path, megabytes: int) -> tuple[int, int]:
    """MiB on top for a `put`, and on top of that for a `fetch`, of so many random megabytes; they must come back."""
    source, target = folder / "source", folder / "target"
    with source.open("wb") as file:
        for _ in range(megabytes // 10):
            file.write(secrets.token_bytes(10_000_000))
    command = [sys.executable, "-c", CODE, url, str(source), str(target)]
    sent, taken = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert subprocess.run(["cmp", source, target]).returncode == 0
    return sent, taken
