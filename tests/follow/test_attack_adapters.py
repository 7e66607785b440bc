"""Hostile anchors of and with adapters: what loaders would take for an adapter stays out of a model's folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import RECORD, anchor_folder
from weightcast.channel.records import Anchor, ObjectRef, dump_record
from weightcast.disk.checkpoint import save
from weightcast.errors import UsageError
from weightcast.format.codec.coded import Coded
from weightcast.format.digest import fingerprint
from weightcast.format.patch import ModelSize
from weightcast.format.patchfile import PatchWriter
from weightcast.format.table import Row
from weightcast.store import open_store

ADAPTER, CONFIG = "adapter_model.safetensors", "adapter_config.json"
LORA = {"peft_type": "LORA", "base_model_name_or_path": "evil/base", "r": 4}
OF_MODEL, OF_ADAPTER = "model.layers.0.w", "base_model.model.model.layers.0.w.lora_A.weight"


def weights(name: str, value: float) -> wc.Arrays:
    return wc.Arrays({name: np.full(100, value, np.float32)})


def published(bucket: Path, name: str) -> Chain:
    """A channel of one tensor at version 1, to which an anchor that a test adds is the only way."""
    first = weights(name, 0)
    with wc.Publisher(str(bucket), first) as publisher:
        first.read(name)[:] = weights(name, 1).read(name)
        publisher.publish(step=1).result(30)
    chain = Chain.open(open_store(bucket))
    for listed in list(chain.store.list("deltas/")):
        chain.store.delete(listed.key)
    return chain


def put_anchor(chain: Chain, name: str, file: str, beside: dict[str, bytes], folder: Path, boxes: bool = False) -> None:
    """An anchor of the head with the right weights in ``file``, as a stranger would write it."""
    head = chain.head()
    assert head is not None
    folder.mkdir()
    if boxes:
        bits = weights(name, 1).read(name)
        with PatchWriter("plain", folder) as writer, (folder / file).open("xb") as opened:
            row = Row(chain.channel.table[name], bits.size, fingerprint(weights(name, 1))[name])
            writer.add(Coded(row, {"values": bits}), row.place)
            writer.finish(opened, None, head.position.digest, ModelSize.of(chain.channel.table))
    else:
        save(weights(name, 1), folder, file)
    place = anchor_folder(head.position, "e" * 64)
    refs = []
    for key, data in {file: (folder / file).read_bytes(), **beside}.items():
        chain.store.put(place + key, data)
        refs.append(ObjectRef(place + key, len(data), hashlib.sha256(data).hexdigest()))
    chain.store.put(place + RECORD, dump_record(Anchor(chain.channel.id, head.position, tuple(refs), boxes=boxes)))


def pulled(bucket: Path, mirror: Path) -> tuple[int, set[str]]:
    """The version that a new mirror reaches, and the names of its files."""
    with wc.Subscriber(str(bucket), mirror, threads=1) as subscriber:
        subscriber.sync()
        assert subscriber.position is not None
        subscriber.fold()
        version = subscriber.position.version
    return version, {path.name for path in mirror.iterdir() if not path.name.startswith(".")}


def test_adapter_configuration_beside_a_model_makes_an_anchor_unusable(tmp_path: Path) -> None:
    chain = published(tmp_path / "bucket", OF_MODEL)
    put_anchor(chain, OF_MODEL, "model.safetensors", {CONFIG: json.dumps(LORA).encode()}, tmp_path / "evil")
    assert pulled(tmp_path / "bucket", tmp_path / "mirror") == (0, {"model.safetensors"})


def test_model_under_an_adapters_name_gets_no_adapter_configuration(tmp_path: Path) -> None:
    """transformers would otherwise load `evil/base` from a mirror whose weights are right to the last bit."""
    chain = published(tmp_path / "bucket", OF_MODEL)
    beside = {CONFIG: json.dumps(LORA).encode(), "config.json": b"{}"}
    put_anchor(chain, OF_MODEL, ADAPTER, beside, tmp_path / "evil")
    assert pulled(tmp_path / "bucket", tmp_path / "mirror") == (1, {ADAPTER, "config.json"})


def test_code_in_the_configuration_of_an_adapter_does_not_arrive(tmp_path: Path) -> None:
    chain = published(tmp_path / "bucket", OF_ADAPTER)
    evil = LORA | {"auto_mapping": {"parent_library": "evil"}, "megatron_core": "evil", "megatron_config": {"a": 1}}
    put_anchor(chain, OF_ADAPTER, ADAPTER, {CONFIG: json.dumps(evil).encode()}, tmp_path / "evil")
    assert pulled(tmp_path / "bucket", tmp_path / "mirror") == (1, {ADAPTER, CONFIG})
    assert json.loads((tmp_path / "mirror" / CONFIG).read_text()) == LORA


def test_weights_assembled_from_boxes_get_no_adapter_configuration(tmp_path: Path) -> None:
    chain = published(tmp_path / "bucket", OF_ADAPTER)
    put_anchor(chain, OF_ADAPTER, ADAPTER, {CONFIG: json.dumps(LORA).encode()}, tmp_path / "evil", boxes=True)
    assert pulled(tmp_path / "bucket", tmp_path / "mirror") == (1, {"model.safetensors"})


def test_publisher_puts_no_adapter_configuration_beside_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save(weights(OF_MODEL, 0), folder)
    save(weights(OF_ADAPTER, 0), folder, ADAPTER)
    (folder / CONFIG).write_text(json.dumps(LORA))
    wc.init(str(tmp_path / "bucket"), folder)
    assert pulled(tmp_path / "bucket", tmp_path / "mirror") == (0, {"model.safetensors"})
    chain = Chain.open(open_store(tmp_path / "bucket"))
    head = chain.head()
    assert head is not None
    with pytest.raises(UsageError, match=CONFIG):
        chain.put_anchor(head.position, {name: folder / name for name in ("model.safetensors", CONFIG)})
