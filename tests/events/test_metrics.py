"""Metrics for Prometheus, on both sides, and the dashboard that shows them."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from channels import small_model, train

import weightcast as wc
from weightcast.store.memory import MemoryStore

prometheus_client = pytest.importorskip("prometheus_client")

from weightcast.events.metrics import Metrics  # noqa: E402

DASHBOARD = Path(__file__).parents[2] / "docs/grafana.json"


def followed(metrics: Metrics) -> wc.Manifest:
    """Publish a version and follow it, both into the same metrics."""
    store, model = MemoryStore(), small_model()
    wc.init(store, model)
    with wc.Subscriber(store, wc.Arrays.copy_of(model), threads=1, on_event=metrics) as subscriber:
        with wc.Publisher(store, model, threads=1, on_event=metrics) as publisher:
            train(model, 1)
            committed = publisher.publish(step=1).result(60)
        subscriber.sync()
    return committed


def test_trainer_and_replica_have_the_same_names_apart_by_role() -> None:
    metrics = Metrics()
    committed = followed(metrics)
    value = metrics.registry.get_sample_value
    for role, phases in ("trainer", ("detect", "commit")), ("replica", ("fetch", "decode", "apply")):
        for phase in phases:
            assert value("weightcast_phase_seconds_count", {"phase": phase, "role": role}) == 1
    nbytes = {
        (phase, role): value("weightcast_phase_bytes_total", {"phase": phase, "role": role})
        for phase, role in (("upload", "trainer"), ("fetch", "replica"))
    }
    assert set(nbytes.values()) == {committed.nbytes}
    assert value("weightcast_committed_version") == value("weightcast_applied_version", {"role": "replica"}) == 1
    assert value("weightcast_committed_time_seconds") == pytest.approx(committed.time, abs=60)


def test_metrics_are_served_by_the_librarys_own_server() -> None:
    metrics = Metrics()
    followed(metrics)
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", metrics.registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert 'weightcast_phase_seconds_bucket{le="0.001",phase="detect",role="trainer"}' in text


def test_two_in_one_process_do_not_meet_and_a_registry_can_be_given() -> None:
    first, second = Metrics(), Metrics(prometheus_client.CollectorRegistry())
    followed(first)
    assert second.registry.get_sample_value("weightcast_committed_version") == 0


# -- the dashboard -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def names_of_metrics() -> set[str]:
    """Of all samples there are: what sinks keep, and what an agent adds."""
    from weightcast.engine.endpoint import Watch

    metrics = Metrics()
    Watch(NoAgent(), metrics)  # type: ignore[arg-type]
    followed(metrics)
    text = prometheus_client.generate_latest(metrics.registry).decode()
    return set(re.findall(r"^(weightcast_\w+)", text, re.MULTILINE))


class NoAgent:
    """An agent that has not reached its engine."""

    position = lag = unproven = None


def test_every_query_of_the_dashboard_is_for_metrics_and_labels_that_exist(dashboard: dict[str, Any]) -> None:
    known = names_of_metrics()
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    asked = {name for query in queries for name in re.findall(r"weightcast_\w+", query)}
    assert asked <= known
    kinds = {re.sub(r"_(bucket|sum|count|total|created)$", "", name) for name in known}
    assert {re.sub(r"_(bucket|sum|count|total|created)$", "", name) for name in asked} == kinds, "every metric is shown"
    labels = {label for query in queries for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", query)}
    labels |= {one for query in queries for some in re.findall(r"by \(([^)]*)\)", query) for one in some.split(", ")}
    assert labels <= {"phase", "role", "instance", "job", "le"}


def test_dashboard_has_what_grafana_needs(dashboard: dict[str, Any]) -> None:
    assert {"title", "uid", "schemaVersion", "version", "time", "templating", "panels"} <= dashboard.keys()
    assert dashboard["id"] is None, "Grafana gives the number when it imports the file"
    variables = {one["name"]: one for one in dashboard["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["title"]
        assert {"x", "y", "w", "h"} <= panel["gridPos"].keys()
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["targets"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
        assert panel["fieldConfig"]["defaults"]["unit"]


def test_panels_of_the_dashboard_do_not_overlap(dashboard: dict[str, Any]) -> None:
    cells = [
        (x, y)
        for panel in dashboard["panels"]
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
