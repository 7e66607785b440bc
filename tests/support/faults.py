"""Faults, one at a time: a store and a disk that fail, cut, delay or repeat the call one chooses, or die in it.

`FaultyStore` wraps any store, `FaultyDisk` stands between the process and the files below one folder. Both number
every call, so that a clean run tells how many there are to try. `FaultyDisk` also knows what was synced, and can put
the folder into a state that a loss of power may leave behind.
"""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weightcast.channel.keys import HEAD
from weightcast.errors import MissingError, UnreachableError
from weightcast.store.base import Data, Listed, Store

INJECTED: Counter[str] = Counter()
"""Faults injected in this session by the operation they hit; conftest.py prints it."""


class Crash(BaseException):
    """The process ends here: nothing catches it, and nothing that still runs has an effect."""


# -- stores ------------------------------------------------------------------------------------------------------------

READ_FAULTS = ("refuse", "cut", "delay", "twice", "die")
WRITE_FAULTS = ("refuse", "lose", "cut", "delay", "twice", "die", "die-after")


class FaultyStore:
    """A store in which one call, the ``at``-th, meets a ``fault``.

    ``refuse``: it fails and had no effect. ``lose``: it took effect, the answer is lost. ``cut``: half of the bytes or
    of the listing arrives; a write fails midway, which is to say it has no effect. ``delay``: it is given up, and takes
    effect behind the calls that follow. ``twice``: it is made twice, the second answer counts. ``stale``: a listing
    lacks its last keys, and the head hint is an older one. ``die``, ``die-after``: the process ends before it, or
    behind it, and no call of it gets through any more. ``part``, ``part-after``: likewise, but the process lives on.
    """

    def __init__(self, store: Store, fault: str | None = None, at: int = 0, lacking: int = 2):
        self.store = store
        self.fault, self.at, self.lacking = fault, at, lacking
        self.calls: list[str] = []
        self.dead = False
        self.old_head: bytes | None = None
        self._late: list[Callable[[], object]] = []
        self._lock = threading.RLock()

    @property
    def url(self) -> str:
        return self.store.url

    @property
    def hit(self) -> bool:
        return self.fault == "stale" or (self.fault is not None and len(self.calls) >= self.at)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if self.fault == "stale" and key == HEAD:
            self._turn("get", key)
            if self.old_head is None:
                raise MissingError("no such object", url=self.url, key=key)
            return self.old_head
        data: bytes = self._call("get", key, lambda: self.store.get(key, start, length))
        return data

    def put(self, key: str, data: Data) -> None:
        content = data.read_bytes() if isinstance(data, Path) else data  # the file may be gone when it takes effect
        self._call("put", key, lambda: self.store.put(key, content))

    def create(self, key: str, data: Data) -> bool:
        made: bool = self._call("create", key, lambda: self.store.create(key, data))
        return made

    def delete(self, key: str) -> None:
        self._call("delete", key, lambda: self.store.delete(key))

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        found: list[Listed] = self._call("list", prefix, lambda: list(self.store.list(prefix, after)))
        if self.fault == "stale":
            found = found[: max(0, len(found) - self.lacking)]
        for i, listed in enumerate(found):
            if isinstance(listed, _End):
                raise self._unreachable(prefix)
            yield found[i]

    def resolve(self) -> None:
        """What was delayed takes effect now."""
        with self._lock:
            late, self._late = self._late, []
        for effect in late:
            effect()

    def _turn(self, what: str, key: str) -> bool:
        """Count a call; whether it is the one that meets the fault."""
        with self._lock:
            if self.dead and self.fault in ("part", "part-after"):
                raise self._unreachable(key)
            if self.dead:
                raise Crash
            self.calls.append(f"{what} {key}")
            return self.fault is not None and len(self.calls) == self.at

    def _call(self, what: str, key: str, act: Callable[[], Any]) -> Any:
        mine = self._turn(what, key)
        if len(self.calls) > self.at + 1:
            self.settle()
        return self._fail(what, key, act) if mine else act()

    def _fail(self, what: str, key: str, act: Callable[[], Any]) -> Any:
        reads = what in ("get", "list")
        match self.fault:
            case "lose" if not reads:
                act()
            case "twice":
                act()
                return act()
            case "cut" if reads:
                return _half(act())
            case "delay" if reads:
                time.sleep(0.001)
                return act()
            case "delay":
                self._late.append(act)
            case "stale":
                return act()
            case "die" | "die-after" | "part" | "part-after":
                if self.fault.endswith("after"):
                    act()
                self.dead = True
                if self.fault.startswith("die"):
                    raise Crash
        raise self._unreachable(key)

    def _unreachable(self, key: str) -> UnreachableError:
        return UnreachableError(f"injected: {self.fault}", url=self.url, key=key)


class _End(Listed):
    """Where a listing breaks off."""


def _half(answer: bytes | list[Listed]) -> bytes | list[Listed]:
    if isinstance(answer, bytes):
        return answer[: len(answer) // 2]
    return [*answer[: len(answer) // 2], _End("", 0, 0.0)]


def faults_of(calls: list[str]) -> Iterator[tuple[int, str]]:
    """Every (number, fault) that makes sense for the calls of a clean run."""
    for i, call in enumerate(calls, 1):
        for fault in READ_FAULTS if call.startswith(("get ", "list ")) else WRITE_FAULTS:
            yield i, fault


class AgedStore:
    """A store with a clock of its own, so that a test can let time pass."""

    def __init__(self, store: Store, now: float = 1e9):
        self.store, self.now = store, now
        self.times: dict[str, float] = {}

    @property
    def url(self) -> str:
        return self.store.url

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self.store.get(key, start, length)

    def put(self, key: str, data: Data) -> None:
        self.store.put(key, data)
        self.times[key] = self.now

    def create(self, key: str, data: Data) -> bool:
        made = self.store.create(key, data)
        if made:
            self.times[key] = self.now
        return made

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        for listed in self.store.list(prefix, after):
            yield replace(listed, modified=self.times.setdefault(listed.key, self.now))

    def delete(self, key: str) -> None:
        self.store.delete(key)


class Careless(AgedStore):
    """A store that takes create-if-absent for a wish: it overwrites, and says that all is well."""

    def create(self, key: str, data: Data) -> bool:
        self.put(key, data)
        return True


# -- the disk ----------------------------------------------------------------------------------------------------------

DISK_FAULTS = ("eio", "full", "short", "die")
_WRITES = ("write", "pwrite", "copy_file_range", "sendfile")


class FaultyDisk:
    """While entered, operations on files below ``root`` are numbered, and the ``at``-th meets a ``fault``.

    ``eio``: it fails. ``full``: there is no room for it. ``short``: only half of a write is done, and said to be done.
    ``die``: half of a write is done, nothing of any other operation, and nothing at all from then on.

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
