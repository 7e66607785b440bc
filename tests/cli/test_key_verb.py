"""`weightcast key`, and `--trust` and `--sign` of the other verbs."""

from __future__ import annotations

import json
import logging
import stat
from pathlib import Path

import pytest
from cli_world import USAGE, facts, run
from collisions import forged
from signed_channel import SignedChannel, arrays, bits_of

from weightcast.channel.keys import manifest_key
from weightcast.channel.tags import set_tag
from weightcast.disk.checkpoint import save
from weightcast.follow.mirror_folder import default_mirror

TRUST = 15


@pytest.fixture
def channel(tmp_path: Path) -> SignedChannel:
    return SignedChannel(tmp_path, 2)


def root(channel: SignedChannel) -> str:
    return channel.trust


def test_new_key_is_for_its_owner_alone(tmp_path: Path) -> None:
    told = facts("key", "new", tmp_path / "a.key")
    assert stat.S_IMODE((tmp_path / "a.key").stat().st_mode) == 0o600
    assert (tmp_path / "a.key.pub").read_text() == f"{told['public']}\n"
    assert told == {"private": str(tmp_path / "a.key"), "public": told["public"], "id": told["id"]}
    secret = (tmp_path / "a.key").read_text().split()[-1]
    for shown in (run("key", "show", tmp_path / "a.key"), run("key", "show", tmp_path / "a.key.pub")):
        assert shown.code == 0
        assert told["public"] in shown.out
        assert secret not in shown.out + shown.err
    assert run("key", "new", tmp_path / "a.key").code == USAGE
    (tmp_path / "a.key").chmod(0o644)
    done = run("key", "show", tmp_path / "a.key")
    assert done.code == USAGE
    assert secret not in done.out + done.err


def test_list_of_keys_is_shown_as_the_root_signed_it(channel: SignedChannel) -> None:
    channel.revoke("writer", last=2)
    channel.add("stranger", "writer", "cutter", first=3)
    told = facts("key", "show", channel.url, "--trust", root(channel))
    assert told["number"] == 4
    rows = {(row["id"], row["role"], row["first"], row["last"]) for row in told["keys"]}
    assert rows == {
        (channel.public("writer").id, "writer", 0, 2),
        (channel.public("cutter").id, "cutter", 0, None),
        (channel.public("stranger").id, "writer", 3, None),
        (channel.public("stranger").id, "cutter", 3, None),
    }


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("add", "{url}", "{stranger}"), USAGE),
        (("add", "{url}", "{stranger}", "--role", "writer"), USAGE),
        (("add", "{url}", "{stranger}", "--role", "king", "--sign", "{root}"), USAGE),
        (("add", "{url}", "{stranger}", "--role", "writer", "--sign", "{cutter}"), TRUST),
        (("add", "{url}", "{root_public}", "--role", "writer", "--sign", "{root}"), USAGE),
        (("revoke", "{url}", "{stranger}", "--sign", "{root}"), USAGE),
        (("revoke", "{url}", "0000000000000000", "--sign", "{root}"), USAGE),
        (("show", "{url}", "--trust", "{stranger}"), TRUST),
        (("show", "{home}/none.key"), USAGE),
        (("new", "{home}/x.key", "--sign", "{root}"), USAGE),
    ],
)
def test_what_the_list_cannot_have_is_refused(channel: SignedChannel, arguments: tuple[str, ...], code: int) -> None:
    known = {"url": channel.url, "home": channel.home, "root_public": root(channel)}
    known |= {"stranger": channel.public("stranger"), "root": channel.file("root"), "cutter": channel.file("cutter")}
    before = channel.snapshot()
    done = run("key", *(argument.format(**known) for argument in arguments))
    assert done.code == code, done.err
    assert channel.snapshot() == before


def test_private_key_comes_from_a_variable(channel: SignedChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOT_KEY", channel.file("root").read_text())
    done = run("key", "add", channel.url, channel.public("stranger"), "--role", "replica", "--sign", "env:ROOT_KEY")
    assert done.code == 0, done.err
    assert channel.file("root").read_text().split()[-1] not in done.out + done.err


def test_private_key_is_in_no_output_log_event_or_error(
    channel: SignedChannel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("WRITER_KEY", channel.file("writer").read_text())
    events, mirror = channel.home / "events.jsonl", channel.home / "mirror"
    checkpoint = channel.home / "checkpoint"
    checkpoint.mkdir()
    save(arrays(bits_of(3)), checkpoint)
    publish = ("publish", channel.url, checkpoint, "--mirror", mirror, "--trust", root(channel), "--events", events)
    done = [run(*publish, "--sign", "env:WRITER_KEY", "--json")]
    assert done[0].code == 0, done[0].err
    channel.revoke("writer")
    done += [run(*publish, "--sign", "env:WRITER_KEY"), run(*publish, "--sign", channel.file("cutter"))]
    channel.path("channel.json").write_bytes(b"{")
    done += [run(*publish, "--sign", "env:WRITER_KEY"), run(*publish, "--sign", channel.file("writer"), "--codec", "x")]
    assert all(one.code for one in done[1:])
    told = "".join(one.out + one.err for one in done) + caplog.text + events.read_text()
    for name in ("writer", "cutter"):
        assert channel.keys[name].secret().hex() not in told


def test_version_without_a_signature_is_refused_by_every_verb_with_a_key(channel: SignedChannel) -> None:
    url, mirror, trust = channel.url, channel.home / "mirror", ("--trust", root(channel))
    assert run("pull", url, mirror, *trust).code == 0
    assert run("attach", url, "--command", "true", "--mirror", channel.home / "m", "--once", *trust).code == 0
    channel.publish()
    channel.rewrite(manifest_key(3), signature=None, signer=None)
    assert run("pull", url, mirror).code == TRUST
    assert run("attach", url, "--command", "true", "--mirror", channel.home / "m", "--once").code == TRUST
    assert run("squash", url, "--sign", channel.file("cutter"), *trust).code == TRUST
    assert run("gc", url, "--dry-run", *trust).code == TRUST
    assert run("verify", mirror, url).code == TRUST
    done = run("verify", url, *trust, "--json")
    assert done.code not in (0, 1)
    assert "not signed" in done.out
    assert run("verify", url).code == 0, "without a key nothing is wrong"
    told = json.loads(run("pull", url, mirror, "--json").out)
    assert "not signed" in json.dumps(told)


def test_forged_squash_is_found(channel: SignedChannel) -> None:
    channel.put_squash(0, forged(bits_of(2), 50))
    done = run("verify", channel.url, "--trust", root(channel))
    assert done.code == 3
    assert "not signed by a cutter's key" in done.out


def test_bucket_that_was_put_back_is_taken_when_it_is_allowed(channel: SignedChannel) -> None:
    old, mirror = channel.snapshot(), channel.home / "mirror"
    channel.publish()
    assert run("pull", channel.url, mirror, "--trust", root(channel)).code == 0
    channel.put_back(old)
    assert run("pull", channel.url, mirror).code == TRUST
    assert facts("pull", channel.url, mirror, "--allow-rollback")["version"] == 2
    assert run("pull", channel.url, mirror, "--max-age", "1h").code == 0


def test_tag_is_no_word_of_the_root(channel: SignedChannel) -> None:
    assert run("tag", channel.url, "1", "best").code == 0

    def pull(*more: str) -> int:
        return run("pull", channel.url, channel.home / "mirror", "--version", *more).code

    assert pull("best", "--trust", root(channel)) == TRUST
    assert pull("1", "--trust", root(channel)) == 0
    assert pull("best", "--allow-rollback") == 0


def test_key_needs_a_mirror_that_the_bucket_does_not_name(channel: SignedChannel) -> None:
    done = run("attach", channel.url, "--command", "true", "--once", "--trust", root(channel))
    assert (done.code, "--mirror" in done.err) == (USAGE, True)
    done = run("publish", channel.url, channel.home, "--sign", channel.file("writer"), "--trust", root(channel))
    assert (done.code, "--mirror" in done.err) == (USAGE, True)


def test_options_of_a_signed_channel_need_a_key(channel: SignedChannel) -> None:
    for option in (("--allow-rollback",), ("--max-age", "1h")):
        assert run("pull", channel.url, channel.home / "plain", *option).code == USAGE


def test_collector_with_a_key_does_not_keep_what_no_reader_would_use(channel: SignedChannel) -> None:
    channel.publish(7)
    channel.squash()
    (honest,) = (listed.key for listed in channel.store.list("squashes/"))
    evil = channel.put_squash(0, forged(bits_of(9), 50))
    told = facts("gc", channel.url, "--grace", "0s", "--dry-run", "--trust", root(channel))
    assert evil in told["objects"]
    assert honest not in told["objects"]
    assert evil not in facts("gc", channel.url, "--grace", "0s", "--dry-run")["objects"]


def test_reset_leaves_no_key_list(channel: SignedChannel) -> None:
    assert run("reset", channel.url, "--yes").code == 0
    assert list(channel.store.list("")) == []


def test_engine_is_not_pinned_by_a_tag_where_the_default_mirror_has_recorded_a_key(channel: SignedChannel) -> None:
    chain = channel.chain()
    set_tag(chain, "good", chain.manifest(1).position)
    assert run("pull", channel.url, default_mirror(chain.channel.id), "--trust", root(channel)).code == 0
    done = run("attach", channel.url, "--command", "true", "--once", "--version", "good")
    assert done.code == TRUST
    assert "tags are not signed" in done.err
