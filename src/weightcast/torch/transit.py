"""Tensors in transit from a device: copied on a stream of their own, so that training continues meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import numpy as np
import torch

from weightcast.torch.batch import Copied, Sums


class Transit:
    """Tensors in transit to pinned memory. The device's memory is reused once they have arrived."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._event: torch.cuda.Event | None = None
        if tensors[0].device.type != "cuda":
            self._there = [tensor.cpu() for tensor in tensors]
            return
        self._there = _room(tensors)
        self._event = _copy_beside(tensors, self._there)

    def arrays(self) -> list[np.ndarray]:
        """Wait for them to arrive."""
        if self._event is not None:
            self._event.synchronize()
        return [tensor.numpy() for tensor in self._there]


def _room(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Pinned memory for all of them in one allocation, since each allocation is slow."""
    sizes = [-(-tensor.nbytes // 16) * 16 for tensor in tensors]
    whole = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    pieces = zip(whole.split(sizes), tensors, strict=True)
    return [piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for piece, tensor in pieces]


def _copy_beside(tensors: Sequence[torch.Tensor], there: Sequence[torch.Tensor]) -> torch.cuda.Event:
    """Copy to the host on a stream of its own, after the work that is queued now; the event says when it is done."""
    device = tensors[0].device
    stream = _stream(device.index if device.index is not None else torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for room, tensor in zip(there, tensors, strict=True):
            room.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)
        event = torch.cuda.Event()
        event.record(stream)
    return event


@cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def beside(device: torch.device) -> AbstractContextManager[object]:
    """Work in a `with` is queued beside what trains, and before it: it is short, and a follower waits for it.

    It waits for nothing on the device: whoever queues it knows that its input is there.
    """
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(_urgent_stream(device.index if device.index is not None else torch.cuda.current_device()))


@cache
def _urgent_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def sums_in_transit(sums: torch.Tensor) -> Sums:
    """Send 64-bit sums to the host; the result waits for them."""
    transit = Transit([sums])
    return lambda: transit.arrays()[0].view(np.uint64)


class PinnedCopy:
    """A copy of a batch's bits that stays in pinned memory, and is sent to the device for a scan."""

    def __init__(self, copied: Copied):
        chunks = [torch.empty(chunk.shape, dtype=chunk.dtype, pin_memory=True) for chunk in copied.chunks]
        self._kept = Copied(copied.batch, chunks)
        self.store(copied)

    def store(self, copied: Copied) -> None:
        """Store the updated bits, while the device continues."""
        self._stored = _copy_beside(copied.chunks, self._kept.chunks)

    def load(self) -> Copied:
        """The copy on the device, for one scan."""
        batch = self._kept.batch
        torch.cuda.current_stream(batch.device).wait_event(self._stored)
        return Copied(batch, [chunk.to(batch.device, non_blocking=True) for chunk in self._kept.chunks])

    def tensor(self, i: int) -> torch.Tensor:
        """The wire bits of one tensor, on the host."""
        self._stored.synchronize()
        return self._kept.tensor(i)
