"""What an engine says of the parts that its workers hold, from its layout to the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

from weightcast.channel.heartbeats import heartbeats
from weightcast.engine.cuts import cuts_of
from weightcast.engine.layout import Layout, Part
from weightcast.engine.messages import Fit, ReadFit
from weightcast.engine.protocol import decode_answer, encode
from weightcast.errors import FormatError
from weightcast.format.boxes import Box, Range
from weightcast.format.cut import MAX_CUTS, Cut
from weightcast.format.spec import TensorSpec, TensorTable

if TYPE_CHECKING:
    from local_engine import Training


def layout(shapes: dict[str, tuple[int, ...]], *parts: tuple[str, tuple[Range, ...]]) -> Layout:
    table = TensorTable.of(TensorSpec(name, "BF16", shape) for name, shape in shapes.items())
    return Layout(table, [Part(name, Box(box), "p", "BF16", 0, (1,) * len(box)) for name, box in parts], {})


def test_layers_are_named_together() -> None:
    shapes = {f"layers.{i}.down.weight": (8, 32) for i in range(12)} | {"norm": (8,)}
    parts = [(name, (Range(0, 8), Range(24, 8))) for name in shapes if name != "norm"]
    found = cuts_of(layout(shapes, *parts, ("norm", (Range(0, 8),))))
    assert found == (Cut("layers.*.down.weight", 1, 4),)
    assert all(found[0].applies_to(TensorSpec(name, "BF16", (8, 32))) for name, _ in parts)


@pytest.mark.parametrize(
    ("along", "size", "parts"),
    [
        (Range(0, 8), 32, 4),
        (Range(8, 8), 32, 4),
        (Range(0, 11), 32, 3),  # the last of three has ten
        (Range(22, 10), 32, None),  # the last one: the others tell
        (Range(0, 32), 32, None),  # all of it
        (Range(4, 8), 32, None),  # not one of equal parts
        (Range(0, 8, 2), 32, None),  # with gaps
        (Range(0, 1), 300, None),  # more parts than a cut may have
        (Range(0, 20), 32, 2),
        (Range(0, 5), 6, None),  # two parts of six are of three
    ],
)
def test_parts_of_a_dimension(along: Range, size: int, parts: int | None) -> None:
    found = cuts_of(layout({"a": (size, 3)}, ("a", (along, Range(0, 3)))))
    if parts == 2:  # 20 of 32: torch.chunk would give 16
        assert found == ()
    else:
        assert found == (() if parts is None else (Cut("a", 0, parts),))


def test_names_with_signs_of_patterns_are_taken_literally() -> None:
    shapes = {"a[0].*.7": (8,), "ax.y.7": (8,)}
    (cut,) = cuts_of(layout(shapes, ("a[0].*.7", (Range(0, 4),))))
    assert cut.applies_to(TensorSpec("a[0].*.9", "BF16", (8,)))
    assert not cut.applies_to(TensorSpec("ax.y.7", "BF16", (8,)))


def test_what_most_elements_are_in_comes_first_where_there_are_too_many() -> None:
    shapes = {f"{chr(97 + i % 26)}{chr(97 + i // 26)}": (8, i + 1) for i in range(100)}
    found = cuts_of(layout(shapes, *((name, (Range(0, 4), Range(0, width))) for name, (_, width) in shapes.items())))
    assert len(found) == MAX_CUTS
    assert {shapes[cut.tensors][1] for cut in found} == set(range(101 - MAX_CUTS, 101))


def test_fit_with_cuts_travels() -> None:
    fit = Fit(cuts=(Cut("a.*", 1, 8), Cut("b", 0, 2)))
    assert decode_answer(encode(fit)) == fit
    for lie in ('["a",1]', '["a",1,0]', '["a",1,1000]', '"a"', "[1,1,1]", '["a",-1,2]'):
        with pytest.raises(FormatError, match="cut"):
            decode_answer(encode(fit).replace('["b",0,2]', lie))


def test_heartbeat_of_an_agent_names_the_parts_of_its_workers(training: Training, tmp_path: Path) -> None:
    from local_engine import Local, attached

    engine = Local(training.weights)
    with attached(training, engine, tmp_path, replica="here") as agent:
        next(iter(agent.rounds()))
        ((beat, _),) = heartbeats(agent.subscriber.chain)
    wanted = {cut for fit in engine.ask(ReadFit()) for cut in fit.cuts}
    assert set(beat.cuts) == wanted
    assert {Cut("q", 0, 2), Cut("experts.*.up", 0, 2)} <= wanted
