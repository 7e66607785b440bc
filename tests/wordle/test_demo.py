"""The whole picture in a short run: all boxes, a late replica, and each box killed once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from guides import Page
from wordle_boxes import ROOT

import weightcast as wc

TOO_SHORT = "the policy did not get measurably better\n"


def fields_in(text: str) -> set[tuple[str, ...]]:
    """Of lines that boxes print."""
    told = (json.loads(line) for line in re.findall(r'^\{"time".*\}$', text, re.MULTILINE))
    return {(line["event"], *line) for line in told}


def test_every_replica_ends_with_the_trainers_bits_though_each_box_is_killed(tmp_path: Path) -> None:
    folder, steps = tmp_path / "run", 8
    command = [sys.executable, "-m", "examples.wordle.demo", "--folder", str(folder), "--steps", str(steps)]
    report = tmp_path / "report.html"
    done = subprocess.run(
        [*command, "--evaluate", "1", "--chaos", "--report", str(report)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.stderr in ("", TOO_SHORT), "eight steps are too few to show it"
    assert re.search(r"Every replica is bit-identical: replica-a and\s+replica-b hold version \d+", done.stdout)
    with wc.Subscriber(folder / "bucket", tmp_path / "mirror") as subscriber:
        update = subscriber.sync()
    assert update is not None
    assert fields_in(Page.of("wordle.md").text) <= fields_in("\n".join(log.read_text() for log in folder.glob("*.log")))
    starts = {log.stem: log.read_text().count('"event": "begin"') for log in folder.glob("*.log")}
    assert starts == {"dashboard": 0, "environment": 2, "replica-a": 2, "replica-b": 2, "trainer": 2}
    assert '"event": "listening"' in (folder / "dashboard.log").read_text()
    assert f'"version":{update.position.version}' in report.read_text()
    assert update.position.version >= steps
    assert update.position.digest in re.sub(r"\s", "", done.stdout)
