"""Runs operations in processes of their own and kills them with SIGKILL at the operation on files that one names.

As a script it waits for lines of JSON, [operation, folder, number, seconds], and forks a process for each, which dies
at that operation on files or after that time; the answer is [signal or 0, how many operations on files there were]. The
script has no threads, so its children begin in a sane state.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import worlds


class Killer:
    """The other end: asks the script."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process

    def run(self, operation: str, root: Path, at: int = 0, after: float = 0.0) -> tuple[int, int]:
        """Run an operation on the world in ``root``; with ``at`` it is killed there, with ``after`` at that time.

        (signal, operations on files)
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([operation, str(root), at, after]) + "\n")
        self._process.stdin.flush()
        killed, count = json.loads(self._process.stdout.readline())
        return killed, count


@contextmanager
def killer() -> Iterator[Killer]:
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        yield Killer(process)
    finally:
        process.communicate()
        assert process.returncode == 0


def main() -> None:
    from operations import ENDLESS, IMPORT, OPERATIONS

    import weightcast

    weightcast.warm_up()
    by_name = {operation.name: operation for operation in [*OPERATIONS, *ENDLESS, IMPORT]}
    for line in sys.stdin:
        name, root, at, after = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                count = run(by_name[name], Path(root), at)
                os.write(writing, str(count).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        if after:
            time.sleep(after)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        count = int(os.read(reading, 100) or 0)
        os.close(reading)
        if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
            sys.exit(f"{name} in {root} failed")
        print(json.dumps([os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, count]), flush=True)


def run(operation: worlds.Operation, root: Path, at: int) -> int:
    from faulty_disk import DeadlyDisk
    from worlds import World

    world = World.at(root)
    with DeadlyDisk(root, "die" if at else None, at) as disk:
        operation.attempt(world, world.store)
    return len(disk.calls)


if __name__ == "__main__":
    main()
