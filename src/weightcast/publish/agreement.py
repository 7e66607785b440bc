"""What the whole table of a sharded model is: agreed on once by all ranks, and checked for holes and overlaps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weightcast.errors import UsageError
from weightcast.format.boxes import Box, place_of
from weightcast.format.spec import TensorSpec, TensorTable
from weightcast.publish.peers import Message, Peers, meet

_HINT = "Each element of a tensor belongs to exactly one rank: check names, offsets and shapes on all of them."


def agree_on_table(peers: Peers, mine: Sequence[tuple[str, str, Box]], whole: TensorTable | None) -> TensorTable:
    """The table of all ranks' boxes together; one `UsageError` on every rank if they do not make one.

    A rank that knows the ``whole`` table says so, and all must know the same. Else a tensor reaches as far as its boxes
    do.
    """
    facts: dict[str, Any] = {
        "boxes": [[name, dtype, box.offset, box.shape] for name, dtype, box in mine],
        "whole": None if whole is None else _table_json(whole),
    }
    answer = meet(peers, Message(facts), _decide)
    return _table_of(answer.facts["whole"])


def _decide(found: Sequence[Message]) -> Message:
    given = [message.facts["whole"] for message in found]
    for rank, one in enumerate(given):
        if one != given[0]:
            raise UsageError(f"ranks 0 and {rank} do not have the same model: {_first_difference(given[0], one)}")
    boxes: dict[str, list[tuple[int, str, Box]]] = defaultdict(list)
    for rank, message in enumerate(found):
        for name, dtype, offset, shape in message.facts["boxes"]:
            boxes[name].append((rank, dtype, Box.of(offset, shape)))
    table = _table_of(given[0]) if given[0] is not None else TensorTable.of(map(_spec_of, boxes, boxes.values()))
    for name in sorted(boxes):
        if name not in table:
            raise UsageError(f"rank {boxes[name][0][0]} has a tensor that is not in the model", tensor=name)
    for spec in table:
        _refuse_gaps(spec, boxes.get(spec.name, ()))
    return Message({"whole": _table_json(table)})


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


def _table_json(table: TensorTable) -> dict[str, Any]:
    return {
        "aliases": dict(table.aliases),
        "tensors": [[spec.name, spec.dtype, list(spec.shape)] for spec in table],
    }


def _table_of(value: Mapping[str, Any]) -> TensorTable:
    specs = (TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in value["tensors"])
    return TensorTable.of(specs, value["aliases"])


def _first_difference(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> str:
    if one is None or other is None:
        return "one has a model, the other shards"
    rows = [{json_row[0]: json_row for json_row in table["tensors"]} for table in (one, other)]
    for name in sorted(rows[0].keys() | rows[1].keys()):
        if rows[0].get(name) != rows[1].get(name):
            return f"{name} differs"
    return "tied tensors differ"
