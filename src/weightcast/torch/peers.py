"""The ranks of a process group as one publisher: bytes to rank 0 and back, in the background of the training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from weightcast.errors import PeerError, UsageError

_RESTART = "Restart the training on all ranks: the channel goes on from its last version."


@contextmanager
def _naming(rank: int, known_as: int) -> Iterator[None]:
    """`PeerError` for what gloo says of a rank: dead, or not there within the group's timeout."""
    try:
        yield
    except RuntimeError as error:
        name = f"rank {rank}" if rank == known_as else f"rank {rank} of the group (rank {known_as})"
        why = "did not come in time" if "imed out" in str(error) else "is gone"
        raise PeerError(f"{name} {why}", rank=rank, hint=_RESTART) from error


def _timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """The group's own timeout; torch's default where its backend does not tell."""
    for device in ("cpu", "cuda"):
        with suppress(RuntimeError, AttributeError):
            found = (group or dist.group.WORLD)._get_backend(torch.device(device)).options._timeout  # type: ignore[union-attr]
            if isinstance(found, timedelta):
                return found
    return dist.constants.default_pg_timeout


class GroupPeers:
    """Implements `Peers` with a gloo group of its own, so that no message meets those of the training.

    Rank 0 receives from each rank by itself, so an error says which one is dead or did not come.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        """The ranks of ``group``, or all; each of them must make one at the same time."""
        if not dist.is_available() or not dist.is_initialized():
            raise UsageError(
                "no process group", hint="Call torch.distributed.init_process_group() first, on all ranks."
            )
        self.ranks: list[int] = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.size, self.rank = len(self.ranks), self.ranks.index(dist.get_rank())
        # Rank 0 has waited for a late rank before the others give up, and tells them which one it is.
        timeout = _timeout_of(group) * (2 if self.rank else 1)
        self._group = dist.new_group(self.ranks, backend="gloo", timeout=timeout, use_local_synchronization=True)

    def gather(self, mine: bytes) -> list[bytes] | None:
        if self.rank:
            self._send(mine, 0)
            return None
        found, lost = [mine], None
        for rank in range(1, self.size):
            try:
                found.append(self._receive(rank))
            except PeerError as error:  # the others wait in `_send` until theirs is received
                lost = lost or error
        if lost is not None:
            raise lost
        return found

    def share(self, data: bytes | None, lost: int | None = None) -> bytes:
        if self.rank:
            return self._receive(0)
        assert data is not None
        failed = None
        for rank in range(1, self.size):
            try:
                if rank != lost:
                    self._send(data, rank)
            except PeerError as error:  # the others have a right to the answer
                failed = failed or error
        if failed is not None:
            raise failed
        return data

    def _send(self, data: bytes, rank: int) -> None:
        with _naming(rank, self.ranks[rank]):
            dist.send(torch.tensor([len(data)]), self.ranks[rank], group=self._group)
            dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), self.ranks[rank], group=self._group)

    def _receive(self, rank: int) -> bytes:
        with _naming(rank, self.ranks[rank]):
            length = torch.zeros(1, dtype=torch.int64)
            dist.recv(length, self.ranks[rank], group=self._group)
            data = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(data, self.ranks[rank], group=self._group)
            return data.numpy().tobytes()

    def close(self) -> None:
        """Leave the group. Messages that others wait for do not come any more."""
        with suppress(RuntimeError, ValueError):  # the process group it is part of may be gone already
            dist.destroy_process_group(self._group)
