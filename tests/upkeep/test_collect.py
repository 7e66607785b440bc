"""Deleting: what gets younger before it goes is spared, what holds nothing back is named, leftovers are found."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scripted_store import ScriptedStore
from typer.testing import CliRunner

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import put_heartbeat
from weightcast.channel.keys import ANCHORS, DELTAS, REPLICAS, Position, anchor_folder, manifest_key, pin_key
from weightcast.channel.pins import pin
from weightcast.channel.records import Heartbeat, Reference
from weightcast.channel.retention import Retention
from weightcast.channel.tags import set_tag
from weightcast.cli import app
from weightcast.disk.checkpoint import save
from weightcast.store import open_store
from weightcast.store.base import Store, debris
from weightcast.store.download import mark_of
from weightcast.store.memory import MemoryStore
from weightcast.upkeep import collect as collecting
from weightcast.upkeep.collect import collect, reset

DAY = 86400.0
NOW = Retention(0, 0, 0)
COMMANDS = ("--window", "0s", "--grace", "0s", "--patience", "0s")


def weights(value: float) -> wc.Arrays:
    return wc.Arrays({"w": np.full(1000, value, np.float32)})


def channel(store: Store | Path, versions: int = 5, anchor: bool = True) -> Chain:
    """Versions 0 to ``versions``, with an anchor at the last."""
    wc.init(store, weights(0))
    with wc.Publisher(store, weights(0), writer="w") as publisher:
        for version in range(1, versions + 1):
            last = publisher.publish(version, weights(version)).result(60)
    chain = Chain.open(open_store(store) if isinstance(store, Path) else store)
    if anchor:
        cut(chain, last.position)
    return chain


def cut(chain: Chain, position: Position) -> None:
    chain.put_anchor(position, checkpoint(position.version))


def checkpoint(value: float) -> dict[str, Path]:
    folder = Path(tempfile.mkdtemp())
    save(weights(value), folder)
    (folder / "config.json").write_text("{}")
    return {path.name: path for path in folder.iterdir()}


def gc(url: Path, *options: str) -> tuple[dict, str, str]:
    """What gc says to programs in a dry run, and what it says to people."""
    told = CliRunner().invoke(app, ["gc", str(url), *COMMANDS, *options, "--dry-run", "--json"])
    said = CliRunner().invoke(app, ["gc", str(url), *COMMANDS, *options])
    assert (told.exit_code, said.exit_code) == (0, 0), told.output + said.output
    return json.loads(told.stdout), said.stdout, said.stderr


# -- pins --------------------------------------------------------------------------------------------------------------


def test_pin_and_tag_set_while_gc_decides_keep_their_versions() -> None:
    chain = channel(MemoryStore("x"))
    tagged = chain.manifest(3).position
    slow = ScriptedStore(chain.store)

    def mark(_: object) -> None:
        pin(chain, 1)
        set_tag(chain, "release", tagged)

    slow.after("list", "tags/", mark, times=1)
    done = collect(Chain(slow, chain.channel), NOW)
    assert not {1, 3} & set(done.versions)
    assert [chain.manifest(version).position.version for version in (1, 3)] == [1, 3]


def test_pin_of_a_missing_version_keeps_nothing() -> None:
    chain = channel(MemoryStore("x"))
    free = collect(chain, NOW, dry_run=True)
    assert len(free.versions) == 5
    chain.store.put(pin_key(999), b"{}")
    chain.store.put(pin_key(7), b"{}")
    found = collect(chain, NOW, dry_run=True)
    assert found.versions == free.versions
    assert (found.ignored_pins, found.damage) == ((7, 999), ())
    assert collect(chain, NOW).versions == free.versions


def test_pin_of_a_missing_version_is_named(tmp_path: Path) -> None:
    chain = channel(tmp_path / "channel")
    chain.store.put(pin_key(999), b"{}")
    told, _, warned = gc(tmp_path / "channel")
    assert told["ignored_pins"] == [999]
    assert "version 999 is pinned and is not there" in warned
    assert f"`weightcast unpin {tmp_path / 'channel'} 999`" in warned


def test_pin_of_a_version_keeps_it() -> None:
    chain = channel(MemoryStore("x"))
    chain.store.put(pin_key(2), b"{}")
    assert collect(chain, NOW, dry_run=True).versions == (3, 4)


# -- damage ------------------------------------------------------------------------------------------------------------


def lose_delta(chain: Chain) -> str:
    key = next(listed.key for listed in chain.store.list(DELTAS))
    chain.store.delete(key)
    return f"{key}: it is missing"


def cut_delta(chain: Chain) -> str:
    listed = next(iter(chain.store.list(DELTAS)))
    chain.store.put(listed.key, chain.store.get(listed.key)[:-1])
    return f"{listed.key}: it has {listed.size - 1} bytes, {manifest_key(1)} says {listed.size}"


def lose_weights_of_anchor(chain: Chain) -> str:
    key = next(listed.key for listed in chain.store.list(ANCHORS) if listed.key.endswith("model.safetensors"))
    chain.store.delete(key)
    return f"{key}: it is missing"


def lose_anchors(chain: Chain) -> str:
    for listed in list(chain.store.list(ANCHORS)):
        chain.store.delete(listed.key)
    return "no whole anchor is left"


def break_manifest(chain: Chain) -> str:
    chain.store.put(manifest_key(2), b"{")
    return f"{manifest_key(2)}: the manifest is not JSON"


@pytest.mark.parametrize("harm", [lose_delta, cut_delta, lose_weights_of_anchor, lose_anchors, break_manifest])
def test_gc_of_a_damaged_channel_deletes_nothing_and_says_why(tmp_path: Path, harm: Callable[[Chain], str]) -> None:
    chain = channel(tmp_path / "channel", anchor=False)
    expected = harm(chain)
    before = {listed.key for kind in ("manifests/", DELTAS, ANCHORS) for listed in chain.store.list(kind)}
    told, said, warned = gc(tmp_path / "channel")
    assert told["damage"][0].startswith("no route leads to version ")
    assert any(line.startswith(expected) for line in told["damage"])
    assert "the channel is damaged, so no version is deleted" in warned
    assert expected in warned
    assert "`weightcast verify" in warned
    assert said.startswith("0 versions deleted")
    assert {listed.key for kind in ("manifests/", DELTAS, ANCHORS) for listed in chain.store.list(kind)} == before


def test_intact_channel_has_no_damage(tmp_path: Path) -> None:
    channel(tmp_path / "channel")
    told, _, warned = gc(tmp_path / "channel")
    assert (told["damage"], told["ignored_pins"], warned) == ([], [], "")


# -- what gets younger -------------------------------------------------------------------------------------------------


def abandoned(store: ScriptedStore) -> tuple[Chain, Position, dict[str, Path], str]:
    """An anchor's upload that was killed before its record, days ago."""
    chain = channel(store, 1, anchor=False)
    head = chain.head()
    assert head is not None
    files = checkpoint(1)
    folder = anchor_folder(head.position, mark_of(files))
    for name, path in files.items():
        store.put(folder + name, path)
    store.age(3 * DAY)
    return chain, head.position, files, folder


def at_the_end_of_stock_taking(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    whole = collecting.take_stock

    def take(chain: Chain, now: float) -> collecting.Stock:
        stock = whole(chain, now)
        action()
        return stock

    monkeypatch.setattr(collecting, "take_stock", take)


def test_abandoned_upload_is_deleted() -> None:
    store = ScriptedStore()
    chain, _, files, folder = abandoned(store)
    assert set(collect(chain, Retention()).objects) == {folder + name for name in files}
    assert not store.keys(folder)


def test_upload_finished_during_gc_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ScriptedStore()
    chain, position, files, folder = abandoned(store)
    at_the_end_of_stock_taking(monkeypatch, lambda: chain.put_anchor(position, files))
    assert collect(chain, Retention()).objects == ()
    assert {key.removeprefix(folder) for key in store.keys(folder)} >= {*files, "anchor.json"}


def test_anchor_that_got_its_record_during_gc_stays_with_old_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As left by an uploader that trusts files of any age; the age of the record does not matter either."""
    store = ScriptedStore()
    chain, position, files, folder = abandoned(store)

    def finish() -> None:
        young = {listed.key: listed.modified for listed in store.list("")}
        chain.put_anchor(position, files)
        for key in store.keys(folder):
            store.times[key] = young.get(key, time.time() - 2 * DAY)

    at_the_end_of_stock_taking(monkeypatch, finish)
    assert collect(chain, Retention()).objects == ()
    assert {key.removeprefix(folder) for key in store.keys(folder)} >= {*files, "anchor.json"}


def test_upload_continued_during_gc_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ScriptedStore()
    chain, _, files, folder = abandoned(store)
    at_the_end_of_stock_taking(monkeypatch, lambda: store.put(folder + "config.json", files["config.json"]))
    assert collect(chain, Retention()).objects == ()
    assert store.keys(folder) == {folder + name for name in files}


def test_each_folder_is_checked_right_before_it_is_deleted() -> None:
    """While one abandoned upload is deleted, another continues."""
    store = ScriptedStore()
    chain, position, files, first = abandoned(store)
    second = anchor_folder(position, "f" * 64)
    for name, path in files.items():
        store.put(second + name, path)
    store.age(3 * DAY)
    early, late = sorted((first, second))

    store.before("delete", early, lambda _: store.put(late + "config.json", b"{}"))
    gone = collect(chain, Retention()).objects
    assert all(key.startswith(early) for key in gone)
    assert len(gone) == len(files)
    assert store.keys(late) == {late + name for name in files}


def test_replica_that_returns_during_gc_keeps_its_heartbeat() -> None:
    store = ScriptedStore()
    chain = channel(store, 1, anchor=False)
    word = Heartbeat("rack-1", Position(0, "0" * 64), 1.0)
    put_heartbeat(chain, word)
    store.age(100 * DAY)
    assert collect(chain, Retention(), dry_run=True).objects == (f"{REPLICAS}rack-1.json",)
    listings = store.count("list", REPLICAS)  # all that find it silent; one more comes right before it is deleted
    store.before("list", REPLICAS, lambda _: put_heartbeat(chain, word), skip=listings, times=1)
    assert collect(chain, Retention()).objects == ()
    assert store.keys(REPLICAS) == {f"{REPLICAS}rack-1.json"}


# -- references --------------------------------------------------------------------------------------------------------


def test_reference_with_a_copy_of_the_channel_record_is_still_a_reference() -> None:
    store = MemoryStore("x")
    wc.init(store, weights(0), reference=Reference("some/model", "abc"))
    chain = Chain.open(store)
    (record,) = [listed.key for listed in store.list(ANCHORS) if listed.key.endswith("/anchor.json")]
    store.put(record.replace("anchor.json", "channel.json"), store.get("channel.json"))
    stock = collecting.take_stock(chain, time.time())
    (kept,) = stock.edges
    assert (kept.edge.kind, kept.edge.key) == ("reference", record.removesuffix("anchor.json"))
    assert kept.edge.nbytes == chain.channel.table.nbytes


# -- unfinished uploads ------------------------------------------------------------------------------------------------


def leave_debris(url: Path, name: str, days: float) -> Path:
    """What a killed upload leaves in a folder that stands for a bucket."""
    path = url / ".tmp" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x" * 1000)
    when = time.time() - days * DAY
    os.utime(path, (when, when))
    return path


def test_unfinished_uploads_are_counted_and_collected_once_they_are_old(tmp_path: Path) -> None:
    url = tmp_path / "channel"
    chain = channel(url)
    old, young = leave_debris(url, "a", 2), leave_debris(url, "b", 0.1)
    assert len(debris(chain.store)) == 2
    planned = collect(chain, Retention(), dry_run=True)
    assert (len(planned.debris), planned.nbytes) == (1, 1000)
    assert old.exists()
    assert collect(chain, Retention()) == planned
    assert (old.exists(), young.exists()) == (False, True)
    assert collect(chain, Retention()).debris == ()


def test_gc_reports_unfinished_uploads(tmp_path: Path) -> None:
    url = tmp_path / "channel"
    channel(url)
    leave_debris(url, "a", 2)
    said = CliRunner().invoke(app, ["gc", str(url)]).stdout
    assert "0 objects deleted, 1.00 kB" in said
    assert "1 unfinished upload deleted" in said
    leave_debris(url, "b", 2)
    told = json.loads(CliRunner().invoke(app, ["gc", str(url), "--dry-run", "--json"]).stdout)
    assert (len(told["debris"]), told["bytes"]) == (1, 1000)


def test_status_counts_the_bytes_of_unfinished_uploads(tmp_path: Path) -> None:
    url = tmp_path / "channel"
    channel(url)
    leave_debris(url, "a", 0.1)
    told = json.loads(CliRunner().invoke(app, ["status", str(url), "--json"]).stdout)
    assert told["stored"]["unfinished"] == {"objects": 1, "bytes": 1000}
    assert "1.00 kB in 1 unfinished upload" in CliRunner().invoke(app, ["status", str(url)]).stdout


def test_reset_removes_unfinished_uploads_of_any_age(tmp_path: Path) -> None:
    url = tmp_path / "channel"
    chain = channel(url)
    left = [leave_debris(url, "a", 2), leave_debris(url, "b", 0)]
    assert reset(chain.store) > 10
    assert not any(path.exists() for path in left)


# -- reset -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"{", None])
def test_channel_whose_record_is_damaged_can_be_reset(tmp_path: Path, content: bytes | None) -> None:
    url = tmp_path / "channel"
    channel(url)
    record = url / "channel.json"
    record.unlink() if content is None else record.write_bytes(content)
    done = CliRunner().invoke(app, ["reset", str(url), "--yes", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["id"] is None
    assert not [path for path in url.rglob("*") if path.is_file()]
    wc.init(url, weights(3))


def test_reset_deletes_nothing_where_there_is_no_channel(tmp_path: Path) -> None:
    (tmp_path / "anchors").mkdir()
    (tmp_path / "anchors" / "mine.txt").write_text("precious")
    done = CliRunner().invoke(app, ["reset", str(tmp_path), "--yes"])
    assert done.exit_code == 9
    assert (tmp_path / "anchors" / "mine.txt").exists()
