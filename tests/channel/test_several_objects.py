"""Versions of several objects: their manifests, their keys, and how a listing shows them (SPEC 11.2, 11.6)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from channels import channel_of, train
from several import FOLDER, OTHER_FOLDER, publish_objects, put_objects

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.edge import Edge, edge_from_key, edge_of, leads_to_commit
from weightcast.channel.keys import Position, anchor_folder, delta_key, read_delta_key
from weightcast.channel.records import Manifest, ObjectRef, dump_record, load_record
from weightcast.errors import FormatError
from weightcast.store import open_store
from weightcast.store.base import Store
from weightcast.store.memory import MemoryStore

A, B, C, D = (digit * 64 for digit in "abcd")
HERE = Position(7, A)


def ref(sha256: str, folder: str | None = FOLDER, position: Position = HERE, size: int = 10) -> ObjectRef:
    return ObjectRef(delta_key(position, sha256, folder), size, sha256)


def manifest(*objects: ObjectRef) -> Manifest:
    return Manifest("0" * 32, HERE, Position(6, B), objects, "banded", 1, None, 0.0, "ranks")


SEVERAL = manifest(ref(B), ref(C), ref(D))
DELTA = f"deltas/000000000007-{A[:16]}-{FOLDER}/"

# -- manifests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("good", [SEVERAL, manifest(ref(B)), manifest(ref(B, None))], ids=["3", "1 in a folder", "1"])
def test_objects_of_a_manifest_round_trip(good: Manifest) -> None:
    assert load_record(Manifest, dump_record(good)) == good


def test_delta_of_several_objects_is_their_folder() -> None:
    assert (SEVERAL.key, SEVERAL.nbytes) == (DELTA, 30)
    assert edge_of(SEVERAL) == Edge("delta", 6, 7, 30, DELTA, A[:16])


@pytest.mark.parametrize(
    ("objects", "says"),
    [
        ([], "a list of objects"),
        ([ref(B), ref(B)], "a list of objects"),
        ([ref(B), ref(C, OTHER_FOLDER)], "a list of objects"),
        ([ref(B), ref(C, None)], "a list of objects"),
        ([ref(B, None), ref(C, None)], "a list of objects"),
        ([ref(B), ref(C, position=Position(8, A))], "a list of objects"),
        ([ref(B, position=Position(8, A)), ref(C, position=Position(8, A))], "the name of a delta"),
        ([ref(B, position=Position(7, C)), ref(C, position=Position(7, C))], "the name of a delta"),
        ([ref(B), ObjectRef(f"{DELTA}deeper/{B[:16]}.safetensors", 10, B)], "a list of objects"),
        ([ObjectRef(f"{DELTA}model.safetensors", 10, B)], "the name of a delta"),
        ([ref(B)] * 70_000, "a list of files"),
    ],
    ids=[
        "none",
        "repeated",
        "of two folders",
        "in a folder and not",
        "none in a folder",
        "of two versions",
        "of another version",
        "of another digest",
        "deeper",
        "not an object's name",
        "too many",
    ],
)
def test_objects_that_do_not_belong_together_are_refused(objects: list[ObjectRef], says: str) -> None:
    with pytest.raises(FormatError, match=says):
        load_record(Manifest, dump_record(manifest(*objects)))


def anchored(*marks: str) -> Manifest:
    refs = [ObjectRef(f"{anchor_folder(HERE, mark)}anchor.json", 10, mark) for mark in marks]
    return replace(manifest(*refs), base=None, codec=None)


def test_version_has_one_anchor() -> None:
    assert load_record(Manifest, dump_record(anchored(B))) == anchored(B)
    for wrong in (anchored(B, C), replace(SEVERAL, base=None, codec=None), anchored()):
        with pytest.raises(FormatError, match="a list of objects"):
            load_record(Manifest, dump_record(wrong))


@pytest.mark.parametrize("value", [None, {}, "x", [None], [["k", 1]], [["k", -1, B]], [["k", 1, "b"]], [[1, 1, B]]])
def test_list_of_objects_of_another_type_is_refused(value: Any) -> None:
    fields = json.loads(dump_record(SEVERAL)) | {"objects": value}
    with pytest.raises(FormatError, match="is impossible"):
        load_record(Manifest, json.dumps(fields).encode())


# -- keys and listings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        DELTA,
        f"{DELTA}{B[:15]}.safetensors",
        f"{DELTA}{B[:16]}.json",
        f"{DELTA}{B[:16]}.safetensors/x",
        f"{DELTA}{B[:16]}.safetensors\n",
        f"{DELTA}/{B[:16]}.safetensors",
        f"deltas/000000000007-{A[:16]}/{FOLDER}/{B[:16]}.safetensors",
        f"deltas/000000000007-{A[:16]}-{FOLDER.upper()}/{B[:16]}.safetensors",
    ],
)
def test_other_keys_in_a_folder_are_not_objects_of_a_delta(key: str) -> None:
    assert read_delta_key(key) is None
    assert edge_from_key(key, 10) is None


def test_object_in_another_folder_does_not_lead_to_what_was_committed() -> None:
    assert leads_to_commit(edge_of(SEVERAL), SEVERAL)
    left = edge_from_key(ref(B, OTHER_FOLDER).key, 10)
    alone = edge_from_key(ref(B, None).key, 10)
    assert left is not None
    assert alone is not None
    assert not leads_to_commit(left, SEVERAL)
    assert not leads_to_commit(alone, SEVERAL)


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore("several") if request.param == "memory" else open_store(tmp_path / "bucket")


def publishing(store: Store) -> tuple[Chain, wc.Arrays, wc.Arrays]:
    """A channel of two versions, the weights of its head, and the next."""
    *_, old = channel_of(store, 1)
    new = wc.Arrays.copy_of(old)
    train(new, 77, 0.2)
    return Chain.open(store), old, new


def test_listing_shows_the_objects_of_a_delta_as_one_edge(store: Store) -> None:
    chain, old, new = publishing(store)
    committed = publish_objects(chain, old, new)
    assert len(committed.objects) == 3
    assert list(chain.delta_edges(0, 2)) == [edge_of(chain.manifest(1)), edge_of(committed)]
    assert [listed.size for listed in {edge.key: objects for edge, objects in chain.deltas()}[committed.key]] == [
        one.size for one in sorted(committed.objects, key=lambda one: one.key)
    ]


def test_other_files_among_the_objects_do_not_split_their_edge(store: Store) -> None:
    """They are not of the format, and a listing shows them between the objects."""
    chain, old, new = publishing(store)
    committed = publish_objects(chain, old, new)
    first = min(one.key for one in committed.objects)
    store.put(first.removesuffix(".safetensors") + ".txt", b"a note")
    store.put(f"{committed.key}notes/README", b"a note")
    assert list(chain.delta_edges(1, 2)) == [edge_of(committed)]


def test_objects_of_two_attempts_are_two_edges(store: Store) -> None:
    chain, old, new = publishing(store)
    left = put_objects(chain, old, new, OTHER_FOLDER)
    committed = publish_objects(chain, old, new)
    assert list(chain.delta_edges(1, 2)) == [edge_of(committed), edge_of(left)]


# -- readers -----------------------------------------------------------------------------------------------------------


def extra(chain: Chain, committed: Manifest) -> None:
    """One more object in the folder, which an interrupted attempt has left."""
    chain.put_delta(committed.position, b"the beginning of an object", FOLDER)


def nothing(chain: Chain, committed: Manifest) -> None:
    pass


@pytest.mark.parametrize("spoil", [nothing, extra])
@pytest.mark.parametrize("start", [None, 1], ids=["late", "following"])
def test_reader_gets_a_version_of_several_objects(
    store: Store, tmp_path: Path, spoil: Callable[[Chain, Manifest], None], start: int | None
) -> None:
    chain, old, new = publishing(store)
    if start is not None:
        with wc.Subscriber(store, tmp_path / "mirror", wc.Pinned(start)) as early:
            early.sync()
    committed = publish_objects(chain, old, new)
    spoil(chain, committed)
    with wc.Subscriber(store, tmp_path / "mirror", wc.Newest()) as subscriber:
        subscriber.sync()
        assert subscriber.position == committed.position
        assert subscriber.weights is not None
        assert wc.diff(subscriber.weights, new).tensors == ()


def test_publisher_continues_after_a_version_of_several_objects(store: Store, tmp_path: Path) -> None:
    chain, old, new = publishing(store)
    publish_objects(chain, old, new)
    with wc.Publisher(store, new, threads=1) as publisher:
        train(new, 78)
        assert publisher.publish(weights=new).result(60).position.version == 3
    with wc.Subscriber(store, tmp_path / "mirror") as subscriber:
        subscriber.sync()
        assert subscriber.weights is not None
        assert wc.diff(subscriber.weights, new).tensors == ()
