"""The guide to signing: its commands are run in order, and print what it says, but for keys, digests and times."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cases import write_folder
from channels import small_model, train
from typer.testing import CliRunner

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position
from weightcast.cli import app
from weightcast.store import open_store

GUIDE = Path(__file__).parents[2] / "docs/guides/signing.md"


def steps(text: str) -> Iterator[tuple[list[str], str]]:
    """Each command of the guide, and what it prints according to the guide."""
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, printed = part.partition("\n")
            yield shlex.split(command), printed


def shape(printed: str) -> str:
    """What is printed, without what is another each time."""
    printed = re.sub(r"[0-9a-f]{12,}", "HEX", printed)
    printed = re.sub(r"\d[\d.,]* ?(ms|s|min|kB|B|MB)\b", "N", printed)
    printed = re.sub(r"1 : [\d.]+|[\d.]+%", "N", printed)
    printed = re.sub(r"\S*/bucket\b", "bucket", printed)
    return re.sub(r"\s+", " ", printed).strip()


def forge(url: str) -> None:
    """A version that follows the rules of the format in everything, by one who has no key."""
    opened = Chain.open(open_store(url))
    head = opened.head()
    assert head is not None
    chain = Chain(opened.store, replace(opened.channel, signer=None, signature=None))
    old = small_model()
    train(old, 1)
    new = wc.Arrays.copy_of(old)
    train(new, 2)
    position = Position(head.position.version + 1, wc.fingerprint(new).digest)
    ref = chain.put_delta(position, wc.encode(wc.diff(old, new), "plain"))
    chain.commit(chain.draft(position, head.position, ref, "plain", 1, None, "somebody"))


def run(command: list[str]) -> str:
    """What a command prints, to people."""
    if command[:2] == ["python", "forge.py"]:
        forge(command[2])
        return ""
    assert command[0] == "weightcast"
    result = CliRunner().invoke(app, command[1:])
    assert result.exit_code in (0, 15), result.output
    return result.output


def test_commands_of_the_guide_print_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = small_model()
    for number in range(2):
        write_folder(tmp_path / f"checkpoint-{number}", model)
        train(model, number + 1)
    for command, printed in steps(GUIDE.read_text()):
        assert shape(run(command)) == shape(printed), command
