"""`show`: what a version changed, drawn and listed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cases import Bag, gaussian, moved
from cli_world import World, facts, text
from scripted_store import ScriptedStore

import weightcast as wc
from weightcast.cli.heat import heat_of
from weightcast.format.tensors import TensorSpec
from weightcast.store import open_store
from weightcast.view.places import place_of


def test_show_counts_every_tensor(shared: World) -> None:
    old, new = shared.states[4:6]
    truth = {spec.name: int((old.read(spec.name) != new.read(spec.name)).sum()) for spec in old.table}
    shown = facts("show", shared.url, 5)
    assert {row["name"]: row["changed"] for row in shown["tensors"]} == {n: c for n, c in truth.items() if c}
    assert (shown["version"], shown["step"], shown["codec"]) == (5, 50, "banded")
    assert shown["density"] == sum(truth.values()) / old.table.elements
    listed = text("show", shared.url, 5, "--tensors")
    assert all((name in listed) == bool(changed) for name, changed in truth.items())


def test_show_draws_layers_and_kinds(shared: World) -> None:
    lines = text("show", shared.url, 5).splitlines()
    at = next(i for i, line in enumerate(lines) if line.split()[:1] == ["layer"])
    assert lines[at].split() == ["layer", "q_proj", "o_proj", "up_proj", "norm"]
    rows = [line.split() for line in lines[at + 1 : at + 4]]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert [row[-1] for row in rows] == ["·"] * 3
    assert [float(row[2]) for row in rows] == sorted((float(row[2]) for row in rows), reverse=True)
    assert any("model.embed_tokens.weight" in line for line in lines[at + 4 :])
    assert "% changed" in lines[-1]


def test_show_lists_tensors_where_names_have_no_layers(tmp_path: Path) -> None:
    bits = {name: np.zeros(50, np.float32) for name in ("tower", "bridge")}
    url = tmp_path / "channel"
    wc.init(url, wc.Arrays(bits))
    with wc.Publisher(url, wc.Arrays(bits)) as publisher:
        publisher.publish(1, wc.Arrays(bits | {"tower": np.eye(1, 50, dtype=np.float32)[0]}))
    lines = [line.split() for line in text("show", url, 1).splitlines()]
    assert ["·", "bridge"] in lines
    assert ["▅", "2.0", "tower"] in lines


def test_show_an_anchor(shared: World) -> None:
    shown = facts("show", shared.url, 0)
    assert shown["files"].keys() == {path.name for path in shared.checkpoints[0].iterdir()}
    assert shown["bytes"] == sum(path.stat().st_size for path in shared.checkpoints[0].iterdir())
    assert "config.json" in text("show", shared.url, 0)


def test_show_reads_tables_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    old = gaussian(rng, 1 << 20)
    url = tmp_path / "channel"
    arrays = [wc.Arrays({"w": bits.reshape(1024, -1)}, {"w": "BF16"}) for bits in (old, moved(rng, old, 0.1))]
    wc.init(url, arrays[0])
    with wc.Publisher(url, arrays[0]) as publisher:
        publisher.publish(1, arrays[1])
    asked: list[int] = []

    counting = ScriptedStore(open_store(url))
    counting.answer("get", "deltas/", lambda data: asked.append(len(data)) or data)
    monkeypatch.setattr("weightcast.cli.channels.open_store", lambda url, _: counting)
    assert facts("show", url, 1)["bytes"] > 60_000
    assert 0 < sum(asked) < 17_000


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.12.self_attn.q_proj.weight", ("model.layers", 12, "q_proj")),
        ("model.layers.3.mlp.experts.17.up_proj.weight", ("model.layers", 3, "up_proj")),
        ("model.layers.3.post_attention_layernorm.weight", ("model.layers", 3, "norm")),
        ("transformer.h.0.ln_1.bias", ("transformer.h", 0, "norm")),
        ("transformer.h.0.attn.c_attn.bias", ("transformer.h", 0, "c_attn")),
        ("blocks.layers.1.self_attn.in_proj_weight", ("blocks.layers", 1, "in_proj")),
        ("0.weight", ("", 0, "weight")),
        ("model.embed_tokens.weight", None),
        ("", None),
        ("a..b", None),
    ],
)
def test_places_of_tensors(name: str, place: tuple[str, int, str] | None) -> None:
    assert place_of(name) == place


def test_towers_are_drawn_apart() -> None:
    names = ("vision.blocks.0.mlp.weight", "text.layers.0.mlp.weight")
    table = Bag({TensorSpec(name, "BF16", (8,)): np.zeros(8, np.uint16) for name in names}).table
    heat = heat_of(table, {names[0]: 2})
    assert {stack.name: stack.cells[0, "mlp"].density for stack in heat.stacks} == {
        "vision.blocks": 0.25,
        "text.layers": 0,
    }
