"""What the whole table of a sharded model is: agreed on once by all ranks, and checked for holes and overlaps.

Each tensor is checked by one rank, to which all send their boxes of it: a rank gets about as many boxes as it has, and
none has those of all.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any
from zlib import crc32

import numpy as np

from weightcast.errors import UsageError
from weightcast.format.boxes import Box, place_of
from weightcast.format.spec import TensorSpec, TensorTable
from weightcast.publish.peers import Message
from weightcast.publish.rounds import Rounds

_HINT = "Each element of a tensor belongs to exactly one rank: check names, offsets and shapes on all of them."


def agree_on_table(rounds: Rounds, mine: Sequence[tuple[str, str, Box]], whole: TensorTable | None) -> TensorTable:
    """The table of all ranks' boxes together; one `UsageError` on every rank if they do not make one.

    A rank that knows the ``whole`` table says so, and all must know the same. Else a tensor reaches as far as its boxes
    do.
    """
    parts: list[dict[str, Any]] = [{"boxes": [], "tensors": None if whole is None else []} for _ in range(rounds.size)]
    for name, dtype, box in mine:
        parts[_checker(name, rounds)]["boxes"].append([name, dtype, box.offset, box.shape])
    for spec in whole or ():
        parts[_checker(spec.name, rounds)]["tensors"].append([spec.name, spec.dtype, spec.shape])
    packed = [Message(part).pack() for part in parts]
    rounds.meet(Message())
    made: Message | Exception
    try:
        made = Message(_checked([Message.unpack(one).facts for one in rounds.exchange(packed)]))
        made.facts["ties"] = None if whole is None else sha256(json.dumps(whole.aliases).encode()).hexdigest()
    except Exception as error:  # noqa: BLE001 - the other ranks wait for it
        made = error
    answer = rounds.meet(made, _decide)
    return whole or TensorTable.of(_spec(row) for row in answer.facts["tensors"])


def _checker(name: str, rounds: Rounds) -> int:
    """The rank that checks a tensor."""
    return crc32(name.encode()) % rounds.size


def _decide(found: Sequence[Message]) -> Message:
    """What is wrong anywhere, of the first tensor; else the tensors, if they are not known on all ranks."""
    wrong = [message.facts["wrong"] for message in found if message.facts["wrong"]]
    if wrong:
        problem, tensor, hint = min(wrong, key=lambda one: one[1] or "")
        raise UsageError(problem, tensor=tensor, hint=hint)
    for rank, message in enumerate(found):
        if message.facts["ties"] != found[0].facts["ties"]:
            raise UsageError(f"ranks 0 and {rank} do not have the same model: tied tensors differ")
    return Message({"tensors": [row for message in found for row in message.facts["tensors"]]})


def _checked(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What this rank finds of the tensors that it checks: what is wrong with one, or those that not all ranks know."""
    try:
        table = _table_of(found)
    except UsageError as error:
        return {"wrong": [error.problem, error.tensor, error.hint], "tensors": []}
    known = found[0]["tensors"] is not None
    return {"wrong": None, "tensors": [] if known else [[spec.name, spec.dtype, spec.shape] for spec in table]}


def _table_of(found: Sequence[Mapping[str, Any]]) -> TensorTable:
    """The tensors whose boxes all ranks have sent; `UsageError` if they are not each there once."""
    given = [part["tensors"] for part in found]
    for rank, one in enumerate(given):
        if one != given[0]:
            raise UsageError(f"ranks 0 and {rank} do not have the same model: {_first_difference(given[0], one)}")
    boxes: dict[str, list[tuple[int, str, Box]]] = defaultdict(list)
    for rank, part in enumerate(found):
        for name, dtype, offset, shape in part["boxes"]:
            boxes[name].append((rank, dtype, Box.of(offset, shape)))
    specs = map(_spec, given[0]) if given[0] is not None else map(_spec_of, boxes, boxes.values())
    table = TensorTable.of(specs)
    for name in sorted(boxes):
        if name not in table:
            raise UsageError(f"rank {boxes[name][0][0]} has a tensor that is not in the model", tensor=name)
    for spec in table:
        _refuse_gaps(spec, boxes.get(spec.name, ()))
    return table


def _spec(row: Sequence[Any]) -> TensorSpec:
    name, dtype, shape = row
    return TensorSpec(name, dtype, tuple(shape))


def _spec_of(name: str, boxes: Sequence[tuple[int, str, Box]]) -> TensorSpec:
    """A tensor that reaches as far as its boxes."""
    first, dtype, shape = boxes[0]
    for rank, other, box in boxes:
        if other != dtype:
            raise UsageError(f"rank {first} has {dtype}, rank {rank} has {other}", tensor=name)
        if len(box.ranges) != len(shape.ranges):
            problem = f"rank {first} has {len(shape.ranges)} dimensions, rank {rank} has {len(box.ranges)}"
            raise UsageError(problem, tensor=name)
    ends = [[one.start + one.count for one in box.ranges] for _, _, box in boxes]
    return TensorSpec(name, dtype, tuple(max(along) for along in zip(*ends, strict=True)))


def _refuse_gaps(spec: TensorSpec, boxes: Sequence[tuple[int, str, Box]]) -> None:
    """`UsageError` unless every element of the tensor is in exactly one of the boxes."""
    for rank, dtype, box in boxes:
        if dtype != spec.dtype:
            raise UsageError(f"rank {rank} has {dtype}, the model has {spec.dtype}", tensor=spec.name)
        try:
            place_of(spec, box)
        except UsageError as error:
            raise UsageError(f"rank {rank}: {error.problem}", tensor=spec.name, hint=_HINT) from None
    held = sum(place_of(spec, box).part.elements for _, _, box in boxes)
    overlap = _overlapping([(rank, box) for rank, _, box in boxes if box.elements])
    if overlap is not None:
        raise UsageError(f"ranks {overlap[0]} and {overlap[1]} have the same elements", tensor=spec.name, hint=_HINT)
    if held != spec.elements:
        raise UsageError(f"no rank has {spec.elements - held:,} of its elements", tensor=spec.name, hint=_HINT)


def _overlapping(boxes: Sequence[tuple[int, Box]]) -> tuple[int, int] | None:
    """Two ranks whose boxes share an element. Each box is compared with all that follow, in one go."""
    if len(boxes) < 2 or not boxes[0][1].ranges:
        return (boxes[0][0], boxes[1][0]) if len(boxes) > 1 else None
    begins = np.array([box.offset for _, box in boxes])
    ends = begins + np.array([box.shape for _, box in boxes])
    for i in range(len(boxes) - 1):
        meets = ((begins[i + 1 :] < ends[i]) & (begins[i] < ends[i + 1 :])).all(axis=1)
        if meets.any():
            return boxes[i][0], boxes[i + 1 + int(np.argmax(meets))][0]
    return None


def _first_difference(one: Sequence[Any] | None, other: Sequence[Any] | None) -> str:
    if one is None or other is None:
        return "one has a model, the other shards"
    rows = [{row[0]: row for row in tensors} for tensors in (one, other)]
    return next(
        f"{name} differs" for name in sorted(rows[0].keys() | rows[1].keys()) if rows[0].get(name) != rows[1].get(name)
    )
