"""Is the channel whole: one unreadable object hides no other, notes are no findings, a damaged record has a remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hub
import pytest
from cases import write_folder
from channels import channel_of, small_model, train
from scripted_store import ScriptedStore
from typer.testing import CliRunner

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import ANCHORS, DELTAS, SQUASHES
from weightcast.channel.records import Reference
from weightcast.cli import app
from weightcast.errors import AccessError, SpaceError, StoreError, UnreachableError
from weightcast.store import open_store
from weightcast.store.base import Store
from weightcast.upkeep.findings import Finding
from weightcast.upkeep.squash import squash
from weightcast.upkeep.verify import changed_companions, verify, verify_deep

FOUND = 3


def told(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == code, done.output
    assert done.stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def said(*arguments: str | Path, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.stdout


# -- objects that cannot be read ---------------------------------------------------------------------------------------


def refused(key: str) -> Exception:
    return AccessError("these credentials may not read that", url="memory://broken", key=key)


def unreachable(key: str) -> Exception:
    return UnreachableError("no answer in time", url="memory://broken", key=key)


def failed(key: str) -> Exception:
    return StoreError("the bucket answers 500", url="memory://broken", key=key)


def unread(key: str) -> Exception:
    return OSError(5, "Input/output error", key)


@pytest.fixture
def store(tmp_path: Path) -> ScriptedStore:
    made = ScriptedStore()
    channel_of(made, 9)
    list(squash(Chain.open(made), tmp_path / "scratch", levels=(2, 8)))
    return made


def key_of(store: Store, prefix: str) -> str:
    return next(listed.key for listed in store.list(prefix) if listed.key.endswith(".safetensors"))


def findings(store: Store, scratch: Path) -> dict[str, str]:
    return {finding.key: finding.problem for _, finding in verify_deep(Chain.open(store), scratch) if finding}


@pytest.mark.parametrize("error", [refused, unreachable, failed, unread])
@pytest.mark.parametrize(
    "prefixes",
    [
        (f"{DELTAS}000000000003",),
        (f"{DELTAS}000000000003", f"{DELTAS}000000000007"),
        (f"{SQUASHES}000000000002", f"{SQUASHES}000000000004"),
        (f"{DELTAS}000000000009", f"{SQUASHES}000000000000-000000000008"),
    ],
)
def test_unreadable_objects_are_listed_and_the_rest_is_checked(
    store: ScriptedStore, tmp_path: Path, prefixes: tuple[str, ...], error: Callable[[str], Exception]
) -> None:
    keys = {key_of(store, prefix) for prefix in prefixes}
    for key in keys:
        store.fail("get", key, error(key))
    found = findings(store, tmp_path / "walk")
    assert found.keys() - {DELTAS} == keys, "each of them, and nothing else"
    others = {listed.key for kind in (DELTAS, SQUASHES) for listed in store.list(kind)} - keys
    assert others - set(store.asked("get")) == set(), "all others were read"


def test_damage_after_an_unreadable_object_is_found(store: ScriptedStore, tmp_path: Path) -> None:
    unread_key, damaged = key_of(store, f"{DELTAS}000000000003"), key_of(store, f"{DELTAS}000000000006")
    store.fail("get", unread_key, AccessError)
    data = store.get(damaged)
    store.put(damaged, data[:-1] + bytes([data[-1] ^ 1]))
    assert {unread_key, damaged} <= findings(store, tmp_path / "walk").keys()


def test_unreadable_object_is_not_fetched_again_for_every_later_version(store: ScriptedStore, tmp_path: Path) -> None:
    for listed in list(store.list(SQUASHES)):
        store.delete(listed.key)
    key = key_of(store, f"{DELTAS}000000000002")
    store.fail("get", key, AccessError)
    store.calls.clear()
    found = findings(store, tmp_path / "walk")
    assert found[DELTAS] == "7 deltas could not be tried: their base cannot be reached"
    assert store.count("get", key) <= 2


def test_squashes_that_cannot_be_checked_are_counted(store: ScriptedStore, tmp_path: Path) -> None:
    for prefix in (
        f"{DELTAS}000000000001",
        f"{SQUASHES}000000000000-000000000002",
        f"{SQUASHES}000000000000-000000000008",
    ):
        store.fail("get", key_of(store, prefix), AccessError)
    found = findings(store, tmp_path / "walk")
    assert found[SQUASHES] == "3 squashes could not be tried: their base cannot be reached"


def test_store_that_stopped_answering_is_not_asked_for_every_object(store: ScriptedStore, tmp_path: Path) -> None:
    store.fail("get", (DELTAS, SQUASHES))
    store.calls.clear()
    with pytest.raises(UnreachableError):
        findings(store, tmp_path / "walk")
    assert store.count("get", (DELTAS, SQUASHES)) < 10


def test_full_disk_is_not_a_finding(store: ScriptedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(SpaceError):
        findings(store, tmp_path / "walk")


def test_unreadable_manifest_hides_no_other(store: ScriptedStore) -> None:
    for key, error in (("manifests/000000000003.json", unreachable), ("manifests/000000000006.json", refused)):
        store.fail("get", key, error(key))
    assert [(finding.key, finding.problem) for finding in verify(Chain.open(store))] == [
        ("manifests/000000000003.json", "no answer in time"),
        ("manifests/000000000006.json", "these credentials may not read that"),
    ]


@dataclass(frozen=True)
class World:
    url: Path
    checkpoint: Path


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A channel in a folder, begun with a checkpoint that has a configuration."""
    model = small_model()
    write_folder(tmp_path / "checkpoint", model)
    wc.init(tmp_path / "channel", tmp_path / "checkpoint")
    with wc.Publisher(tmp_path / "channel", model, threads=1) as publisher:
        for version in range(1, 4):
            train(model, version)
            publisher.publish(step=version).result(60)
    write_folder(tmp_path / "newest", model)
    return World(tmp_path / "channel", tmp_path / "newest")


def test_command_continues_and_exits_with_the_code_at_the_end(world: World) -> None:
    first, _, third = sorted((world.url / "deltas").iterdir())
    for path in (first, third):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    found = told("verify", world.url, "--deep", code=FOUND)
    assert {finding["key"] for finding in found["findings"]} >= {f"deltas/{first.name}"}
    text = said("verify", world.url, "--deep", code=FOUND)
    assert first.name in text
    assert "could not be tried" in text


# -- channel.json ------------------------------------------------------------------------------------------------------


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    at = data.index(b"up_proj")
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("damage", [cut, flipped, lambda data: b"", None])
@pytest.mark.parametrize("deep", [(), ("--deep",)])
def test_damaged_channel_record_is_a_finding_with_a_remedy(
    world: World, damage: Callable[[bytes], bytes] | None, deep: tuple[str, ...]
) -> None:
    record = world.url / "channel.json"
    whole = record.read_bytes()
    record.unlink() if damage is None else record.write_bytes(damage(whole))
    (finding,) = told("verify", world.url, *deep, code=FOUND)["findings"]
    assert finding["key"] == "channel.json"
    assert "`weightcast repair URL` restores it" in finding["problem"]
    text = said("verify", world.url, *deep, code=FOUND)
    assert "`weightcast repair URL` restores it" in text
    assert "1 finding; `weightcast repair` restores" in text
    told("repair", world.url)
    assert record.read_bytes() == whole
    assert told("verify", world.url, *deep)["findings"] == []


def test_damaged_copy_of_the_channel_record_is_a_finding(world: World) -> None:
    (copy,) = (world.url / "anchors").rglob("channel.json")
    copy.write_bytes(flipped(copy.read_bytes()))
    (finding,) = told("verify", world.url, code=FOUND)["findings"]
    assert finding["key"] == str(copy.relative_to(world.url))


def test_folder_that_is_not_a_channel_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert done.exit_code == 2
    assert "this folder is not a channel" in done.stderr


# -- notes -------------------------------------------------------------------------------------------------------------


def publish_anchor(world: World) -> None:
    done = CliRunner().invoke(app, ["publish", str(world.url), str(world.checkpoint), "--anchor"])
    assert done.exit_code == 0, done.output


def test_changed_companion_files_are_notes_not_findings(world: World) -> None:
    (world.checkpoint / "config.json").write_text('{"model_type": "changed"}')
    (world.checkpoint / "generation_config.json").write_text("{}")
    model = small_model()
    for version in range(1, 5):
        train(model, version)
    write_folder(world.checkpoint.parent / "next", model)
    shutil.copy(world.checkpoint / "config.json", world.checkpoint.parent / "next" / "config.json")
    (world.checkpoint.parent / "next" / "generation_config.json").write_text("{}")
    publish_anchor(World(world.url, world.checkpoint.parent / "next"))
    found = told("verify", world.url)
    assert found["findings"] == []
    assert found["notes"] == [
        "config.json of version 4's anchor differs from that of version 0's",
        "generation_config.json of version 4's anchor is not in version 0's",
    ]
    text = said("verify", world.url)
    assert "note: config.json of version 4's anchor differs from that of version 0's\n" in text
    assert "intact up to version 4" in text


def test_anchors_with_the_same_files_beside_them_give_no_note(world: World, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["squash", str(world.url), "--anchor"])
    assert done.exit_code == 0, done.output
    assert len(Chain.open(open_store(world.url)).anchor_edges()) == 2
    assert list(changed_companions(Chain.open(open_store(world.url)))) == []


# -- a channel that begins at a checkpoint elsewhere -------------------------------------------------------------------


@pytest.fixture
def hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub.Hub]:
    with hub.found(tmp_path / "hub") as found:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", found.environment["HF_HUB_CACHE"])
        write_folder(tmp_path / "model", small_model())
        found.make_model("model", tmp_path / "model")
        yield found


def begun_elsewhere(url: Path) -> None:
    wc.init(url, Reference("tester/model", "main"))
    model = small_model()
    with wc.Publisher(url, model, threads=1) as publisher:
        for version in range(1, 4):
            train(model, version)
            publisher.publish(step=version).result(60)


def test_deep_starts_at_a_referenced_checkpoint(hugging_face: hub.Hub, tmp_path: Path) -> None:
    url = tmp_path / "channel"
    begun_elsewhere(url)
    found = told("verify", url, "--deep")
    assert (found["findings"], found["proven_objects"]) == ([], 4)
    path = sorted((url / "deltas").iterdir())[1]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert f"deltas/{path.name}" in said("verify", url, "--deep", code=FOUND)


def test_deep_reports_what_it_could_not_check(
    hugging_face: hub.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = tmp_path / "channel"
    begun_elsewhere(url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr("weightcast.follow.fetch.bring", away)
    reference, deltas = told("verify", url, "--deep", code=FOUND)["findings"]
    assert reference["key"].startswith(ANCHORS)
    assert "the checkpoint that this anchor refers to could not be fetched: the Hub is away" in reference["problem"]
    assert "`weightcast verify FOLDER URL`" in reference["problem"]
    assert deltas["problem"].startswith("3 deltas could not be tried")


def away(*_: object, **__: object) -> None:
    raise StoreError("the Hub is away", url="https://huggingface.co/tester/model")


# -- words -------------------------------------------------------------------------------------------------------------


def test_report_promises_no_more_than_digests_hold(world: World) -> None:
    helped = " ".join(said("verify", "--help").replace("│", " ").split())
    assert "not an attacker who can write to the bucket" in helped
    commands = ((world.url,), (world.url, "--deep"), (world.checkpoint, world.url))
    texts = [said("verify", *command) for command in commands]
    for promise in ("proven", "bit by bit", "to the last bit"):
        assert not any(promise in text for text in texts)
    assert texts[1] == "intact up to version 3: 4 objects decoded, and all digests agree\n"
    assert "every tensor has the digest that it has in version 3" in texts[2]


def test_finding_of_an_error_has_the_message_of_the_error() -> None:
    assert Finding.of("k", OSError()) == Finding("k", "OSError")


# -- a folder ----------------------------------------------------------------------------------------------------------


def test_folder_with_an_unfolded_log_reports_the_version_of_its_files(tmp_path: Path) -> None:
    bucket, mirror = tmp_path / "bucket", tmp_path / "mirror"
    channel_of(open_store(bucket), 3)
    for version in (0, 3):
        with wc.Subscriber(bucket, mirror, wc.Pinned(version), threads=1, fold=False) as subscriber:
            staged = subscriber.poll()
            assert staged is not None
            subscriber.apply(staged)
    lagging = told("verify", mirror, bucket)
    assert (lagging["version"], lagging["files_at"], lagging["log_leads_to"]) == (3, 0, 3)
    assert "tools that load the files get version 0" in said("verify", mirror, bucket)
    with wc.Subscriber(bucket, mirror, threads=1) as subscriber:
        subscriber.poll()
    folded = told("verify", mirror, bucket)
    assert (folded["version"], folded["files_at"], folded["log_leads_to"]) == (3, 3, None)
