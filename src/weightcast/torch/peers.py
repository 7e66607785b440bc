"""The ranks of a process group as one publisher: bytes between them, in the background of the training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from weightcast.errors import PeerError, UsageError

_RESTART = "Restart the training on all ranks: the channel goes on from its last version."


_SOON = timedelta(seconds=1)
"""How long after its connections have ended a rank that gave up may need to say whom it missed."""

_ANSWERS = timedelta(seconds=2)
"""How long the store may need for an answer."""

R = TypeVar("R")

_kept: dict[tuple[int, ...], Any] = {}
"""Groups of some of the ranks, by these."""


def _timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """The group's own timeout; torch's default where its backend does not tell."""
    for device in ("cpu", "cuda"):
        with suppress(RuntimeError, AttributeError):
            found = (group or dist.group.WORLD)._get_backend(torch.device(device)).options._timeout  # type: ignore[union-attr]
            if isinstance(found, timedelta):
                return found
    return dist.constants.default_pg_timeout


@dataclass(frozen=True)
class _Sending:
    """A message on its way; its memory must stay."""

    tensors: tuple[torch.Tensor, ...]
    works: Sequence[Any]
    error: RuntimeError | None = None


class _Verdict:
    """Which rank did not come in time, written into the store through which the process group was made.

    A rank that gives up waiting has lost all of its connections in gloo: the others see only that.
    """

    def __init__(self, group_name: str):
        self._store = dist.distributed_c10d.PrefixStore(
            f"weightcast/{group_name}", dist.distributed_c10d._get_default_store()
        )

    def write(self, rank: int) -> None:
        self._ask(lambda: self._store.set("late", str(rank)), _ANSWERS)

    def read(self) -> int | None:
        """The rank, if one is written now or within a moment."""
        found = self._ask(lambda: self._store.wait(["late"], _SOON) or self._store.get("late"), 2 * _SOON + _ANSWERS)
        return None if found is None else int(found)

    @staticmethod
    def _ask(call: Callable[[], Any], patience: timedelta) -> Any:
        """What the store says; None where it does not, such as when its process is the one that is late."""
        found: list[Any] = []

        def ask() -> None:
            with suppress(RuntimeError):
                found.append(call())

        asking = threading.Thread(target=ask, name="weightcast-verdict", daemon=True)
        asking.start()
        asking.join(patience.total_seconds())
        return found[0] if found else None


class GroupPeers:
    """Implements `Peers` with a gloo group of its own, so that no message meets those of the training.

    Every message is between two ranks, so an error says which one is dead or did not come.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        """The ranks of ``group``, or all; each of them must make one at the same time."""
        if not dist.is_available() or not dist.is_initialized():
            raise UsageError(
                "no process group", hint="Call torch.distributed.init_process_group() first, on all ranks."
            )
        self.ranks: list[int] = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.size, self.rank = len(self.ranks), self.ranks.index(dist.get_rank())
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._timeout = _timeout_of(group)
        # A group that not all ranks make is named by its ranks alone: a second one of that name could meet the first's
        # addresses. Such a group is kept for the next publisher.
        self._is_kept = self.size < dist.get_world_size()
        key = tuple(self.ranks)
        self._group = _kept.get(key) or dist.new_group(
            self.ranks, backend="gloo", timeout=2 * self._timeout, use_local_synchronization=self._is_kept
        )
        if self._is_kept:
            _kept[key] = self._group
        self._verdict = _Verdict(self._group.group_name)
        self._late: PeerError | None = None
        """What ended all connections."""
        self._gone: dict[int, PeerError] = {}

    def gather(self, mine: bytes) -> list[bytes] | None:
        if self.rank:
            self._finish(self._sending(mine, 0), 0, 2)
            return None
        return [mine, *self._each(self._receive)]

    def share(self, data: bytes | None) -> bytes:
        if self.rank:
            return self._receive(0, 2)  # rank 0 may have waited for a late one
        assert data is not None
        self._each(lambda rank: self._finish(self._sending(data, rank), rank))
        return data

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        begun = {rank: self._sending(parts[rank], rank) for rank in self._others}
        found = self._each(self._receive)
        self._each(lambda rank: self._finish(begun[rank], rank))
        found.insert(self.rank, parts[self.rank])
        return found

    def _each(self, act: Callable[[int], R]) -> list[R]:
        """Do something with each other rank, and raise for the first that is lost after all of them."""
        found, lost = [], None
        for rank in self._others:
            try:
                found.append(act(rank))
            except PeerError as error:
                lost = lost or error
        if lost is not None:
            raise lost
        return found

    def _sending(self, data: bytes, rank: int) -> _Sending:
        """Begin to send: first how much it is. What fails at once is for `_finish` to raise."""
        tensors = torch.tensor([len(data)]), torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
        try:
            works = [dist.isend(tensor, self.ranks[rank], group=self._group) for tensor in tensors]
        except RuntimeError as error:
            return _Sending(tensors, (), error)
        return _Sending(tensors, works)

    def _finish(self, sending: _Sending, rank: int, waits: int = 1) -> None:
        with self._naming(rank):
            if sending.error is not None:
                raise sending.error
            for work in sending.works:
                work.wait(self._timeout * waits)

    def _receive(self, rank: int, waits: int = 1) -> bytes:
        with self._naming(rank):
            length = torch.zeros(1, dtype=torch.int64)
            self._receive_into(length, rank, waits)
            data = torch.empty(max(1, int(length)), dtype=torch.uint8)
            self._receive_into(data, rank, waits)
            return data.numpy().tobytes()[: int(length)]

    def _receive_into(self, tensor: torch.Tensor, rank: int, waits: int) -> None:
        work = dist.irecv(tensor, self.ranks[rank], group=self._group)
        assert work is not None
        work.wait(self._timeout * waits)

    @contextmanager
    def _naming(self, rank: int) -> Iterator[None]:
        """`PeerError` for what gloo says of a rank: dead, or not there within the group's timeout."""
        if (known := self._late or self._gone.get(rank)) is not None:
            raise known
        try:
            yield
        except RuntimeError as error:
            if "imed out" in str(error):
                self._verdict.write(rank)
                self._late = self._lost(rank, "did not come in time")
            elif (late := self._verdict.read()) is not None:
                self._late = self._lost(late, "did not come in time")
            else:
                self._gone[rank] = self._lost(rank, "is gone")
            raise (self._late or self._gone[rank]) from error

    def _lost(self, rank: int, why: str) -> PeerError:
        known_as = self.ranks[rank]
        name = f"rank {rank}" if rank == known_as else f"rank {rank} of the group (rank {known_as})"
        return PeerError(f"{name} {why}", rank=rank, hint=_RESTART)

    def close(self) -> None:
        """Leave the group. Messages that others wait for do not come any more."""
        if self._is_kept:
            return
        with suppress(RuntimeError, ValueError):  # the process group it is part of may be gone already
            dist.destroy_process_group(self._group)
