"""Hostile anchors: right weights, and whatever else somebody who may write to the bucket puts beside them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import CHANNEL_COPY, RECORD, Position, anchor_folder
from weightcast.channel.records import Anchor, ObjectRef, dump_record
from weightcast.disk.checkpoint import SINGLE, save
from weightcast.publish.open import left_out
from weightcast.store import open_store


def weights(value: float) -> wc.Arrays:
    return wc.Arrays({"model.w": np.full(1000, value, np.float32)})


def published(bucket: Path) -> Chain:
    """A channel at version 1, for which nothing but what a test adds is an anchor of the head."""
    folder = bucket.with_name("version-0")
    folder.mkdir()
    save(weights(0), folder)
    (folder / "config.json").write_text('{"hidden_size": 8}')
    wc.init(str(bucket), folder)
    with wc.Publisher(str(bucket), weights(1)) as publisher:
        publisher.publish(step=1).result(30)
    return Chain.open(open_store(bucket))


def cut_by_a_stranger(chain: Chain, files: dict[str, bytes], folder: Path) -> None:
    """An anchor of the head: its weights, and ``files`` beside them."""
    head = chain.head()
    assert head is not None
    folder.mkdir()
    save(weights(1), folder)
    put_anchor(chain, head.position, {SINGLE: (folder / SINGLE).read_bytes(), **files})


def put_anchor(chain: Chain, position: Position, files: dict[str, bytes]) -> None:
    place = anchor_folder(position, "e" * 64)
    refs = []
    for name, data in files.items():
        chain.store.put(place + name, data)
        refs.append(ObjectRef(place + name, len(data), hashlib.sha256(data).hexdigest()))
    chain.store.put(place + RECORD, dump_record(Anchor(chain.channel.id, position, tuple(refs))))


def pulled(bucket: Path, mirror: Path) -> wc.Position:
    with wc.Subscriber(str(bucket), mirror, threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        position = subscriber.apply(staged)
        subscriber.fold()
    return position


def names_in(mirror: Path) -> set[str]:
    return {path.name for path in mirror.iterdir() if not path.name.startswith(".")}


def drop_delta(chain: Chain) -> None:
    """Leave the stranger's anchor as the one way to the head."""
    for listed in list(chain.store.list("deltas/")):
        chain.store.delete(listed.key)


@pytest.mark.parametrize(
    "name", ["evil.py", "pytorch_model.bin", "x.pkl", "lib.so", "adapter_config.json", "modules.json", CHANNEL_COPY]
)
def test_anchor_with_a_forbidden_file_is_planned_around(name: str, tmp_path: Path) -> None:
    bucket, mirror = tmp_path / "bucket", tmp_path / "mirror"
    chain = published(bucket)
    cut_by_a_stranger(chain, {name: b"{}"}, tmp_path / "evil")
    assert pulled(bucket, mirror).version == 1
    assert names_in(mirror) == {"config.json", SINGLE}


def test_second_set_of_weights_is_planned_around(tmp_path: Path) -> None:
    bucket, mirror = tmp_path / "bucket", tmp_path / "mirror"
    chain = published(bucket)
    (tmp_path / "other").mkdir()
    save(wc.Arrays({"w": np.full(1000, 666, np.float32)}), tmp_path / "other")
    cut_by_a_stranger(chain, {"zz.safetensors": (tmp_path / "other" / SINGLE).read_bytes()}, tmp_path / "evil")
    drop_delta(chain)
    assert pulled(bucket, mirror).version == 0, "the newest version that can be reached without it"
    assert names_in(mirror) == {"config.json", SINGLE}


def test_references_to_code_do_not_reach_the_mirror(tmp_path: Path) -> None:
    bucket, mirror = tmp_path / "bucket", tmp_path / "mirror"
    chain = published(bucket)
    config = {"auto_map": {"AutoModel": "other/repo--evil.Evil"}, "hidden_size": 8}
    cut_by_a_stranger(chain, {"config.json": json.dumps(config).encode()}, tmp_path / "evil")
    drop_delta(chain)
    assert pulled(bucket, mirror).version == 1
    assert json.loads((mirror / "config.json").read_text()) == {"hidden_size": 8}


@pytest.mark.parametrize("name", ["x" * 250 + ".txt", "é" * 120 + ".json"])
def test_name_too_long_to_be_downloaded_is_planned_around(name: str, tmp_path: Path) -> None:
    bucket, mirror = tmp_path / "bucket", tmp_path / "mirror"
    chain = published(bucket)
    head = chain.head()
    assert head is not None
    put_anchor(chain, head.position, {name: b"1"})
    assert pulled(bucket, mirror).version == 1


def test_init_takes_what_loading_needs_and_names_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save(weights(0), folder)
    for name in ("config.json", "tokenizer.json", "modeling_x.py", "optimizer.pt", "adapter_config.json"):
        (folder / name).write_text("{}")
    assert left_out(folder) == ["adapter_config.json", "modeling_x.py", "optimizer.pt"]
    wc.init(str(tmp_path / "bucket"), folder)
    pulled(tmp_path / "bucket", tmp_path / "mirror")
    assert names_in(tmp_path / "mirror") == {"config.json", "tokenizer.json", SINGLE}
