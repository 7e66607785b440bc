"""A disk on which one operation, by its number, fails, is cut short or is the last one.

`FaultyDisk` stands between the process and the files below one folder. It numbers every operation, so that a clean run
says how many there are to try. It also knows what was synced, and can put the folder into a state that a loss of power
may leave.
"""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults import Crash

DISK_FAULTS = ("eio", "full", "short", "die")
_WRITES = ("write", "pwrite", "copy_file_range", "sendfile")


class FaultyDisk:
    """While entered, operations on files below ``root`` are numbered, and the ``at``-th meets a ``fault``.

    ``eio``: it fails. ``full``: there is no room for it. ``short``: only half of a write is done, and said to be done.
    ``die``: half of a write is done, nothing of any other operation, and nothing at all from then on. ``hold``: its
    thread waits for `let_go` while others go on.

    Nothing is synced for real: what would be durable is kept account of, for `lose_power`.
    """

    def __init__(self, root: Path, fault: str | None = None, at: int = 0):
        self.root = str(root.resolve())
        self.fault, self.at = fault, at
        self.calls: list[str] = []
        self.dead = False
        self.tree = _Node()
        self._pending: list[_Op] = []
        self._real: dict[tuple[object, str], Any] = {}
        self._lock = threading.RLock()
        self.held = threading.Event()
        """Set once the operation is there that is held."""
        self._released = threading.Event()

    def hold(self, at: int) -> None:
        """Hold the ``at``-th operation from now on."""
        with self._lock:
            self.fault, self.at = "hold", len(self.calls) + at

    def let_go(self, fault: str | None = None) -> None:
        """Let the operation that is held go on, or meet a ``fault`` after all."""
        assert self.held.wait(30)
        self.fault = fault
        self._released.set()

    # -- in place of the system's ------------------------------------------------------------------------------------

    def __enter__(self) -> FaultyDisk:
        self.tree = _read_tree(self.root)
        for name in ("fsync", "ftruncate"):
            self._patch(os, name, self._on_file(name))
        for name in _WRITES:
            self._patch(os, name, self._on_write(name))
        for name in ("unlink", "remove", "rmdir", "mkdir"):
            self._patch(os, name, self._on_entry(name))
        for name in ("rename", "replace", "link"):
            self._patch(os, name, self._on_two(name))
        self._patch(os, "open", self._open)
        self._patch(io, "open", self._io_open)
        return self

    def __exit__(self, *_: object) -> None:
        for (owner, name), real in self._real.items():
            setattr(owner, name, real)
        self._real.clear()

    def _patch(self, owner: object, name: str, with_: Callable[..., Any]) -> None:
        self._real[owner, name] = getattr(owner, name)
        setattr(owner, name, with_)

    def _inside(self, path: str) -> bool:
        return path.startswith(self.root + "/") or path == self.root

    def _turn(self, what: str, path: str) -> bool:
        """Count an operation; whether only half of it is to be done."""
        with self._lock:
            if self.dead:
                raise Crash
            self.calls.append(f"{what} {path[len(self.root) + 1 :]}")
            if self.fault is None or len(self.calls) != self.at:
                return False
        if self.fault == "hold":
            self.held.set()
            assert self._released.wait(60)
            if self.fault is None:
                return False
        writes = what in _WRITES
        if self.fault == "die":
            if not writes:
                self._die()
            return True
        if self.fault == "short":
            return writes
        code = errno.EIO if self.fault == "eio" else errno.ENOSPC
        raise OSError(code, os.strerror(code))

    def _die_if_due(self) -> None:
        if self.fault == "die":
            self._die()

    def _die(self) -> None:
        self.dead = True
        raise Crash

    def _on_file(self, name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(fd: int, *rest: Any) -> Any:
            path = _path_of(fd)
            if not self._inside(path):
                return real(fd, *rest)
            self._turn(name, path)
            return self._sync(path, fd) if name == "fsync" else real(fd, *rest)

        return call

    def _on_write(self, name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any) -> Any:
            path = _path_of(args[1] if name == "copy_file_range" else args[0])
            if not self._inside(path):
                return real(*args)
            if not self._turn(name, path):
                return real(*args)
            done = real(*_halved(name, args))
            self._die_if_due()
            return done

        return call

    def _on_entry(self, name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(path: Any, *rest: Any, **options: Any) -> Any:
            full = _absolute(path, options.get("dir_fd"))
            if not self._inside(full):
                return real(path, *rest, **options)
            self._turn(name, full)
            with self._lock:  # else another thread uses a folder before it is accounted for
                done = real(path, *rest, **options)
                self._note(_Op(((full, _Node() if name == "mkdir" else None),)))
            return done

        return call

    def _on_two(self, name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(source: Any, target: Any, **options: Any) -> Any:
            a, b = _absolute(source, options.get("src_dir_fd")), _absolute(target, options.get("dst_dir_fd"))
            if not (self._inside(a) or self._inside(b)):
                return real(source, target, **options)
            self._turn(name, b)
            with self._lock:
                done = real(source, target, **options)
                node = self.tree.find(self._inner(a))
                if node is not None:
                    self._note(_Op(((b, node),) if name == "link" else ((a, None), (b, node))))
            return done

        return call

    def _open(self, path: Any, flags: int, *rest: Any, **options: Any) -> int:
        real = self._real[os, "open"]
        full = _absolute(path, options.get("dir_fd"))
        makes = flags & os.O_CREAT and self._inside(full) and not os.path.lexists(full)
        if makes:
            self._turn("open", full)
        with self._lock:
            fd: int = real(path, flags, *rest, **options)
            if makes:
                self._note(_Op(((full, _Node(content=b"")),)))
        return fd

    def _io_open(self, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **options: Any) -> Any:
        full = "" if isinstance(file, int) else _absolute(file, None)
        if not self._inside(full) or mode.strip("rbt") == "":
            return self._real[io, "open"](file, mode, buffering, *rest, **options)
        if "b" not in mode:
            raise NotImplementedError(f"the disk of these tests knows no text files: {full}")
        opener = options.get("opener")
        if opener is None:
            makes = not os.path.lexists(full)
            if makes:
                self._turn("open", full)
        with self._lock:
            raw = _RawFile(self, file, mode.replace("b", ""), opener)
            if opener is None and makes:
                self._note(_Op(((full, _Node(content=b"")),)))
        return io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)

    # -- what is durable ---------------------------------------------------------------------------------------------

    def _inner(self, path: str) -> list[str]:
        return [part for part in path[len(self.root) :].split("/") if part]

    def _note(self, op: _Op) -> None:
        """An operation on folders, done but not durable."""
        with self._lock:
            for path, node in op.entries:
                *folders, name = self._inner(path)
                parent = self.tree.find(folders)
                assert parent is not None, path
                op.folders.append((parent, name, node))
                parent.live.pop(name, None)
                if node is not None:
                    parent.live[name] = node
            self._pending.append(op)

    def _sync(self, path: str, fd: int) -> None:
        with self._lock:
            node = self.tree.find(self._inner(path))
            if node is None:
                return  # it has no name any more
            if node.content is not None:
                content = self._real[io, "open"](f"/proc/self/fd/{fd}", "rb")
                with content:
                    node.content = content.read()
                node.mtime = os.fstat(fd).st_mtime_ns
                return
            due = _with_what_goes_before(self._pending, node)
            for op in due:
                op.become_durable()
            self._pending = [op for op in self._pending if op not in due]

    def lose_power(self, luck: random.Random | None = None) -> None:
        """Put the folder into what a loss of power may leave: what was synced, and with ``luck`` some of the rest."""
        assert not self._real, "leave the disk first"
        if luck is not None:
            ends = {id(folder): luck.choice((0, 1, 2, 99)) for op in self._pending for folder, _, _ in op.folders}
            seen: Counter[int] = Counter()
            for op in self._pending:
                survives = all(seen[id(folder)] < ends[id(folder)] for folder, _, _ in op.folders)
                for folder, _, _ in op.folders:
                    seen[id(folder)] += 1
                    if not survives:
                        ends[id(folder)] = 0
                if survives:
                    op.become_durable()
        found = {id(node): Path(path).read_bytes() for path, node in self.tree.files(self.root) if Path(path).exists()}
        for path in Path(self.root).iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.tree.write(self.root, lambda node: _survivor(node.content or b"", found.get(id(node)), luck))


class DeadlyDisk(FaultyDisk):
    """One on which ``die`` means just that, whichever thread it happens in."""

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(eq=False)
class _Node:
    """A file with its synced ``content``, or a folder with its entries as they are and as they are durable."""

    content: bytes | None = None
    mtime: int = 0
    live: dict[str, _Node] = field(default_factory=dict)
    durable: dict[str, _Node] = field(default_factory=dict)

    def find(self, parts: list[str]) -> _Node | None:
        node: _Node | None = self
        for part in parts:
            node = node.live.get(part) if node is not None else None
        return node

    def files(self, at: str) -> Iterator[tuple[str, _Node]]:
        for name, node in self.live.items():
            if node.content is None:
                yield from node.files(f"{at}/{name}")
            else:
                yield f"{at}/{name}", node

    def write(self, at: str, content_of: Callable[[_Node], bytes]) -> None:
        for name, node in self.durable.items():
            path = Path(at, name)
            if node.content is None:
                path.mkdir()
                node.write(str(path), content_of)
            else:
                content = content_of(node)
                path.write_bytes(content)
                if content == node.content and node.mtime:
                    os.utime(path, ns=(node.mtime, node.mtime))


@dataclass(eq=False)
class _Op:
    entries: tuple[tuple[str, _Node | None], ...]
    folders: list[tuple[_Node, str, _Node | None]] = field(default_factory=list)

    def become_durable(self) -> None:
        for folder, name, node in self.folders:
            folder.durable.pop(name, None)
            if node is not None:
                folder.durable[name] = node


def _with_what_goes_before(pending: list[_Op], folder: _Node) -> list[_Op]:
    """What a sync of ``folder`` makes durable. A rename is in two folders at once; in each, order is kept."""
    last = {id(folder): len(pending)}
    due: set[int] = set()
    for i in reversed(range(len(pending))):
        involved = [id(node) for node, _, _ in pending[i].folders]
        if any(i < last.get(node, -1) for node in involved):
            due.add(i)
            for node in involved:
                last[node] = max(last.get(node, -1), i)
    return [pending[i] for i in sorted(due)]


def _read_tree(at: str) -> _Node:
    """All that is there counts as durable."""
    node = _Node()
    for entry in os.scandir(at):
        if entry.is_dir(follow_symlinks=False):
            inner = _read_tree(entry.path)
        else:
            inner = _Node(Path(entry.path).read_bytes(), entry.stat().st_mtime_ns)
        node.live[entry.name] = node.durable[entry.name] = inner
    return node


def _survivor(synced: bytes, live: bytes | None, luck: random.Random | None) -> bytes:
    """A file's content after a loss of power: blocks that were not synced are there or not."""
    if luck is None or live is None or live == synced:
        return synced
    size = luck.choice((len(synced), len(live)))
    old, new = (data.ljust(size, b"\0")[:size] for data in (synced, live))
    return b"".join(luck.choice((old, new))[at : at + 64] for at in range(0, size, 64))


class _RawFile(io.FileIO):
    def __init__(self, disk: FaultyDisk, file: Any, mode: str, opener: Any):
        self._disk = disk
        self._path = _absolute(file, None)
        super().__init__(file, mode, opener=opener)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        half = self._disk._turn("write", self._path)
        done = super().write(view[: max(1, len(view) // 2)] if half else view)
        if half:
            self._disk._die_if_due()
        return done


def _halved(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if name in ("write", "pwrite"):
        data = memoryview(args[1]).cast("B")
        return (args[0], data[: max(1, len(data) // 2)], *args[2:])
    at = 2 if name == "copy_file_range" else 3
    return (*args[:at], min(args[at], 100), *args[at + 1 :])


def _path_of(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


def _absolute(path: Any, dir_fd: int | None) -> str:
    text = os.fsdecode(path)
    return str(Path(text).absolute() if dir_fd is None else Path(_path_of(dir_fd), text))
