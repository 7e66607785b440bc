"""Channels that begin at a model of the Hub: nothing is uploaded, and replicas get it there without being told to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hub
import numpy as np
import pytest
from cases import same_bits, write_folder
from channels import blank, pull, small_model, train
from typer.testing import CliRunner

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.records import Reference
from weightcast.channel.reference import bring, resolved
from weightcast.cli import app
from weightcast.errors import (
    AccessError,
    ChannelError,
    CheckpointError,
    MissingError,
    SpaceError,
    StoreError,
    UnreachableError,
)
from weightcast.publish.from_checkpoint import publish
from weightcast.upkeep.verify import verify


@pytest.fixture
def hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub.Hub]:
    """A Hub with one model, and an empty cache: huggingface_hub looked for its own when it was imported."""
    with hub.found(tmp_path / "hub") as found:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", found.environment["HF_HUB_CACHE"])
        write_folder(tmp_path / "model", small_model())
        (tmp_path / "model" / "tokenizer.json").write_text("{}")
        (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"a pickle")
        (tmp_path / "model" / ".gitattributes").write_text("")
        found.make_model("model", tmp_path / "model")
        yield found


@pytest.fixture
def url(hugging_face: hub.Hub) -> str:
    return hugging_face.make_bucket("channel") + "/run"


def run(*arguments: str | Path, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout.splitlines()[-1])


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name != ".weightcast"}


NAMES = {
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
}


def test_replica_starts_from_the_hub_without_an_upload(hugging_face: hub.Hub, url: str, tmp_path: Path) -> None:
    commit = hugging_face.commit_of("tester/model")
    assert run("init", url, "--from-hub", "tester/model@main")["version"] == 0
    assert not any(listed.key.endswith(".safetensors") for listed in wc.open_store(url).list(""))
    assert run("show", url, "0")["reference"] == f"tester/model@{commit}"
    model = small_model()
    with wc.Publisher(url, model, threads=1) as publisher:
        for version in range(1, 4):
            train(model, version)
            publisher.publish(step=version).result(30)
    assert run("pull", url, tmp_path / "replica")["version"] == 3
    assert names_in(tmp_path / "replica") == NAMES
    with wc.Checkpoint(tmp_path / "replica") as replica:
        assert same_bits(replica, model)
    assert run("verify", tmp_path / "replica", url)["version"] == 3
    assert list(verify(Chain.open(wc.open_store(url)))) == []
    train(model, 4)
    with wc.Publisher(url, model, threads=1) as publisher:
        publisher.publish().result(30)
    assert run("pull", url, tmp_path / "replica")["version"] == 4


def test_download_for_a_mirror_is_not_written_to_the_cache(hugging_face: hub.Hub, url: str, tmp_path: Path) -> None:
    """Its files change in place, and others use the cache's."""
    wc.init(url, Reference("tester/model", "main"))
    model = small_model()
    train(model, 1)
    with wc.Publisher(url, model, threads=1) as publisher:
        publisher.publish().result(30)
    assert pull(url, tmp_path / "replica").version == 1
    with wc.Subscriber(url, tmp_path / "replica", threads=1) as subscriber:
        assert subscriber.fold()
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    hugging_face.stop()
    try:
        bring(Reference("tester/model", hugging_face.commit_of("tester/model")), fresh)
    finally:
        hugging_face.start()
    with wc.Checkpoint(fresh) as cached:
        assert same_bits(cached, small_model())


def test_arrays_follow_a_channel_with_a_reference(url: str) -> None:
    wc.init(url, Reference("tester/model", "main"))
    target = blank(small_model())
    assert pull(url, target).version == 0
    assert same_bits(target, small_model())


def test_replica_with_the_model_makes_no_request_to_the_hub(hugging_face: hub.Hub, url: str, tmp_path: Path) -> None:
    wc.init(url, Reference("tester/model", "main"))
    write_folder(tmp_path / "replica", small_model())
    asked = len(hugging_face.asked)
    assert pull(url, tmp_path / "replica").version == 0
    assert not [name for name in hugging_face.asked[asked:] if name.startswith("model")]


def test_anchor_in_the_bucket_is_taken_first(hugging_face: hub.Hub, url: str, tmp_path: Path) -> None:
    wc.init(url, Reference("tester/model", "main"))
    model = small_model()
    train(model, 1)
    write_folder(tmp_path / "1", model)
    publish(wc.open_store(url), tmp_path / "1", tmp_path / "mirror", anchor=True)
    asked = len(hugging_face.asked)
    assert pull(url, tmp_path / "replica").version == 1
    assert not [name for name in hugging_face.asked[asked:] if name.startswith("model")]


def test_model_that_changed_on_the_hub_is_refused(hugging_face: hub.Hub, url: str, tmp_path: Path) -> None:
    """A reference to a branch may have moved; the digests show it."""
    wc.init(url, small_model(), reference=Reference("tester/model", "main"))
    other = small_model(seed=5)
    write_folder(tmp_path / "other", other)
    hugging_face.make_model("model", tmp_path / "other")
    with pytest.raises(ChannelError, match="the weights of version 0 have the digest"):
        pull(url, tmp_path / "replica")
    assert names_in(tmp_path / "replica") == set()


def test_weights_stored_twice_are_downloaded_once(hugging_face: hub.Hub, tmp_path: Path) -> None:
    (tmp_path / "model" / "consolidated.safetensors").write_bytes(b"the same in another layout")
    (tmp_path / "brought").mkdir()
    bring(Reference("tester/model", "main"), tmp_path / "brought")
    assert names_in(tmp_path / "brought") == NAMES


def test_partial_cache_is_completed(hugging_face: hub.Hub, tmp_path: Path) -> None:
    """As left by a tool that only read the configuration."""
    from huggingface_hub import hf_hub_download

    commit = hugging_face.commit_of("tester/model")
    hf_hub_download("tester/model", "config.json", revision=commit, endpoint=hugging_face.url)
    (tmp_path / "brought").mkdir()
    bring(Reference("tester/model", commit), tmp_path / "brought")
    assert names_in(tmp_path / "brought") == NAMES


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_model_that_the_hub_refuses_is_an_error_with_its_reason(
    hugging_face: hub.Hub, url: str, tmp_path: Path
) -> None:
    hugging_face.make_model("gated", tmp_path / "model")
    hugging_face.gated.add("tester/gated")
    for name, revision, kind, says in [
        ("tester/none", "main", MissingError, "the Hub has no such model, or it is private"),
        ("tester/model", "v9", MissingError, "no such revision"),
        ("tester/gated", "main", AccessError, "access to this model must be requested"),
        ("not/a/name", "main", MissingError, "the Hub has no such model, or it is private"),
    ]:
        with pytest.raises(kind, match=says) as caught:
            wc.init(url, Reference(name, revision))
        assert "\n" not in str(caught.value)
        assert hugging_face.url not in str(caught.value)
    assert list(wc.open_store(url).list("")) == []
    assert run("init", url, "--from-hub", "tester/gated@main", code=8)["error"]["hint"].startswith("Request access")


def test_reference_to_a_model_without_weights_is_refused(hugging_face: hub.Hub, url: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    hugging_face.make_model("empty", tmp_path / "empty")
    with pytest.raises(CheckpointError):
        wc.init(url, Reference("tester/empty", "main"))
    assert list(wc.open_store(url).list("")) == []


def test_unreachable_hub_is_an_error_with_a_remedy(hugging_face: hub.Hub, tmp_path: Path) -> None:
    """The channel is somewhere else."""
    wc.init(tmp_path / "bucket", Reference("tester/model", "main"))
    commit = hugging_face.commit_of("tester/model")
    cache = Path(os.environ["HF_HUB_CACHE"])
    cache.rename(tmp_path / "cache")
    hugging_face.stop()
    try:
        with pytest.raises(ChannelError) as caught:
            pull(tmp_path / "bucket", tmp_path / "replica")
        with pytest.raises(UnreachableError):
            resolved(Reference("tester/model", "main"))
        (tmp_path / "cache").rename(cache)
        assert pull(tmp_path / "bucket", tmp_path / "replica").version == 0, "the cache has it all"
    finally:
        hugging_face.start()
    assert f"Download tester/model at {commit} into the replica's folder first: it is version 0." in str(caught.value)
    assert "outside the bucket: the Hub cannot be reached" in str(caught.value)


def test_missing_library_is_an_error_with_a_remedy(hugging_face: hub.Hub, tmp_path: Path) -> None:
    wc.init(tmp_path / "bucket", Reference("tester/model", "main"))
    code = """
import sys; sys.modules["huggingface_hub"] = None
import weightcast as wc
with wc.Subscriber(sys.argv[1], sys.argv[2]) as subscriber:
    subscriber.poll()
"""
    command = [sys.executable, "-c", code, tmp_path / "bucket", tmp_path / "replica"]
    shown = subprocess.run(command, capture_output=True, text=True).stderr
    assert "Download tester/model at" in shown
    assert "NoRouteError: version 0 needs a checkpoint from outside the bucket: this needs huggingface_hub" in shown


def test_contradicting_arguments_are_refused(url: str, tmp_path: Path) -> None:
    for arguments in (
        (url,),
        (url, tmp_path / "model", "--from-hub", "tester/model@main"),
        (url, "--reference", "tester/model@main"),
        (url, "--from-hub", "tester/model@main", "--reference", "tester/model@main"),
        (url, "--from-hub", "tester/model"),
    ):
        assert run("init", *arguments, code=2)["error"]["hint"]


def test_no_progress_bar_is_drawn(url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wc.init(url, Reference("tester/model", "main"))
    pull(url, tmp_path / "replica")
    assert capfd.readouterr() == ("", "")


def test_progress_of_a_download_is_reported(hugging_face: hub.Hub, tmp_path: Path) -> None:
    weights = np.random.default_rng(0).integers(0, 1 << 16, (10, 1 << 18), dtype=np.uint16)
    write_folder(tmp_path / "large", wc.Arrays({"a": weights}, {"a": "BF16"}), shards=1)
    hugging_face.make_model("large", tmp_path / "large")
    told: list[tuple[str, int, int]] = []
    (tmp_path / "brought").mkdir()
    bring(Reference("tester/large", "main"), tmp_path / "brought", lambda *report: told.append(report))
    # All but the index, which is read before, to learn what else is needed.
    size = sum(path.stat().st_size for path in (tmp_path / "large").iterdir() if not path.name.endswith(".index.json"))
    assert told[-1] == ("download", size, size)


# -- models that are not what they should be ---------------------------------------------------------------------------


def sparse(path: Path, size: int) -> None:
    """A file of that size, which takes no room."""
    path.touch()
    os.truncate(path, size)


def downloads(hugging_face: hub.Hub, since: int) -> list[str]:
    return [name for name in hugging_face.asked[since:] if name == "model-file"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "brought"
    path.mkdir()
    return path


@pytest.mark.parametrize("linked", [False, True])
def test_model_larger_than_the_disk_is_not_downloaded(
    hugging_face: hub.Hub, tmp_path: Path, folder: Path, linked: bool
) -> None:
    (tmp_path / "large").mkdir()
    sparse(tmp_path / "large" / "model.safetensors", 8 << 40)
    hugging_face.make_model("large", tmp_path / "large")
    with pytest.raises(SpaceError, match="bytes are needed"):
        bring(Reference("tester/large", "main"), folder, linked=linked)
    assert not downloads(hugging_face, 0)


def test_weights_larger_than_the_channel_are_not_downloaded(
    hugging_face: hub.Hub, tmp_path: Path, folder: Path
) -> None:
    model, expected = tmp_path / "model", small_model().table.nbytes
    with (model / "model-00002-of-00002.safetensors").open("ab") as file:
        file.truncate(2 * expected + (200 << 20))
    with pytest.raises(StoreError, match=r"the model's weights have .* bytes, but the channel's have") as caught:
        bring(Reference("tester/model", "main"), folder, expected_bytes=expected)
    assert caught.value.hint
    assert len(downloads(hugging_face, 0)) <= 2, "the index, which is asked for and fetched"
    assert names_in(folder) == set()


def test_model_of_the_size_of_the_channel_is_downloaded(hugging_face: hub.Hub, folder: Path) -> None:
    bring(Reference("tester/model", "main"), folder, expected_bytes=small_model().table.nbytes)
    assert names_in(folder) == NAMES


def test_oversized_companion_files_are_not_downloaded(hugging_face: hub.Hub, tmp_path: Path, folder: Path) -> None:
    for name in ("vocab.txt", "notes.json", "tokenizer.model"):
        sparse(tmp_path / "model" / name, 100 << 20)
    with pytest.raises(StoreError, match="files other than weights have"):
        bring(Reference("tester/model", "main"), folder)
    assert not downloads(hugging_face, 0)


def test_hub_that_states_no_sizes_is_refused_before_a_download(
    hugging_face: hub.Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import HfApi

    real = HfApi.model_info

    def without_sizes(self: HfApi, *arguments: Any, **options: Any) -> Any:
        return real(self, *arguments, **options | {"files_metadata": False})

    monkeypatch.setattr(HfApi, "model_info", without_sizes)
    with pytest.raises(StoreError, match="does not say how large"):
        bring(Reference("tester/model", "main"), folder)
    assert not downloads(hugging_face, 0)


@pytest.mark.parametrize(
    "index", ["", "[]", '{"weight_map": 1}', '{"weight_map": {"a": 1}}', "[" * 100_000, '"\\ud800"']
)
def test_malformed_index_is_refused(hugging_face: hub.Hub, tmp_path: Path, folder: Path, index: str) -> None:
    (tmp_path / "model" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(StoreError, match="index"):
        bring(Reference("tester/model", "main"), folder)


def test_copies_of_the_weights_are_not_downloaded(hugging_face: hub.Hub, tmp_path: Path, folder: Path) -> None:
    sparse(tmp_path / "model" / "consolidated.safetensors", 160 << 20)
    sparse(tmp_path / "model" / "[m]odel-00001-of-00002.safetensors", 160 << 20)
    bring(Reference("tester/model", "main"), folder, expected_bytes=small_model().table.nbytes)
    assert names_in(folder) == NAMES


def test_model_without_copies_is_whole_in_the_cache(hugging_face: hub.Hub, tmp_path: Path, folder: Path) -> None:
    (tmp_path / "model" / "consolidated.safetensors").write_bytes(b"the same in another layout")
    reference = Reference("tester/model", hugging_face.commit_of("tester/model"))
    bring(reference, folder)
    hugging_face.stop()
    try:
        bring(reference, folder)
    finally:
        hugging_face.start()
    assert names_in(folder) == NAMES


def test_code_is_not_downloaded(hugging_face: hub.Hub, tmp_path: Path, folder: Path) -> None:
    (tmp_path / "model" / "config.json").write_text('{"auto_map": {"AutoModel": "evil.Evil"}, "kept": 1}')
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    (tmp_path / "model" / "evil.py").write_text("import os")
    reference = Reference("tester/model", "main")
    bring(reference, folder)
    assert names_in(folder) == NAMES
    assert json.loads((folder / "config.json").read_text()) == {"kept": 1}
    cached = next(Path(os.environ["HF_HUB_CACHE"]).glob("*/snapshots/*/config.json"))
    bring(reference, folder, linked=True)
    assert "auto_map" in cached.read_text(), "the cache is not ours to change"


def begun_elsewhere(url: str) -> wc.Arrays:
    """A channel that begins at a model of the Hub and has three versions more; what it ends with."""
    wc.init(url, Reference("tester/model", "main"))
    model = small_model()
    with wc.Publisher(url, model) as publisher:
        for step in (1, 2, 3):
            train(model, step)
            publisher.publish().result(60)
    return model


def test_broken_edge_is_found_in_a_channel_with_a_reference(url: str) -> None:
    begun_elsewhere(url)
    chain = Chain.open(wc.open_store(url))
    assert list(verify(chain)) == []
    chain.store.delete(chain.manifest(2).objects[0].key)
    assert "no route leads from any anchor to the head" in [finding.problem for finding in verify(chain)]


def test_short_outage_of_the_hub_does_not_cause_an_upload(
    hugging_face: hub.Hub, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wc.init(url, Reference("tester/model", "main"))

    def away(*_: object, **__: object) -> None:
        raise UnreachableError("the Hub asks to slow down", url="hf://tester/model")

    model = small_model()
    train(model, 1)
    with monkeypatch.context() as patch:
        patch.setattr("weightcast.follow.fetch.bring", away)
        with pytest.raises(ChannelError, match="slow down"):
            wc.Publisher(url, model)
    with wc.Publisher(url, model) as publisher:
        assert publisher.publish().result(30).position.version == 1
    assert Chain.open(wc.open_store(url)).manifest(1).base is not None


def test_gc_keeps_a_channel_with_a_reference_reachable(url: str) -> None:
    model = begun_elsewhere(url)
    run("gc", url, "--window", "0s", "--grace", "0s")
    there = blank(model)
    assert pull(wc.open_store(url), there).version == 3
    assert same_bits(there, model)
