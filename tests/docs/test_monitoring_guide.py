"""docs/guides/monitoring.md: its examples run, and its tables name what there is."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from channels import LiveChannel, train  # noqa: E402
from cli_world import make_world  # noqa: E402
from guides import ROOT, Page, play  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.events.event import PHASES, ROLES  # noqa: E402

PAGE = Page.of("monitoring.md")
TELLING, READING, COUNTING, TRACING = PAGE.python


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the examples use and do not say."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def train(model: torch.nn.Module, batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        optimizer.step()

    return {
        "url": str(tmp_path / "channel"),
        "model": model,
        "optimizer": optimizer,
        "data": torch.randn(3, 2, 8),
        "train": train,
    }


def test_events_of_a_training_loop_are_told_and_written(known: dict[str, Any], capsys: Any) -> None:
    exec(TELLING, known)
    said = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"trainer gpu-0: commit of version [1-3] took \d+\.\d{3} s", said[-1])  # some may be merged
    told = [json.loads(line) for line in Path("events.jsonl").read_text().splitlines()]
    assert [f"{one['phase']} of version {one['version']}" for one in told] == [
        line.partition(": ")[2].partition(" took")[0] for line in said
    ]


def test_line_in_the_guide_has_the_fields_that_lines_have(known: dict[str, Any]) -> None:
    exec(TELLING, known | {"print": lambda text: None})
    written = json.loads(Path("events.jsonl").read_text().splitlines()[0])
    (shown,) = (json.loads(line) for line in PAGE.blocks("json"))
    assert list(shown) == list(written)
    assert shown["format"] == written["format"]


def test_time_between_trainer_and_replica_can_be_read_from_lines(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    channel = LiveChannel(tmp_path)
    here = wc.Arrays.copy_of(channel.states[-1])
    with (
        wc.JsonLines("trainer.jsonl") as sent,
        wc.JsonLines("replica.jsonl") as taken,
        wc.Publisher(channel.url, channel.model, on_event=sent) as publisher,
        wc.Subscriber(channel.url, here, on_event=taken) as subscriber,
    ):
        for step in (1, 2):
            train(channel.model, step)
            publisher.publish(step=step).result(60)
            subscriber.sync()
    exec(READING, {})
    said = capsys.readouterr().out.splitlines()
    (shown,) = (text for text in PAGE.blocks("") if text.startswith("trainer detect"))
    assert [line.split()[:2] for line in said] == [line.split()[:2] for line in shown.splitlines()]


def test_metrics_are_served_as_the_guide_says(known: dict[str, Any]) -> None:
    pytest.importorskip("prometheus_client")
    exec(COUNTING, kept := known | {"port": 0})
    with kept["publisher"] as publisher:
        known["train"](known["model"], known["data"][0])
        publisher.publish(step=1)
    with urllib.request.urlopen(f"http://127.0.0.1:{kept['server'].server_port}/metrics", timeout=30) as answer:
        assert "weightcast_committed_version 1.0" in answer.read().decode()
    kept["server"].shutdown()
    kept["server"].server_close()
    kept["thread"].join()


def test_spans_are_exported_as_the_guide_says(known: dict[str, Any]) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exec(TRACING, found := known | {"exporter": InMemorySpanExporter()})
    with found["publisher"] as publisher:
        known["train"](known["model"], known["data"][0])
        publisher.publish(step=1)
    found["provider"].shutdown()
    names = [span.name for span in found["exporter"].get_finished_spans()]
    assert names == [f"weightcast {phase}" for phase in ("step", "detect", "resolve", "encode", "upload", "commit")]


def test_tables_name_all_phases_roles_and_metrics() -> None:
    rows = PAGE.table("phase")
    assert {phase for row in rows for phase in row[0].split(", ")} == set(PHASES)
    assert {role for row in rows for role in row[1].split(", ")} == set(ROLES)
    pytest.importorskip("prometheus_client")
    dashboard = json.loads((ROOT / "docs/grafana.json").read_text())
    asked = set(re.findall(r"weightcast_\w+", json.dumps([panel.get("targets") for panel in dashboard["panels"]])))
    named = {name for row in PAGE.table("metric") for name in re.findall(r"weightcast_\w+", row[0])}
    assert named == {name.removesuffix("_bucket") for name in asked}, (
        "tests/events/test_metrics.py has those that exist"
    )


def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    world = make_world(tmp_path)
    Path("checkpoint").symlink_to(world.checkpoints[-1])
    skipped: list[str] = []
    without = dict.fromkeys(("weightcast attach", "pip install"), lambda words: skipped.append(words[0]) or "")
    play(PAGE, places={"s3://bucket/run-42": world.url}, instead=without)
    roles = {json.loads(line)["role"] for line in Path("events.jsonl").read_text().splitlines()}
    assert roles == {"trainer", "replica", "mirror"}
