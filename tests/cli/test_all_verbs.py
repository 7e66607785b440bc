"""What all verbs have in common."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cli_world import run, text
from commands import SCRIPT

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import put_heartbeat
from weightcast.channel.keys import Position
from weightcast.channel.records import Heartbeat
from weightcast.cli.console import EXIT_CODES, EXIT_CODES_HELP, SHORT, UNPROVEN
from weightcast.cli.verbs import VERBS
from weightcast.cli.wording import ago, count, moment_named, natural, ranges, ratio, seconds, size, span
from weightcast.errors import AccessError, ChannelError, ConflictError, StoreError, UsageError
from weightcast.store import open_store


def test_markup_from_outside_is_text(tmp_path: Path) -> None:
    names = ["[bold]w[/bold]", "[/]", "model.layers.0.[red]x.weight"]
    bits = {name: np.zeros(16, np.float32) for name in names}
    url = tmp_path / "[blink]channel["
    wc.init(url, wc.Arrays(bits), writer="w")
    with wc.Publisher(url, wc.Arrays(bits), writer="w") as publisher:
        publisher.publish(1, wc.Arrays({name: np.ones(16, np.float32) for name in names}))
    chain = Chain.open(open_store(url))
    put_heartbeat(chain, Heartbeat("r", Position(0, "0" * 64), 1.0, "[/red] [link=x]"))
    shown = text("show", url, 1, "--tensors")
    assert all(name in shown for name in names)
    assert "[red]x" in text("show", url, 1)
    assert "[/red] [link=x]" in text("status", url)
    assert str(url) in text("status", url)
    assert str(url) in run("show", url, 7).complaint


def test_every_verb_has_short_help() -> None:
    listing = run("--help").out
    for verb in VERBS:
        done = run(verb, "--help")
        assert done.code == 0
        assert f"weightcast {verb}" in done.out or f"root {verb}" in done.out
        assert "--json" in done.out
        assert re.search(rf"^  {verb} ", listing, re.MULTILINE)


def test_exit_codes_are_distinct_and_documented() -> None:
    order = list(EXIT_CODES)
    for kind, parent in ((AccessError, StoreError), (ConflictError, ChannelError)):
        assert order.index(kind) < order.index(parent)
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    documented = {int(code) for code in re.findall(r"(?:: |; )(\d+) ", EXIT_CODES_HELP)}
    assert documented == {0, 1, SHORT, UNPROVEN, 130, *EXIT_CODES.values()}
    assert "Exit codes" in run("--help").out


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("p", {"publish", "pull", "plan", "pin"}), ("pull --f", {"--follow"}), ("publish --codec b", {"banded"})],
)
def test_shell_completes(typed: str, offered: set[str]) -> None:
    words = f"weightcast {typed}"
    asked = {"_WEIGHTCAST_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run([SCRIPT], env=os.environ | asked, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == offered


def test_sizes_and_times_for_people() -> None:
    sizes = [size(n) for n in (0, 999, 1000, 9960, 61_234, 999_499, 999_500, 14 * 10**9, 5 * 10**15)]
    assert sizes == ["0 B", "999 B", "1.00 kB", "9.96 kB", "61.2 kB", "999 kB", "1.00 MB", "14.0 GB", "5,000 TB"]
    spans = [span(s) for s in (-5, 0.04, 3.21, 59, 119, 600, 7199, 7200, 86400, 200000)]
    assert spans == ["0.0 s", "0.0 s", "3.2 s", "59 s", "119 s", "10 min", "120 min", "2 h", "24 h", "2 d"]
    assert [ratio(1000, 10), ratio(1000, 1000), ratio(10**7, 1)] == ["1 : 100", "1 : 1.00", "1 : 10,000,000"]


def test_numbers_in_names_are_counted() -> None:
    names = ["layers.10.up", "layers.2.up", "layers.2.down", "embed", "9", "10", "x" * 10 + "7" * 400, ""]
    ordered = sorted(names, key=natural)
    assert ordered.index("layers.2.up") < ordered.index("layers.10.up")
    assert ordered.index("9") < ordered.index("10")
    assert [name for name in ordered if name.isdigit()] == ["9", "10"]


def test_ages_from_the_future_are_named_as_such() -> None:
    assert [ago(90), ago(-1)] == ["90 s ago", "0.0 s ago"]
    assert ago(-180) == "in the future by 3 min: check the clocks"


def test_plurals_and_ranges() -> None:
    assert [count(1, "version"), count(2, "version"), count(0, "squash")] == ["1 version", "2 versions", "0 squashes"]
    assert [ranges([3, 4, 5, 7]), ranges([2]), ranges([])] == ["3–5, 7", "2", ""]


@pytest.mark.parametrize(("written", "meant"), [("90s", 90), ("15m", 900), ("1.5h", 5400), ("7d", 604800), ("0s", 0)])
def test_durations(written: str, meant: float) -> None:
    assert seconds(written) == meant


@pytest.mark.parametrize("written", ["", "7", "d", "7w", "-1d", "1e3s", "7 d", "nan", "٧d"])
def test_impossible_duration_is_refused(written: str) -> None:
    with pytest.raises(UsageError, match="not a duration"):
        seconds(written)


def test_points_in_time() -> None:
    assert moment_named("2h", 10_000.0) == 2800.0
    assert moment_named("1970-01-02", 0.0) == 86400.0
    assert moment_named("1970-01-01T01:00+01:00", 5.0) == 0.0
    with pytest.raises(UsageError, match="not a time"):
        moment_named("yesterday", 0.0)
