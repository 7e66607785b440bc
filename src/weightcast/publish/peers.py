"""The ranks of a sharded training, who publish together: messages to rank 0 and one answer to all."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from weightcast.errors import ConflictError, PeerError, SpaceError, StoreError, UsageError, WeightcastError

LEADER = 0


class Peers(Protocol):
    """A way for bytes between the ranks. A rank that does not come within the group's timeout is a `PeerError`."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, mine: bytes) -> list[bytes] | None:
        """Send bytes to rank 0, which gets those of all ranks in their order; None elsewhere."""
        ...

    def share(self, data: bytes | None, lost: int | None = None) -> bytes:
        """Get the bytes that rank 0 passes; it does not wait for a rank that is ``lost``."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Message:
    """What a rank says, or what rank 0 answers: a few facts, and at most one array of 64-bit sums."""

    facts: dict[str, Any] = field(default_factory=dict)
    sums: npt.NDArray[np.uint64] | None = None

    def pack(self) -> bytes:
        text = json.dumps(self.facts, separators=(",", ":")).encode()
        return struct.pack("<Q", len(text)) + text + (b"" if self.sums is None else self.sums.astype("<u8").tobytes())

    @classmethod
    def unpack(cls, data: bytes) -> Message:
        (length,) = struct.unpack_from("<Q", data)
        sums = np.frombuffer(data, "<u8", offset=8 + length) if len(data) > 8 + length else None
        return cls(json.loads(data[8 : 8 + length]), sums)


Decide = Callable[[Sequence[Message]], Message]

ENDED, FAILED = "ended", "failed"
"""Facts of a message that is an error: for good, or until the store answers again."""

_SHARED: dict[str, type[UsageError] | type[ConflictError]] = {
    kind.__name__: kind for kind in (UsageError, ConflictError)
}
"""Errors that mean the same on every rank; of others, the others only know whose they are."""


def meet(peers: Peers, mine: Message | Exception, decide: Decide) -> Message:
    """One round of messages: all ranks send theirs, rank 0 decides, all get its answer.

    A rank that fails passes its error in place of a message. Then every rank raises: that one its own, the others a
    `PeerError` that names it, or a `StoreError` where the store failed and another attempt may succeed.
    """
    try:
        data = peers.gather(_as_message(mine).pack())
    except PeerError as error:
        if peers.rank == LEADER:
            with suppress(PeerError):
                peers.share(_gone(error).pack(), lost=error.rank)
        raise
    own: Exception | None = mine if isinstance(mine, Exception) else None
    answer = None
    if data is not None:
        found = [Message.unpack(one) for one in data]
        answer = _first_error(found)
        if answer is None:
            try:
                answer = decide(found)
            except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer
                own, answer = error, _as_message(error)
                answer.facts["rank"] = LEADER
        peers.share(answer.pack())
    else:
        answer = Message.unpack(peers.share(None))
    if ENDED in answer.facts or FAILED in answer.facts:
        raise own or _error_of(answer)
    return answer


def _as_message(mine: Message | Exception) -> Message:
    if isinstance(mine, Message):
        return mine
    kind = FAILED if isinstance(mine, StoreError | SpaceError) else ENDED
    problem = mine.problem if isinstance(mine, WeightcastError) else str(mine)
    url = mine.url if isinstance(mine, StoreError) else ""
    return Message({kind: problem or type(mine).__name__, "kind": type(mine).__name__, "url": url})


def _gone(error: PeerError) -> Message:
    """The answer to a round that a rank did not come to."""
    return Message({ENDED: error.problem, "kind": PeerError.__name__, "rank": error.rank})


def _first_error(messages: Sequence[Message]) -> Message | None:
    """What ends a round: an error for good before one of the store, then the lowest rank's."""
    for kind in (ENDED, FAILED):
        for rank, message in enumerate(messages):
            if kind in message.facts:
                return Message({**message.facts, "rank": rank})
    return None


def _error_of(answer: Message) -> WeightcastError:
    """The error of another rank."""
    rank = answer.facts["rank"]
    if FAILED in answer.facts:
        return StoreError(f"rank {rank}: {answer.facts[FAILED]}", url=answer.facts["url"])
    if answer.facts["kind"] in _SHARED:
        return _SHARED[answer.facts["kind"]](f"rank {rank}: {answer.facts[ENDED]}")
    problem = answer.facts[ENDED]
    if answer.facts["kind"] != PeerError.__name__:
        problem = f"rank {rank} failed: {problem}"
    return PeerError(problem, rank=rank, hint="Restart the training: the channel goes on from its last version.")
