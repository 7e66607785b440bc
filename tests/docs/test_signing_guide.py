"""docs/guides/signing.md: its commands and its example run, in their order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cases import write_folder
from channels import small_model, train
from cli_world import run
from guides import Page, play

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position
from weightcast.store import open_store

PAGE = Page.of("signing.md")


def forge(words: list[str]) -> str:
    """A version that follows the rules of the format in everything, by one who has no key."""
    opened = Chain.open(open_store(words[2]))
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
    return ""


def test_commands_print_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = small_model()
    for number in range(2):
        write_folder(tmp_path / f"checkpoint-{number}", model)
        train(model, number + 1)
    play(PAGE, instead={"python forge.py": forge}, codes=frozenset({0, 15}))


def test_example_signs_what_a_reader_with_the_root_key_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    (tmp_path / "checkpoint-0").mkdir()
    save_file(model.state_dict(), tmp_path / "checkpoint-0/model.safetensors")
    for section in ("Make the keys", "Begin a channel"):
        for command in PAGE.section(section).commands:
            assert run(*command.words[1:]).code == 0
    (example,) = PAGE.python
    exec(example, known := {"wc": wc, "url": "bucket", "model": model, "optimizer": optimizer})
    with known["publisher"] as publisher:
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        publisher.publish(step=1)
    with wc.Subscriber("bucket", tmp_path / "replica", trust="root.key.pub") as subscriber:
        update = subscriber.sync()
    assert update is not None
    assert update.position.version == 1
