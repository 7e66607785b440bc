"""An engine as its own process reaches it. `control` does the rest; each kind of engine implements this."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from weightcast.engine import protocol
from weightcast.engine.messages import Failed, Request
from weightcast.engine.protocol import ProtocolError, decode_answer
from weightcast.errors import EngineError, FormatError

A = TypeVar("A")


class Host(Protocol):
    """All methods raise `EngineError`, and `EngineGoneError` if the engine is dead."""

    def exchange(self, text: str) -> list[str]:
        """Send an encoded request to every worker; their encoded answers, in the order of ranks."""
        ...

    def is_paused(self) -> bool: ...

    def pause(self) -> None:
        """Stop computing, and keep requests in flight where they are."""
        ...

    def resume(self) -> None: ...

    def clear_caches(self) -> None:
        """Drop what was computed from old weights: prefixes, also of connectors, and encoders' outputs.

        What processors made of pictures may stay: it does not depend on weights.
        It is called while the engine is paused, after the writing and before the first new token.
        """
        ...

    def served(self) -> str:
        """The version that the engine names in its answers."""
        ...

    def name_version(self, version: str) -> None: ...


def other_protocol(found: int, url: str) -> EngineError:
    hint = "Install the same weightcast on the agent's side and on the engine's, and restart both."
    problem = f"the engine's plug-in uses protocol {found}, this agent uses {protocol.PROTOCOL}"
    return EngineError(problem, url=url, hint=hint)


def read_answers(request: Request[A], texts: Iterable[object], url: str) -> list[A]:
    """The workers' answers; `EngineError` if one could not do what it was asked, or answers something else."""
    answers = [_read_answer(request, text, rank, url) for rank, text in enumerate(texts)]
    if not answers:
        raise EngineError("the engine has no workers", url=url)
    return answers


def _read_answer(request: Request[A], text: object, rank: int, url: str) -> A:
    try:
        if not isinstance(text, str):
            raise FormatError("the answer is not text")
        answer = decode_answer(text)
        if not isinstance(answer, (request.answer, Failed)):
            raise FormatError(f"{type(answer).__name__} does not answer {type(request).__name__}")
    except ProtocolError as error:
        raise other_protocol(error.found, url) from error
    except FormatError as error:
        raise EngineError(f"worker {rank} sent a malformed answer: {error.problem}", url=url) from error
    if isinstance(answer, Failed):
        raise EngineError(f"worker {rank}: {answer.problem}", url=url)
    return answer  # type: ignore[return-value]
