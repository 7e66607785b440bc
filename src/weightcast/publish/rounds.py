"""Rounds of messages between the ranks of a sharded training: after each, all ranks have the same, or all raise.

    meet     every rank ── message ──▶ rank 0 decides ── answer ──▶ every rank
    add      every rank ── a part of its sums ──▶ the part's rank adds ── the total's part ──▶ every rank

What is large goes in parts, so that no rank sends or receives more than about twice as much, however many ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from weightcast.errors import ConflictError, PeerError, SpaceError, StoreError, UsageError, WeightcastError
from weightcast.publish.peers import Message, Peers, Sums

LEADER = 0

Decide = Callable[[Sequence[Message]], Message]

ENDED, FAILED = "ended", "failed"
"""Facts of a message that is an error: for good, or until the store answers again."""

DIRECT = 1 << 16
"""Bytes that rank 0 sends to all ranks by itself, at most; a larger answer goes in parts."""

_WHOLE, _IN_PARTS, _LOST = b"\0", b"\1", b"\2"
"""How bytes begin that are an answer, a notice that the answer comes in parts, or an error in place of a part."""

_SHARED: dict[str, type[UsageError] | type[ConflictError]] = {
    kind.__name__: kind for kind in (UsageError, ConflictError)
}
"""Errors that mean the same on every rank; of others, the others only know whose they are."""


class Rounds:
    """What all ranks do together, one after the other. A rank that fails in between joins the next round with that."""

    def __init__(self, peers: Peers):
        self._peers = peers
        self.rank, self.size = peers.rank, peers.size
        self._raised: Exception | None = None
        """What the last round has raised: all ranks know of it."""

    def meet(self, mine: Message | Exception, decide: Decide = lambda _: Message()) -> Message:
        """One round of messages: all ranks send theirs, rank 0 decides, all get its answer.

        A rank that fails passes its error in place of a message. Then every rank raises: that one its own, the others a
        `PeerError` that names it, or a `StoreError` where the store failed and another attempt may succeed.
        """
        try:
            return self._meet(mine, decide)
        except Exception as error:
            self._raised = error
            raise

    def _meet(self, mine: Message | Exception, decide: Decide) -> Message:
        own = mine if isinstance(mine, Exception) else None
        try:
            data = self._peers.gather(_as_message(mine).pack())
        except PeerError as error:
            if self.rank == LEADER:
                self._share(_as_message(error).pack())
            raise
        if data is None:
            answer = Message.unpack(self._shared())
        else:
            found = [Message.unpack(one) for one in data]
            try:
                answer = _first_error(found) or decide(found)
            except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer
                own, answer = error, _as_message(error)
                answer.facts.setdefault("rank", LEADER)
            self._share(answer.pack())
        if ENDED in answer.facts or FAILED in answer.facts:
            raise own or _error_of(answer)
        return answer

    def _share(self, answer: bytes) -> None:
        """Rank 0 passes its answer. A rank that is lost now is for the next round to name: this one is decided."""
        if len(answer) * (self.size - 1) <= DIRECT:
            with suppress(PeerError):
                self._peers.share(_WHOLE + answer)
            return
        with suppress(PeerError):
            self._peers.share(_IN_PARTS)
        cut = -(-len(answer) // self.size)
        self._in_parts([answer[i * cut : (i + 1) * cut] for i in range(self.size)], lambda found: found[LEADER])

    def _shared(self) -> bytes:
        answer = self._peers.share(None)
        if answer[:1] == _IN_PARTS:
            return self._in_parts([b""] * self.size, lambda found: found[LEADER])
        return answer[1:]

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        """`Peers.exchange`. It comes right after a round, so that no rank is late, and the next is a round.

        Where it raises, the others may not know: pass the error to that round.
        """
        return self._peers.exchange(parts)

    def add(self, sums: Sums) -> Sums:
        """The sums of all ranks, modulo 2**64, on every rank. It comes right after a round, and the next is a round.

        Where a rank is lost, those that notice raise, and pass it to the round in which the others are by then.
        """
        parts = [part.astype("<u8").tobytes() for part in np.array_split(sums, self.size)]
        try:
            return np.frombuffer(self._in_parts(parts, _added), "<u8")
        except PeerError as error:
            self._raised = error
            raise

    def _in_parts(self, parts: Sequence[bytes], join: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """Every rank joins the parts that it is sent, and passes that to all; returns all of it, in order of ranks."""
        lost: PeerError | None = None
        try:
            made = _WHOLE + join(self._peers.exchange(parts))
        except PeerError as error:  # the others wait for what comes of the parts
            lost, made = error, _LOST + _as_message(error).pack()
        found: list[bytes] = []
        try:
            found = self._peers.exchange([made] * self.size)
        except PeerError as error:
            lost = lost or error
        for one in found:
            if one[:1] == _LOST and lost is None:
                told = Message.unpack(one[1:])
                lost = PeerError(told.facts[ENDED], rank=told.facts["rank"], hint=_RESTART)
        if lost is not None:
            self._meet(lost, lambda _: Message())
        return b"".join(one[1:] for one in found)

    def tell(self, error: BaseException | None, *, for_good: bool = False) -> None:
        """Join the round in which the other ranks wait with an error, unless they know it.

        ``for_good``: for the others it is the end, also where a store has failed.
        """
        if isinstance(error, Exception) and not isinstance(error, PeerError) and error is not self._raised:
            with suppress(Exception):  # it raises the error itself, or that others are lost; the caller has the first
                self.meet(RuntimeError(str(error)) if for_good else error)

    def close(self) -> None:
        self._peers.close()


_RESTART = "Restart the training: the channel goes on from its last version."


def _added(parts: Sequence[bytes]) -> bytes:
    total = np.zeros(len(parts[0]) // 8, np.uint64)
    for part in parts:
        total += np.frombuffer(part, "<u8")
    return total.astype("<u8").tobytes()


def _as_message(mine: Message | Exception) -> Message:
    if isinstance(mine, Message):
        return mine
    kind = FAILED if isinstance(mine, StoreError | SpaceError) else ENDED
    problem = mine.problem if isinstance(mine, WeightcastError) else str(mine)
    facts = {kind: problem or type(mine).__name__, "kind": type(mine).__name__}
    if isinstance(mine, StoreError):
        facts["url"] = mine.url
    return Message(facts | ({"rank": mine.rank} if isinstance(mine, PeerError) else {}))


def _first_error(messages: Sequence[Message]) -> Message | None:
    """What ends a round: an error for good before one of the store, then the lowest rank's."""
    for kind in (ENDED, FAILED):
        for rank, message in enumerate(messages):
            if kind in message.facts:
                return Message({"rank": rank, **message.facts})
    return None


def _error_of(answer: Message) -> WeightcastError:
    """The error of another rank."""
    rank = answer.facts["rank"]
    if FAILED in answer.facts:
        return StoreError(f"rank {rank}: {answer.facts[FAILED]}", url=answer.facts.get("url", ""))
    if answer.facts["kind"] in _SHARED:
        return _SHARED[answer.facts["kind"]](f"rank {rank}: {answer.facts[ENDED]}")
    problem = answer.facts[ENDED]
    if answer.facts["kind"] != PeerError.__name__:
        problem = f"rank {rank} failed: {problem}"
    return PeerError(problem, rank=rank, hint=_RESTART)
