"""The options that every verb takes, before or after its name."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import weightcast as wc
from weightcast.cli import app
from weightcast.cli.console import Logged, warn
from weightcast.cli.settings import begin_run, settings
from weightcast.cli.wording import rate_of
from weightcast.errors import UsageError


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    wc.init(tmp_path / "channel", wc.Arrays({"w": np.zeros(100, np.float32)}))
    return tmp_path / "channel"


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stderr


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("800", 800),
        ("800k", 8e5),
        ("50M", 5e7),
        ("1.5MB/s", 1.5e6),
        ("1 GB/s", 1e9),
        ("2kiB/s", 2048),
        ("1MiBps", 2**20),
    ],
)
def test_rates_are_read_as_people_write_them(text: str, rate: float) -> None:
    assert rate_of(text) == rate


@pytest.mark.parametrize(
    "text",
    ["", "0", "0M", "0.0000000000000000001", "0.9", "9" * 400, "-1", "fast", "1X", "1M/h", "1e9", "nan", "1..5M"],
)
def test_other_texts_are_refused_as_rates(text: str) -> None:
    with pytest.raises(UsageError, match="is not a rate"):
        rate_of(text)


def test_options_come_before_or_after_the_verb(channel: Path) -> None:
    assert run("--limit-rate", "1M", "log", channel) == (0, "")
    assert settings.limit_rate == 1e6
    assert run("log", channel, "--limit-rate", "2M", "-q", "-v") == (0, "")
    assert (settings.limit_rate, settings.quiet, settings.verbose) == (2e6, True, True)
    assert run("log", channel) == (0, "")
    assert (settings.limit_rate, settings.quiet, settings.verbose) == (None, False, False)


def test_values_that_make_no_sense_are_wrong_usage(channel: Path, tmp_path: Path) -> None:
    for arguments in (("--limit-rate", "fast"), ("--log-file", tmp_path)):
        for command in ((*arguments, "log", channel), ("log", channel, *arguments)):
            code, err = run(*command)
            assert code == 2
            assert arguments[0] in err


def test_log_file_has_one_line_with_time_for_each_message(channel: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    assert run("--log-file", log, "log", tmp_path / "gone", "-q")[0] == 9
    logging.getLogger("weightcast").info("100%% of\n%s", "it")
    warn("a warning")
    begin_run()
    warn("after the run")
    lines = log.read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ ", line) for line in lines)
    said = [line.split(" ", 1)[1] for line in lines]
    assert said[0].startswith("ERROR there is no channel here")
    assert said[1:] == [r"INFO 100% of\nit", "WARNING a warning"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device on this system")
def test_log_file_that_cannot_be_written_to_is_one_warning(channel: Path) -> None:
    code, err = run("--log-file", "/dev/full", "-v", "log", channel.with_name("gone"))
    assert code == 9
    assert err.count("no longer logging to /dev/full: No space left on device") == 1
    assert "Traceback" not in err
    begin_run()


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ((), ["warning: logged", "warning: a warning"]),
        (("-v",), ["in passing", "warning: logged", "warning: a warning"]),
        (("-q",), []),
    ],
)
def test_verbosity_options_choose_what_is_printed(
    channel: Path, options: tuple[str, ...], shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(*options, "log", channel)
    logger, handler = logging.getLogger("weightcast"), Logged()
    logger.addHandler(handler)
    try:
        logger.info("in passing")
        logger.warning("logged")
        warn("a warning")
    finally:
        logger.removeHandler(handler)
        begin_run()
    assert capsys.readouterr().err.splitlines() == shown
