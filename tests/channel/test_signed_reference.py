"""Channels that are signed and begin at a model of the Hub: the commit and every file of it are pinned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hub
import pytest
from cases import write_folder
from channels import small_model
from signed_channel import SignedChannel

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.edge import Edge
from weightcast.channel.keys import parent
from weightcast.channel.records import Reference, dump_record
from weightcast.channel.reference import bring, pins_of
from weightcast.channel.signed import signed
from weightcast.channel.trust import Signing, Trust
from weightcast.errors import NoRouteError, TrustError
from weightcast.store.file import FileStore


@pytest.fixture
def hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub.Hub]:
    with hub.found(tmp_path / "hub") as found:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", found.environment["HF_HUB_CACHE"])
        write_folder(tmp_path / "model", small_model())
        (tmp_path / "model" / "tokenizer.json").write_text("{}")
        (tmp_path / "model" / "config.json").write_text('{"auto_map": {"AutoModel": "evil.Model"}, "dim": 1}')
        found.make_model("model", tmp_path / "model")
        yield found


@pytest.fixture
def keys(tmp_path: Path) -> SignedChannel:
    return SignedChannel(tmp_path)


def begun(keys: SignedChannel, url: Path) -> Chain:
    """A signed channel that begins at the model."""
    wc.init(url, Reference("tester/model", "main"), sign=keys.file("root"))
    return Chain.open(FileStore(url), Signing(Trust(keys.trust)))


def record_of(chain: Chain) -> Edge:
    (edge,) = chain.reference_edges()
    return edge


def test_signed_reference_pins_commit_and_files(hugging_face: hub.Hub, keys: SignedChannel, tmp_path: Path) -> None:
    chain = begun(keys, tmp_path / "elsewhere")
    anchor = chain.anchor(record_of(chain).record)
    assert anchor.reference == Reference("tester/model", hugging_face.commit_of("tester/model"))
    assert {"config.json", "tokenizer.json"} < {pin.key for pin in anchor.pins}
    with wc.Subscriber(tmp_path / "elsewhere", tmp_path / "mirror", trust=keys.trust) as subscriber:
        subscriber.sync()
    assert "auto_map" not in (tmp_path / "mirror/config.json").read_text()
    assert (tmp_path / "mirror/tokenizer.json").read_text() == "{}"


def test_file_of_a_reference_with_other_bytes_is_refused(
    hugging_face: hub.Hub, keys: SignedChannel, tmp_path: Path
) -> None:
    reference = Reference("tester/model", hugging_face.commit_of("tester/model"))
    pins = pins_of(reference)
    (tmp_path / "out").mkdir()
    bring(reference, tmp_path / "out", pins=pins)
    wrong = tuple(replace(pin, sha256="0" * 64) if pin.key == "tokenizer.json" else pin for pin in pins)
    gone = (*pins, replace(pins[0], key="more.json"))
    for lie in (wrong, gone):
        (tmp_path / "refused").mkdir(exist_ok=True)
        with pytest.raises(TrustError):
            bring(reference, tmp_path / "refused", pins=lie)
        assert list((tmp_path / "refused").iterdir()) == []


def test_reference_without_pins_is_refused(hugging_face: hub.Hub, keys: SignedChannel, tmp_path: Path) -> None:
    """The record is signed, but it says nothing about the files: the Hub decides what they are."""
    chain = begun(keys, tmp_path / "elsewhere")
    edge = record_of(chain)
    bare = signed(replace(chain.anchor(edge.record), pins=()), chain.channel.id, keys.keys["root"])
    other = Chain.open(chain.store)
    path = tmp_path / "elsewhere" / edge.record
    path.write_bytes(dump_record(bare))
    assert other.anchor(edge.record).pins == ()
    with (
        pytest.raises(NoRouteError) as raised,
        wc.Subscriber(tmp_path / "elsewhere", tmp_path / "mirror", trust=keys.trust) as subscriber,
    ):
        subscriber.sync()
    assert raised.value.reason is not None
    assert not list((tmp_path / "mirror").glob("*.safetensors"))
    assert parent(edge.record) == edge.key
