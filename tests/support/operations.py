"""The operations that are interrupted at every call they make."""

from __future__ import annotations

import shutil
import time
from contextlib import closing
from dataclasses import replace

from scripted_store import ScriptedStore
from worlds import Operation, World, follow, opened

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import ANCHORS, CHANNEL, DELTAS, MANIFESTS, SQUASHES
from weightcast.channel.policy import Every, Pinned
from weightcast.channel.retention import Retention
from weightcast.channel.tags import read_tag, set_tag
from weightcast.disk.durable import scratch
from weightcast.follow.subscriber import Subscriber
from weightcast.interop.importing import import_steps
from weightcast.interop.layouts import opened as opened_history
from weightcast.publish.from_checkpoint import cut_anchor, publish
from weightcast.publish.open import init
from weightcast.publish.publisher import Publisher
from weightcast.store.base import Store
from weightcast.store.file import FileStore
from weightcast.upkeep.collect import collect
from weightcast.upkeep.copy import Copier
from weightcast.upkeep.squash import squash

LEVELS = (2,)
RETENTION = Retention(window=100.0, grace=10.0, patience=100.0)


def every_version(world: World) -> None:
    for version in world.chain.versions():
        world.pull(version)


def _init(world: World, store: Store) -> None:
    if world.head() is None:
        init(store, world.checkpoint(0))


def _publish(world: World, store: Store) -> None:
    head = world.head()
    assert head is not None
    with Publisher(store, wc.Arrays.copy_of(world.states[head]), threads=1, retry_after=0.01) as publisher:
        if head == 3:
            publisher.publish(step=4, weights=world.states[4]).result(30)


def _take_up(world: World, store: Store) -> None:
    """A trainer that restarts with weights that are not the head's."""
    with Publisher(store, wc.Arrays.copy_of(world.states[4]), threads=1, retry_after=0.01) as publisher:
        publisher.publish(step=4).result(30)


def _forget_old_weights(world: World) -> None:
    """Nothing leads to the head any more: the bucket lost its anchors."""
    for listed in list(world.store.list(ANCHORS)):
        world.store.delete(listed.key)


def _saved(world: World) -> None:
    world.checkpoint(4)
    follow(world, policy=Pinned(2))


def _publish_folder(world: World, store: Store) -> None:
    publish(store, world.checkpoint(4), world.mirror)


def _pull_memory(world: World, store: Store) -> None:
    world.pull(store=store)


def _pull(world: World, store: Store) -> None:
    follow(world, store, fold=True)


def _pull_back(world: World, store: Store) -> None:
    follow(world, store, policy=Pinned(0))


def _behind(world: World) -> None:
    follow(world, policy=Pinned(2))


def _logged(world: World) -> None:
    """A mirror whose files hold version 2 and whose log leads to the head."""
    follow(world, policy=Pinned(2))
    follow(world)


def _squash(world: World, store: Store) -> None:
    for _ in squash(Chain.open(store), world.root / "scratch", levels=LEVELS):
        pass


def _begun(world: World) -> None:
    """Folders as an earlier run left them."""
    (world.root / "scratch").mkdir()
    for name in ("base", "result"):
        follow(world, folder=world.root / "scratch" / f"{LEVELS[0]}-{name}", policy=Pinned(0))


def _squashed(world: World) -> None:
    _squash(world, world.store)
    follow(world, policy=Pinned(1))


def _is_squashed(world: World) -> None:
    every_version(world)
    found = {(edge.base, edge.result) for edge in world.chain.squash_edges(0)}
    assert found == {(0, 2)}


def _anchored(world: World) -> None:
    follow(world, policy=Pinned(2))
    with opened(world) as mirror:
        cut_anchor(world.chain, mirror)
    follow(world)
    world.store.now += 1000.0


def _collect(world: World, store: Store) -> None:
    """Twice, so that what the first run lists is deleted, too."""
    collect(Chain.open(store), RETENTION)
    world.store.now += 2 * RETENTION.grace
    collect(Chain.open(store), RETENTION)


def _collected(world: World) -> None:
    """After another grace period all that nobody needs is gone, and all that is left can be reached."""
    world.store.now += 1000.0
    collect(world.chain, RETENTION)
    every_version(world)
    assert min(world.chain.versions()) == 2


def _fold(world: World, store: Store) -> None:
    with opened(world) as mirror:
        assert mirror.fold()
        assert mirror.folded is not None
        assert mirror.folded.version == 4


def _follow_each(world: World, store: Store) -> None:
    """Each version is folded in the background while the next is staged and applied."""
    with Subscriber(store, world.mirror, Every(), threads=1, fold_every=1) as subscriber:
        while subscriber.sync() is not None:
            pass


def _cut(world: World, store: Store) -> None:
    with opened(world) as mirror:
        cut_anchor(Chain.open(store), mirror)


def _is_cut(world: World) -> None:
    every_version(world)
    assert [edge.result for edge in world.chain.anchor_edges()] == [0, 4]


def _source(world: World) -> FileStore:
    return FileStore(world.root / "source")


def _elsewhere(world: World) -> None:
    """The channel that is copied into the world's bucket: four versions, a squash, a second anchor and a tag."""
    home = replace(world, store=ScriptedStore(_source(world)))
    home.begin(3)
    _squash(home, home.store)
    follow(home)
    with opened(home) as mirror:
        cut_anchor(home.chain, mirror)
    set_tag(home.chain, "best", home.chain.manifest(1).position)
    shutil.rmtree(home.mirror)
    shutil.rmtree(world.root / "scratch")


def _copy(world: World, store: Store) -> None:
    with scratch() as folder, closing(Copier(_source(world), store, folder)) as copier:
        while (copied := copier.sync()) is not None:
            assert not copied.problems


def _is_copied(world: World) -> None:
    every_version(world)
    source = _source(world)
    kept = [listed.key for kind in (MANIFESTS, DELTAS, SQUASHES, ANCHORS) for listed in source.list(kind)]
    assert all(world.store.store.get(key) == source.get(key) for key in [CHANNEL, *kept])
    assert read_tag(world.chain, "best").position.version == 1


def nothing(world: World) -> None:
    """Nothing."""


OPERATIONS = [
    Operation("init", None, lambda world: world.checkpoint(0), _init, (None, 0), done=every_version),
    Operation("publish", 3, nothing, _publish, (3, 4), dies=False, done=every_version),
    Operation("publish at a restart", 3, nothing, _take_up, (3, 4), dies=False, done=every_version),
    Operation("publish a folder", 3, _saved, _publish_folder, (3, 4), (2, 3, 4), done=every_version),
    Operation("pull into memory", 2, nothing, _pull_memory, (2,), writes=False),
    Operation("pull from nothing", 2, nothing, _pull, (2,), (None, 0, 1, 2), writes=False),
    Operation("pull by deltas", 4, _behind, _pull, (4,), (2, 3, 4), writes=False),
    Operation("pull by a squash", 4, _squashed, _pull, (4,), (1, 2, 3, 4), writes=False),
    Operation("pull back", 4, _logged, _pull_back, (4,), (4, 0), writes=False),
    Operation("squash", 3, _begun, _squash, (3,), done=_is_squashed),
    Operation("gc", 4, _anchored, _collect, (4,), (4,), done=_collected),
    Operation("fold", 4, _logged, _fold, (4,), (4,), writes=False),
    Operation("fold beside updates", 4, _behind, _follow_each, (4,), (2, 3, 4), writes=False),
    Operation("copy", None, _elsewhere, _copy, (None, 0, 1, 2, 3), dies=False, done=_is_copied),
    Operation("anchor", 4, _logged, _cut, (4,), (4,), done=_is_cut),
]


def _steps_saved(world: World) -> None:
    for step in range(IMPORTED + 1):
        world.checkpoint(step)


def _import(world: World, store: Store) -> None:
    room = world.root / "tmp" / "replayed"
    room.mkdir(exist_ok=True)
    for _ in import_steps(store, opened_history(world.root, "history"), room, world.mirror):
        pass


IMPORTED = 3
"""The last version of a history that is imported."""

STATES = (None, *range(IMPORTED + 1))
IMPORT = Operation("import a history", None, _steps_saved, _import, STATES, STATES, done=every_version)
"""Not among the others: when its last commit is done, its mirror may lag, and a second import leaves it alone."""


# -- until they are killed ---------------------------------------------------------------------------------------------


def state_at(world: World, version: int) -> int:
    """Endless publishing goes through the states in turn, version by version."""
    return version % len(world.states)


def _publish_for_ever(world: World, store: Store) -> None:
    """Write down what was acknowledged, and only then go on."""
    head = world.head()
    assert head is not None
    with (
        Publisher(
            store, wc.Arrays.copy_of(world.states[state_at(world, head)]), threads=1, retry_after=0.01
        ) as publisher,
        (world.root / "acknowledged").open("ab", buffering=0) as file,
    ):
        while True:
            head += 1
            receipt = publisher.publish(weights=world.states[state_at(world, head)])
            file.write(f"{receipt.result(30).position.version}\n".encode())
            time.sleep(0.005)


def _follow_for_ever(world: World, store: Store) -> None:
    while True:
        follow(world, store)
        with opened(world) as mirror:
            mirror.fold()
        follow(world, store, policy=Pinned(max(world.chain.versions()) - 2))


def _maintain_for_ever(world: World, store: Store) -> None:
    while True:
        _squash(world, store)
        world.store.now += 1000.0
        with opened(world) as mirror:
            if mirror.version is not None:
                cut_anchor(Chain.open(store), mirror)
        collect(Chain.open(store), RETENTION)
        follow(world)


ENDLESS = [
    Operation("publish for ever", 0, nothing, _publish_for_ever, (0,)),
    Operation("follow for ever", 7, nothing, _follow_for_ever, (7,)),
    Operation("maintain for ever", 7, nothing, _maintain_for_ever, (7,)),
]
