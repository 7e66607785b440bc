"""Pins and tags that are set, and writers that lost, while a collector deletes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scripted_store import ScriptedStore

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import DOOMED, MANIFESTS, Position, manifest_key, pin_key
from weightcast.channel.pins import pin, pins
from weightcast.channel.retention import Retention
from weightcast.channel.route import reachable
from weightcast.channel.tags import set_tag, tag_names
from weightcast.disk.checkpoint import save
from weightcast.errors import ConflictError, MissingError, UnreachableError, UsageError
from weightcast.upkeep.collect import collect

DAY = 86400.0
POLICY = Retention(window=0, grace=DAY, patience=0)


def weights(value: float) -> wc.Arrays:
    return wc.Arrays({"w": np.full(100, value, np.float32)})


def channel(folder: Path, *, fenced: bool) -> ScriptedStore:
    """Versions 0 to 4, days old, of which a collector deletes 0 to 3."""
    store = ScriptedStore(now=0.0)
    if not fenced:
        store.overwrite()
    wc.init(store, weights(0))
    with wc.Publisher(store, weights(0), writer="m") as publisher:
        for version in range(1, 5):
            last = publisher.publish(version, weights(version)).result(60)
    save(weights(4), folder)
    Chain.open(store).put_anchor(last.position, {path.name: path for path in folder.iterdir()})
    store.now = 3 * DAY
    return store


@pytest.fixture(params=[True, False])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> ScriptedStore:
    return channel(tmp_path, fenced=request.param)


def pin_it(chain: Chain) -> None:
    pin(chain, 1)


def tag_it(chain: Chain) -> None:
    set_tag(chain, "best", chain.manifest(1).position)


@pytest.mark.parametrize("mark", [pin_it, tag_it])
def test_mark_set_while_manifests_are_deleted_is_refused_and_not_left(
    store: ScriptedStore, mark: Callable[[Chain], None]
) -> None:
    chain = Chain.open(store)
    refused: list[ConflictError] = []

    def late(_: object) -> None:
        with pytest.raises(ConflictError, match="version 1 is being deleted") as caught:
            mark(chain)
        refused.append(caught.value)

    store.before("delete", manifest_prefix(1), late, times=1)
    assert 1 in collect(chain, POLICY).versions
    assert len(refused) == 1
    assert (list(pins(chain)), list(tag_names(chain))) == ([], [])


def manifest_prefix(version: int) -> str:
    return manifest_key(version).removesuffix(".json")


def copied(store: ScriptedStore) -> ScriptedStore:
    copy = ScriptedStore(now=0.0)
    for key in store.keys(""):
        copy.put(key, store.store.get(key))
    copy.now = store.now
    copy.calls.clear()
    return copy


@pytest.mark.parametrize("mark", [pin_it, tag_it])
@pytest.mark.parametrize("gc_is_interrupted", [True, False])
def test_mark_set_at_any_moment_of_gc_keeps_its_version_or_is_refused(
    tmp_path: Path, mark: Callable[[Chain], None], gc_is_interrupted: bool
) -> None:
    """One of the two runs as a whole before each request of the other."""
    whole = channel(tmp_path, fenced=True)

    def collects(store: ScriptedStore) -> None:
        collect(Chain.open(store), POLICY)

    def marks(store: ScriptedStore) -> None:
        try:
            mark(Chain.open(store))
        except (ConflictError, MissingError, UsageError):
            refused.append(True)

    outer, inner = (collects, marks) if gc_is_interrupted else (marks, collects)
    probe = copied(whole)
    refused: list[bool] = []
    outer(probe)
    for moment in range(len(probe.calls)):
        store, refused = copied(whole), []
        store.before("", "", lambda _, store=store: inner(store), skip=moment, times=1)
        outer(store)
        chain = Chain.open(store)
        marked = {*pins(chain), *(1 for _ in tag_names(chain))}
        assert marked == (set() if refused else {1}), moment
        if marked:
            assert 1 in reachable(chain.edges(None, 4)), moment
            assert chain.manifest(1).position.version == 1


def test_pin_written_once_deletions_are_announced_is_seen(store: ScriptedStore) -> None:
    chain = Chain.open(store)
    store.after("put", DOOMED, lambda _: store.put(pin_key(1), b"{}"), times=1)
    assert 1 not in collect(chain, POLICY).versions
    assert chain.manifest(1).position.version == 1


def test_kept_version_can_be_pinned_while_others_are_deleted_and_afterwards(store: ScriptedStore) -> None:
    chain = Chain.open(store)
    store.before("delete", MANIFESTS, lambda _: pin(chain, 4), times=1)
    collect(chain, POLICY)
    assert list(pins(chain)) == [4]
    with pytest.raises(MissingError):
        pin(chain, 1)


def test_announcement_of_a_killed_run_names_its_remedy_and_the_next_run_removes_it(store: ScriptedStore) -> None:
    chain = Chain.open(store)
    with store.fail("delete", MANIFESTS), pytest.raises(UnreachableError):
        collect(chain, POLICY)
    with pytest.raises(ConflictError, match=rf"delete {DOOMED}\w+\.json") as caught:
        pin(chain, 1)
    assert "`weightcast gc" in str(caught.value)
    store.now = 10 * DAY
    collect(chain, POLICY)
    collect(chain, POLICY)
    pin(chain, 4)
    store.now = 20 * DAY
    collect(chain, POLICY)
    assert not store.keys(DOOMED)


@pytest.mark.parametrize("deleted", range(5))
def test_run_killed_between_two_manifests_of_a_version_leaves_the_winner(tmp_path: Path, deleted: int) -> None:
    """Without create-if-absent, a writer that lost may leave its manifest: it must not outlive the committed one."""
    store = channel(tmp_path, fenced=False)
    chain = Chain.open(store)
    committed = chain.manifest(2).position
    (winner,) = store.keys(manifest_prefix(2))
    loser = manifest_key(2, "z-0123456789abcdef")
    other = Position(2, "e" * 64)
    store.now = 0.0
    store.put(loser, store.get(winner).replace(committed.digest.encode(), other.digest.encode()))
    store.now = 3 * DAY
    with store.fail("delete", MANIFESTS, skip=deleted), pytest.raises(UnreachableError):
        collect(chain, POLICY)
    assert store.keys(manifest_prefix(2)) != {loser}
