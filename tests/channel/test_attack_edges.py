"""Edges where a careful attacker got through: records that readers refuse, shared names, paths that are not text."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from channels import channel_of, small_model, train
from scripted_store import ScriptedStore
from typer.testing import CliRunner

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import CHANNEL, MANIFESTS, Position, delta_key, manifest_key
from weightcast.channel.records import Heartbeat, Manifest, dump_record, load_record
from weightcast.channel.retention import Retention
from weightcast.cli import app
from weightcast.disk.checkpoint import MIRROR, save
from weightcast.errors import BusyError, ConflictError, UnreachableError, UsageError
from weightcast.follow.heartbeat_sender import HeartbeatSender, default_replica, error_text
from weightcast.store import open_store
from weightcast.store.file import FileStore
from weightcast.store.memory import MemoryStore
from weightcast.upkeep.collect import collect
from weightcast.upkeep.repair import repair
from weightcast.upkeep.verify import verify


def told(*arguments: str | Path) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def pulled(bucket: Path | MemoryStore, target: Path) -> None:
    with wc.Subscriber(bucket, target, threads=1) as subscriber:
        staged = subscriber.poll()
        if staged is not None:
            subscriber.apply(staged)


# -- records that every reader would refuse ----------------------------------------------------------------------------


@pytest.mark.parametrize("step", [-1, 2**63, True, 1.5, "3"])
def test_step_that_readers_refuse_is_refused_before_anything_is_sent(step: Any) -> None:
    store, model = MemoryStore("steps"), small_model()
    with pytest.raises(UsageError, match="not a training step"):
        wc.init(store, model, step=step)
    assert list(store.list("")) == []
    with wc.Publisher(store, model, threads=1) as publisher:
        train(model, 1)
        with pytest.raises(UsageError, match="not a training step"):
            publisher.publish(step=step)
        assert publisher.publish(step=np.int64(3)).result(30).step == 3  # type: ignore[arg-type]


def test_writer_that_readers_refuse_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be the name of a writer"):
        wc.init(MemoryStore("writers"), small_model(), writer="x" * 101)


def test_file_name_that_readers_refuse_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save(small_model(), folder)
    (folder / "model.safetensors").rename(folder / f"{'m' * 220}.safetensors")
    with pytest.raises(UsageError, match="an anchor cannot hold"):
        wc.init(tmp_path / "bucket", folder)


# -- commits -----------------------------------------------------------------------------------------------------------


def test_loser_whose_withdrawal_failed_withdraws_when_it_tries_again() -> None:
    store = ScriptedStore()
    store.overwrite()
    channel_of(store, 1)
    chain = Chain.open(store)
    before = chain.manifest(1)

    def commit_of(writer: str, digest: str) -> Manifest:
        position = Position(2, digest * 64)
        ref = replace(before.objects[0], key=delta_key(position, before.objects[0].sha256))
        return chain.draft(position, before.position, ref, "gap", 1, 2, writer)

    ours, other = commit_of("loser", "1"), manifest_key(2, "winner")
    winning = dump_record(commit_of("winner", "2"))

    # The winner's commit appears between the loser's two listings, and the loser cannot withdraw at once.
    store.after("put", lambda key: "-loser-" in key, lambda _: store.put(other, winning))
    store.fail("delete", MANIFESTS, times=1)
    losing = Chain.open(store)
    with pytest.raises(UnreachableError):
        losing.commit(ours)
    with pytest.raises(ConflictError):
        losing.commit(ours)
    assert [listed.key for listed in store.list(f"{MANIFESTS}000000000002")] == [other]


def test_create_ignores_another_link_of_its_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, link = FileStore(tmp_path / "bucket"), os.link
    assert store.create("key", b"theirs")

    def linked(source: str, target: str, **folders: Any) -> None:
        copied = tmp_path / "copied"
        if not copied.exists():  # as `cp -al` of the whole bucket does
            link(source, copied, src_dir_fd=folders["src_dir_fd"])
        link(source, target, **folders)

    monkeypatch.setattr(os, "link", linked)
    assert not store.create("key", b"ours")
    assert store.get("key") == b"theirs"


# -- gc, verify, repair ------------------------------------------------------------------------------------------------


def test_object_named_for_the_other_fence_is_not_a_version_and_verify_names_it() -> None:
    store = MemoryStore("fence")
    channel_of(store, 2)
    stray = f"{MANIFESTS}000005000000-x.json"
    store.put(stray, b"{}")
    chain = Chain.open(store)
    assert collect(chain, Retention(0, 0, 0), dry_run=True).damage == ()
    assert [finding.key for finding in verify(chain)] == [stray]


def test_stray_manifest_of_another_channel_does_not_make_repair_give_up() -> None:
    store, other = MemoryStore("ours"), MemoryStore("other")
    for one in (store, other):
        channel_of(one, 2)
    store.put(manifest_key(7), other.get(manifest_key(2)))
    whole = store.get(CHANNEL)
    assert repair(store) is None
    store.put(CHANNEL, whole[:50])
    assert repair(store) is not None
    assert store.get(CHANNEL) == whole


# -- mirrors -----------------------------------------------------------------------------------------------------------


def test_copy_of_a_mirror_by_hard_links_is_followed_beside_the_original(tmp_path: Path) -> None:
    bucket, mirror, copy = tmp_path / "bucket", tmp_path / "mirror", tmp_path / "copy"
    channel_of(open_store(bucket), 1)
    pulled(bucket, mirror)
    with wc.Subscriber(bucket, mirror, threads=1) as one:
        shutil.copytree(mirror, copy, copy_function=os.link)
        with wc.Subscriber(bucket, copy, threads=1) as other:
            assert one.position == other.position
            for folder in (mirror, copy):
                with pytest.raises(BusyError):
                    wc.Subscriber(bucket, folder, threads=1)
            with wc.reading(copy):
                assert (copy / MIRROR / "lock").lstat().st_nlink == 1


def test_digest_of_an_edited_mirror_claims_no_version(tmp_path: Path) -> None:
    bucket, mirror = tmp_path / "bucket", tmp_path / "mirror"
    channel_of(open_store(bucket), 1)
    pulled(bucket, mirror)
    assert told("digest", mirror)["version"] == 1
    with (mirror / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\1\2\3\4")
    assert told("digest", mirror)["version"] is None


def test_bucket_in_a_path_that_is_not_utf_8_is_mirrored(tmp_path: Path) -> None:
    bucket = Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xff"))
    channel_of(FileStore(bucket), 1)
    for _ in range(2):
        pulled(bucket, tmp_path / "mirror")
    assert default_replica(bucket) != default_replica(tmp_path)


# -- heartbeats --------------------------------------------------------------------------------------------------------


def test_heartbeat_survives_a_note_that_cannot_be_written(tmp_path: Path) -> None:
    store = MemoryStore("beats")
    channel_of(store, 1)
    chain = Chain.open(store)
    (tmp_path / "instance").mkdir()
    HeartbeatSender("replica", tmp_path / "instance").report(chain, chain.manifest(1).position)
    assert len(list(store.list("replicas/"))) == 1


@pytest.mark.parametrize("text", ["file a\x1b[2Jb", "file \udcff", "", " \n "])
def test_error_with_unprintable_text_is_a_heartbeat_that_can_be_read(text: str) -> None:
    beat = Heartbeat("replica", Position(1, "0" * 64), 1.0, error_text(UsageError(text)))
    assert load_record(Heartbeat, dump_record(beat)) == beat
