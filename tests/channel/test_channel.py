"""Publishing and following: what a publisher promises, what a subscriber promises, on stores that behave."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from cases import same_bits, write_folder
from channels import blank, channel_of, head_of, pull, small_model, train
from scripted_store import ScriptedStore

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import heartbeats
from weightcast.channel.keys import SQUASHES
from weightcast.channel.records import Reference
from weightcast.channel.retention import Retention
from weightcast.errors import (
    ChannelError,
    ConflictError,
    MissingError,
    UnreachableError,
    UsageError,
)
from weightcast.follow.mirror import Mirror
from weightcast.publish.from_checkpoint import cut_anchor, publish
from weightcast.store.base import Store
from weightcast.store.file import FileStore
from weightcast.store.memory import MemoryStore
from weightcast.upkeep.collect import collect, reset
from weightcast.upkeep.squash import squash
from weightcast.upkeep.verify import verify, verify_deep


@pytest.fixture
def store() -> Store:
    return MemoryStore()


# -- init ------------------------------------------------------------------------------------------------------------


def test_a_channel_begins_with_an_anchor_that_any_tool_can_load(store: Store) -> None:
    model = small_model()
    manifest = wc.init(store, model, step=7)
    assert (manifest.position.version, manifest.base, manifest.step) == (0, None, 7)
    assert manifest.position.digest == wc.fingerprint(model).digest
    there = blank(model)
    assert pull(store, there) == manifest.position
    assert same_bits(there, model)


def test_a_second_channel_in_the_same_place_is_refused(store: Store) -> None:
    wc.init(store, small_model())
    with pytest.raises(ConflictError, match="a channel here already"):
        wc.init(store, small_model(1))


def test_an_interrupted_init_is_completed_by_another(store: Store) -> None:
    model = small_model()
    chain = Chain.create(store, model.table)
    manifest = wc.init(store, model)
    assert manifest.channel == chain.channel.id
    assert pull(store, blank(model)) == manifest.position


def test_an_anchor_by_reference_uploads_no_weights(store: Store, tmp_path: Path) -> None:
    model = small_model()
    manifest = wc.init(store, model, reference=Reference("org/model", "abc123"))
    assert not any(listed.key.endswith(".safetensors") for listed in store.list(""))
    here = wc.Arrays.copy_of(model)
    assert pull(store, here) == manifest.position
    with wc.Publisher(store, model) as publisher:
        train(model, 1)
        publisher.publish()
    assert pull(store, here).version == 1
    assert same_bits(here, model)
    with pytest.raises(ChannelError, match="Download org/model at abc123 into the replica's folder first"):
        pull(store, tmp_path / "empty")


# -- publish ---------------------------------------------------------------------------------------------------------


# -- restart ---------------------------------------------------------------------------------------------------------


# -- follow ----------------------------------------------------------------------------------------------------------


def test_poll_touches_nothing_and_apply_asks_the_store_for_nothing(store: Store) -> None:
    states = channel_of(store, 3)
    there = wc.Arrays.copy_of(states[0])
    counting = ScriptedStore(store)
    with wc.Subscriber(counting, there) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        assert same_bits(there, states[0])
        asked = len(counting.calls)
        subscriber.apply(staged)
        assert len(counting.calls) == asked
    assert same_bits(there, states[3])


@pytest.mark.parametrize("start", [0, 2, 4])
def test_a_follower_is_found_by_its_bits_wherever_it_stands(store: Store, start: int) -> None:
    states = channel_of(store, 4)
    there = wc.Arrays.copy_of(states[start])
    counting = ScriptedStore(store)
    assert pull(counting, there) == head_of(store)
    assert not counting.asked("get", "anchors/")
    assert same_bits(there, states[4])


def test_the_policy_every_misses_no_version(store: Store) -> None:
    states = channel_of(store, 5)
    there = wc.Arrays.copy_of(states[0])
    with wc.Subscriber(store, there, wc.Every()) as subscriber:
        for version in range(1, 6):
            staged = subscriber.poll()
            assert staged is not None
            assert subscriber.apply(staged).version == version
            assert same_bits(there, states[version])
        assert subscriber.poll() is None


def test_the_policy_pinned_goes_back_as_well(store: Store) -> None:
    states = channel_of(store, 5)
    there = wc.Arrays.copy_of(states[5])
    with wc.Subscriber(store, there, wc.Pinned(2)) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        assert same_bits(there, states[2])
        assert subscriber.poll() is None


def test_the_policy_at_least_stays_until_it_is_asked_for_more(store: Store) -> None:
    states = channel_of(store, 5)
    there = wc.Arrays.copy_of(states[3])
    with wc.Subscriber(store, there, wc.AtLeast(2)) as subscriber:
        assert subscriber.poll() is None
        subscriber.policy = wc.AtLeast(4)
        staged = subscriber.poll()
        assert staged is not None
        assert subscriber.apply(staged).version == 5


def test_follow_goes_on_until_it_is_stopped(store: Store) -> None:
    model = small_model()
    wc.init(store, model)
    there = wc.Arrays.copy_of(model)
    seen: list[int] = []
    with wc.Publisher(store, model) as publisher, wc.Subscriber(store, there) as subscriber:

        def follow() -> None:
            for update in subscriber.follow(every=0.01):
                seen.append(update.position.version)
                if update.position.version == 5:
                    subscriber.stop()

        thread = threading.Thread(target=follow)
        thread.start()
        for step in range(1, 6):
            train(model, step)
            publisher.publish(step=step).result(60)
        thread.join(60)
        assert not thread.is_alive()
    assert seen == sorted(set(seen))
    assert seen[-1] == 5
    assert same_bits(there, model)


def test_trouble_is_told_and_following_goes_on(store: Store) -> None:
    states = channel_of(store, 1)

    flaky = ScriptedStore(store)
    flaky.fail("get", "manifests/", times=2)
    there, told = wc.Arrays.copy_of(states[0]), []
    with wc.Subscriber(flaky, there) as subscriber:
        for update in subscriber.follow(every=0.01, on_error=told.append):
            assert update.position.version == 1
            subscriber.stop()
    assert [type(error) for error in told] == [UnreachableError, UnreachableError]


def test_without_anyone_to_tell_trouble_ends_following(store: Store) -> None:
    states = channel_of(store, 1)
    with wc.Subscriber(store, states[0]) as subscriber:
        for listed in list(store.list("channel")) + list(store.list("manifests")) + list(store.list("deltas")):
            store.delete(listed.key)
        with pytest.raises(ChannelError):
            next(subscriber.follow(every=0.01))


def test_a_follower_outlives_a_reset(store: Store, tmp_path: Path) -> None:
    states = channel_of(store, 3)
    there = wc.Arrays.copy_of(states[3])
    with wc.Subscriber(store, there) as arrays, wc.Subscriber(store, tmp_path / "mirror") as mirror:
        assert arrays.poll() is None
        staged = mirror.poll()
        assert staged is not None
        mirror.apply(staged)
        reset(store)
        new = small_model(9)
        wc.init(store, new)
        for subscriber in (arrays, mirror):
            assert next(subscriber.follow(every=0.0)).position == head_of(store)
        assert same_bits(there, new)
        weights = mirror.weights
        assert weights is not None
        assert all(np.array_equal(weights.read(spec.name), new.read(spec.name)) for spec in new.table)


def test_a_version_collected_under_an_idle_follower_is_noticed(store: Store) -> None:
    states = channel_of(store, 6)
    there = wc.Arrays.copy_of(states[2])
    with wc.Subscriber(store, there) as subscriber:
        subscriber.policy = wc.Pinned(2)
        assert subscriber.poll() is None
        squashed = list(squash(Chain.open(store), _scratch(), levels=(2,)))
        assert squashed
        for version in (3, 5):  # what a collector does once it is old
            store.delete(f"manifests/{version:012d}.json")
        subscriber.policy = wc.Newest()
        assert next(subscriber.follow(every=0.0)).position.version == 6
    assert same_bits(there, states[6])


def _scratch() -> Path:
    import tempfile

    return Path(tempfile.mkdtemp(prefix="weightcast-test-"))


# -- squash, verify --------------------------------------------------------------------------------------------------


def test_a_squash_leads_where_its_deltas_lead(store: Store, tmp_path: Path) -> None:
    states = channel_of(store, 17)
    cut = list(squash(Chain.open(store), tmp_path / "scratch"))
    assert [(edge.base, edge.result) for edge in cut] == [(0, 8), (8, 16)]
    counting = ScriptedStore(store)
    there = wc.Arrays.copy_of(states[0])
    pull(counting, there)
    fetched = set(counting.asked("get", ("deltas/", SQUASHES)))
    assert len(fetched) == 3, "two squashes and the last delta"
    assert same_bits(there, states[17])
    assert list(squash(Chain.open(store), tmp_path / "scratch")) == []


def test_wide_squashes_are_made_of_narrow_ones(store: Store, tmp_path: Path) -> None:
    states = channel_of(store, 9)
    cut = list(squash(Chain.open(store), tmp_path / "scratch", levels=(2, 4, 8)))
    assert [(edge.base, edge.result) for edge in cut] == [(0, 2), (2, 4), (4, 6), (6, 8), (0, 4), (4, 8), (0, 8)]
    there = wc.Arrays.copy_of(states[0])
    pull(store, there)
    assert same_bits(there, states[9])
    assert [finding for _, finding in verify_deep(Chain.open(store), tmp_path / "walk") if finding] == []


def test_squashing_again_later_goes_on_where_it_ended(store: Store, tmp_path: Path) -> None:
    model = small_model()
    wc.init(store, model)
    for round_ in range(3):
        with wc.Publisher(store, model) as publisher:
            for step in range(4):
                train(model, 10 * round_ + step)
                publisher.publish().result(60)
        counting = ScriptedStore(store)
        cut = list(squash(Chain.open(counting), tmp_path / "scratch", levels=(4,)))
        assert [(edge.base, edge.result) for edge in cut] == [(4 * round_, 4 * round_ + 4)]
        anchors = [key for key in counting.asked("get") if key.endswith("model.safetensors")]
        assert bool(anchors) == (round_ == 0)


def test_a_whole_channel_verifies_and_every_kind_of_damage_is_found(store: Store, tmp_path: Path) -> None:
    channel_of(store, 9)
    chain = Chain.open(store)
    list(squash(chain, tmp_path / "scratch"))
    assert list(verify(chain)) == []
    for i, prefix in enumerate(("deltas/000000000005", "squashes/", "anchors/000000000000")):
        key = next(o.key for o in store.list(prefix) if o.key.endswith(".safetensors"))
        good = store.get(key)
        store.put(key, good[:-1] + bytes([good[-1] ^ 1]))
        findings = {f.key for _, f in verify_deep(chain, tmp_path / f"walk{i}") if f}
        assert any(key.startswith(found) for found in findings)
        store.put(key, good[:-1])
        if prefix != "squashes/":  # whose size no record states
            assert key in {finding.key for finding in verify(chain)}
        store.put(key, good)
    store.delete("manifests/000000000004.json")
    assert list(verify(chain)) == [], "a collected manifest is no damage"
    (untried,) = (f for _, f in verify_deep(chain, tmp_path / "walk9") if f)
    assert untried.problem.startswith("3 deltas could not be tried"), "nothing leads to 5, 6 and 7 any more"


# -- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_is_published_against_a_mirror_of_the_head(store: Store, tmp_path: Path) -> None:
    model = small_model()
    write_folder(tmp_path / "step0", model)
    wc.init(store, tmp_path / "step0")
    for step in (1, 2, 3):
        train(model, step)
        write_folder(tmp_path / f"step{step}", model, shards=step)
        published = publish(store, tmp_path / f"step{step}", tmp_path / "mirror", step=step)
        assert (published.new, published.manifest.position.version) == (True, step)
    again = publish(store, tmp_path / "step3", tmp_path / "mirror", step=3)
    assert (again.new, again.manifest.position.version) == (False, 3)
    pull(store, tmp_path / "replica")
    chain = Chain.open(store)
    mirror = Mirror(tmp_path / "replica", chain.channel.id, chain.channel.table)
    mirror.fold()
    mirror.close()
    with wc.reading(tmp_path / "replica") as replica:
        assert same_bits(replica, model)
    assert (tmp_path / "replica" / "config.json").read_text() == '{"model_type": "test"}'


def test_a_publishing_mirror_that_was_edited_heals_itself_first(store: Store, tmp_path: Path) -> None:
    model = small_model()
    write_folder(tmp_path / "step0", model)
    wc.init(store, tmp_path / "step0")
    train(model, 1)
    write_folder(tmp_path / "step1", model)
    publish(store, tmp_path / "step1", tmp_path / "mirror")
    victim = next((tmp_path / "mirror").glob("*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    train(model, 2)
    write_folder(tmp_path / "step2", model)
    assert publish(store, tmp_path / "step2", tmp_path / "mirror").manifest.position.version == 2
    there = blank(model)
    pull(store, there)
    assert same_bits(there, model)


def test_a_missing_version_is_missing(store: Store) -> None:
    channel_of(store, 1)
    with pytest.raises(MissingError):
        Chain.open(store).manifest(9)


# -- what followers leave behind -------------------------------------------------------------------------------------


def test_a_pull_that_gets_nothing_leaves_no_folder(store: Store, tmp_path: Path) -> None:
    wc.init(store, small_model(), reference=Reference("org/model", "main"))
    with pytest.raises(ChannelError, match="Download org/model"):
        pull(store, tmp_path / "replica")
    assert not (tmp_path / "replica").exists()


def test_heartbeats_tell_where_a_replica_ended(store: Store) -> None:
    states = channel_of(store, 3)
    there = wc.Arrays.copy_of(states[0])
    with wc.Subscriber(store, there, wc.Every(), replica="eu-1") as subscriber:
        for _ in range(3):
            staged = subscriber.poll()
            assert staged is not None
            subscriber.apply(staged)
    ((beat, _),) = heartbeats(Chain.open(store))
    assert (beat.replica, beat.position, beat.error) == ("eu-1", head_of(store), None)


def test_a_bucket_that_is_gone_is_no_idle_one(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "bucket")
    states = channel_of(store, 1)
    with wc.Subscriber(store, states[1], replica="eu-1") as subscriber:
        assert subscriber.poll() is None
        (tmp_path / "bucket").rename(tmp_path / "elsewhere")
        with pytest.raises(MissingError, match="the folder does not exist"):
            subscriber.poll()
    assert not (tmp_path / "bucket").exists()


# -- what a reviewer found ---------------------------------------------------------------------------------------------


def test_a_replica_ahead_of_a_bucket_that_was_put_back_follows_what_is_there_now(tmp_path: Path) -> None:
    bucket = FileStore(tmp_path / "bucket")
    states = channel_of(bucket, 3)
    pull(bucket, tmp_path / "mirror")
    for kind in ("manifests", "deltas"):
        for listed in list(bucket.list(f"{kind}/000000000003")):
            bucket.delete(listed.key)
    assert pull(bucket, tmp_path / "mirror").version == 2
    with wc.Publisher(bucket, states[2]) as publisher:
        train(states[2], 77)
        publisher.publish().result(60)
    follower = wc.Arrays.copy_of(states[3])
    assert pull(bucket, follower) == head_of(bucket)
    assert same_bits(follower, states[2])
    assert pull(bucket, tmp_path / "mirror") == head_of(bucket)


def test_a_record_of_an_anchor_that_was_exchanged_is_found_out(store: Store, tmp_path: Path) -> None:
    channel_of(store, 1)
    key = next(listed.key for listed in store.list("anchors/") if listed.key.endswith("anchor.json"))
    store.put(key, store.get(key).replace(b'"reference":null', b'"reference": null'))
    with pytest.raises(ChannelError, match="cannot be reached"):
        pull(store, tmp_path / "mirror")
    assert any("not the record that was committed" in finding.problem for finding in verify(Chain.open(store)))


def test_a_mirror_of_one_channel_is_not_overwritten_by_another(tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("other", 2)):
        wc.init(FileStore(tmp_path / name), small_model(seed))
    pull(FileStore(tmp_path / "one"), tmp_path / "mirror")
    with pytest.raises(UsageError, match="a mirror of another channel"):
        pull(FileStore(tmp_path / "other"), tmp_path / "mirror")
    assert pull(FileStore(tmp_path / "one"), tmp_path / "mirror").version == 0
    reset(FileStore(tmp_path / "one"))
    new = small_model(3)
    wc.init(FileStore(tmp_path / "one"), new)
    assert pull(FileStore(tmp_path / "one"), tmp_path / "mirror").digest == wc.fingerprint(new).digest


def test_a_folder_begins_anew_where_the_head_cannot_be_had(store: Store, tmp_path: Path) -> None:
    states = channel_of(store, 2)
    for listed in list(store.list("deltas/")):
        store.delete(listed.key)
    train(states[2], 5)
    write_folder(tmp_path / "saved", states[2])
    with pytest.raises(ChannelError, match="publish --anchor"):
        publish(store, tmp_path / "saved", tmp_path / "mirror")
    published = publish(store, tmp_path / "saved", tmp_path / "mirror", anchor=True)
    assert (published.manifest.position.version, published.manifest.base) == (3, None)
    there = blank(states[2])
    assert pull(store, there).version == 3
    assert same_bits(there, states[2])


def test_plain_dictionaries_are_refused_with_the_remedy(store: Store) -> None:
    arrays = {"w": np.zeros(3, np.float32)}
    wc.init(store, wc.Arrays(arrays))
    for attempt in (wc.init, wc.Publisher, wc.Subscriber):
        with pytest.raises(UsageError, match=r"wc\.Arrays"):
            attempt(store, arrays)  # type: ignore[operator]


def test_collected_versions_are_no_damage(store: Store, tmp_path: Path) -> None:
    channel_of(store, 6)
    chain = Chain.open(store)
    with wc.Subscriber(store, tmp_path / "mirror") as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
        cut_anchor(chain, subscriber.mirror)
    for _ in range(2):
        collect(chain, Retention(0, 0, 0))
    assert list(verify(chain)) == []
    assert [finding for _, finding in verify_deep(chain, tmp_path / "walk") if finding] == []
