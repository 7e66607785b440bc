"""Streams of transformers models whose checkpoints have another form: one table and one digest on every path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")

from families import FAMILIES, built, qwen3  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.channel.chain import Chain  # noqa: E402
from weightcast.errors import UsageError  # noqa: E402
from weightcast.store.base import Store  # noqa: E402
from weightcast.store.memory import MemoryStore  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, F32 = torch.bfloat16, torch.float32
MIXTURES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "ernie4_5_vl_moe"]
FUSED = "model.layers.0.mlp.experts.gate_up_proj"


def held(model: Any) -> list[tuple[str, Any]]:
    """What a framework streams that takes all from the `state_dict`, fused and in float32 or not."""
    return [(name, tensor.detach().to(DEVICE)) for name, tensor in model.state_dict().items()]


def trained(model: Any) -> Iterator[tuple[str, Any]]:
    """What TRL streams."""
    return ((name, tensor.detach().to(DEVICE)) for name, tensor in model.named_parameters() if tensor.requires_grad)


def step(model: Any, seed: int) -> None:
    luck = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.requires_grad:
                moves = 0.01 * torch.randn(tensor.shape, generator=luck)
                tensor += torch.where(torch.rand(tensor.shape, generator=luck) < 0.05, moves, 0).to(tensor.dtype)


def saved_digest(model: Any, folder: Path) -> str:
    """The digest of what `save_pretrained` writes of a model in bf16."""
    deepcopy(model).to(BF16).save_pretrained(folder)
    return digest_of(folder)


def digest_of(folder: Path) -> str:
    with wc.Checkpoint(folder) as checkpoint:
        return wc.fingerprint(checkpoint).digest


def follow(store: Store, folder: Path) -> str:
    with wc.Subscriber(store, folder, threads=1) as subscriber:
        subscriber.sync()
        subscriber.fold()
    return digest_of(folder)


def table(store: Store) -> Any:
    return Chain.open(store).channel.table


# -- one table, one digest ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("family", MIXTURES)
def test_followers_have_what_save_pretrained_writes_by_stream_and_by_model(
    family: str, dtype: Any, tmp_path: Path
) -> None:
    model, by_stream, by_model = built(family, dtype), MemoryStore(), MemoryStore()
    with (
        wc.StreamPublisher(by_stream, model=model, dtype="BF16", threads=1) as streams,
        wc.Publisher(by_model, model, dtype="BF16", detect="device", threads=1) as models,
    ):
        for number in range(4):
            if number:
                step(model, number)
                models.publish(step=number).result(60)
            at = streams.send(held(model), step=number).result(60).position
            saved = saved_digest(model, tmp_path / str(number))
            assert at == models.position
            assert at.version == number
            assert follow(by_stream, tmp_path / "by stream") == follow(by_model, tmp_path / "by model") == saved
    assert table(by_stream) == table(by_model)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_channel_of_a_checkpoint_is_continued(family: str, tmp_path: Path) -> None:
    """Begun by `init`, as the guide has it; the model is known by its configuration alone."""
    model, store = built(family, F32), MemoryStore()
    saved_digest(model, tmp_path / "model")
    wc.init(store, tmp_path / "model")
    structure = type(model).from_pretrained(tmp_path / "model", device_map="meta")
    with wc.StreamPublisher(store, model=structure, threads=1) as publisher:
        assert publisher.send(trained(model)).result(60).position.version == 0
        for number in (1, 2):
            step(model, number)
            assert publisher.send(trained(model)).result(60).position.version == number
            assert follow(store, tmp_path / "mirror") == saved_digest(model, tmp_path / str(number))


@pytest.mark.parametrize("family", FAMILIES)
def test_small_step_of_any_family_is_a_small_patch(family: str, tmp_path: Path) -> None:
    model, store = built(family), MemoryStore()
    with wc.StreamPublisher(store, model=model, threads=1) as publisher:
        publisher.send(held(model)).result(60)
        name, parameter = max(model.named_parameters(), key=lambda pair: pair[1].numel())
        parameter.data.view(-1)[3] += 1
        assert publisher.send(held(model)).result(60).changed == 1, name
    assert follow(store, tmp_path / "mirror") == saved_digest(model, tmp_path / "saved")


def test_replicas_of_a_channel_that_a_stream_began_have_the_configuration(tmp_path: Path) -> None:
    model, store = built("qwen3_moe", F32), MemoryStore()
    with wc.StreamPublisher(store, model=model, dtype="BF16", threads=1) as publisher:
        publisher.send(trained(model))
    follow(store, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3_moe"
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(
        torch.equal(tensor, other.to(BF16))
        for tensor, other in zip(loaded.parameters(), model.parameters(), strict=True)
    )


def test_plain_module_has_the_table_of_its_publisher() -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(8, 4), "head": torch.nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    by_stream, by_model = MemoryStore(), MemoryStore()
    with (
        wc.StreamPublisher(by_stream, model=model, threads=1) as streams,
        wc.Publisher(by_model, model, threads=1) as models,
    ):
        streams.send(held(model))
        model["head"].weight.data += 1
        assert streams.send(held(model)).result(60).position == models.publish().result(60).position
    assert table(by_stream) == table(by_model)


# -- tied heads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_head", [None, False, True])
@pytest.mark.parametrize("sends_head", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
def test_tied_head_in_stream_and_channel(
    has_head: bool | None, sends_head: bool, backwards: bool, tmp_path: Path
) -> None:
    """Channels that begin with the stream (None), or with a checkpoint that has the head only as embedding, or too."""
    model, store = qwen3(tied=True).to(BF16), MemoryStore()
    if has_head is not None:
        model.save_pretrained(tmp_path / "model")
        with wc.Checkpoint(tmp_path / "model") as checkpoint:
            bits = {spec.name: checkpoint.read(spec.name).reshape(spec.shape).copy() for spec in checkpoint.table}
        if has_head:
            bits["lm_head.weight"] = bits["model.embed_tokens.weight"]
        wc.init(store, wc.Arrays(bits, dict.fromkeys(bits, "BF16")))
    with wc.StreamPublisher(store, model=model, threads=1) as publisher:
        for number in range(3):
            step(model, number)
            stream = held(model) if sends_head else list(trained(model))
            publisher.send(reversed(stream) if backwards else stream).result(60)
    follow(store, tmp_path / "mirror")
    model.save_pretrained(tmp_path / "saved")
    with wc.Checkpoint(tmp_path / "mirror") as mirror, wc.Checkpoint(tmp_path / "saved") as saved:
        assert {spec.name for spec in mirror.table} - {spec.name for spec in saved.table} == (
            {"lm_head.weight"} if has_head else set()
        )
        for spec in mirror.table:
            like = spec.name.replace("lm_head", "model.embed_tokens")
            assert (mirror.read(spec.name) == saved.read(like)).all(), spec.name


@pytest.mark.parametrize("first", [False, True])
def test_head_that_is_no_copy_of_the_embedding_is_refused(first: bool) -> None:
    model, store = qwen3(tied=True).to(BF16), MemoryStore()
    with wc.StreamPublisher(store, model=model, threads=1) as publisher:
        if not first:
            publisher.send(held(model)).result(60)
        stream = [(name, tensor + 1 if name == "lm_head.weight" else tensor) for name, tensor in held(model)]
        with pytest.raises(UsageError, match=r"not a copy of model\.embed_tokens\.weight"):
            publisher.send(stream)
        at = publisher.send(held(model)).result(60).position
    assert at.version == 0


# -- what is missing, what fails ---------------------------------------------------------------------------------------


def test_frozen_tensors_keep_their_bits(tmp_path: Path) -> None:
    model, store = built("mixtral"), MemoryStore()
    model.save_pretrained(tmp_path / "model")
    wc.init(store, tmp_path / "model")
    model.model.layers[0].requires_grad_(False)
    with wc.StreamPublisher(store, model=model, threads=1) as publisher:
        for number in (1, 2):
            step(model, number)
            publisher.send(trained(model)).result(60)
            assert follow(store, tmp_path / "mirror") == saved_digest(model, tmp_path / "saved")


def test_part_of_a_model_begins_no_channel() -> None:
    model, store = built("qwen3_moe"), MemoryStore()
    model.lm_head.requires_grad_(False)
    with wc.StreamPublisher(store, model=model, threads=1) as publisher:
        with pytest.raises(UsageError, match=r"did not send lm_head\.weight.*weightcast init") as caught:
            publisher.send(trained(model))
        assert caught.value.tensor == "lm_head.weight"
        assert not list(store.list(""))
        assert publisher.send(held(model)).result(60).position.version == 0


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("count", [1, 7, 12])
def test_stream_that_fails_half_way_is_undone(family: str, count: int, tmp_path: Path) -> None:
    model, store = built(family, F32), MemoryStore()
    with wc.StreamPublisher(store, model=model, dtype="BF16", threads=1) as publisher:
        publisher.send(held(model)).result(60)
        for number in (1, 2):
            step(model, number)
            rest = iter(held(model))

            def broken(rest: Iterator[Any] = rest) -> Iterator[Any]:
                yield from islice(rest, count)
                raise RuntimeError("a rank is gone")

            with pytest.raises(RuntimeError, match="a rank is gone"):
                publisher.send(broken())
            spoiled = [(name, tensor[:1] if i == count else tensor) for i, (name, tensor) in enumerate(held(model))]
            came = iter(spoiled)
            with pytest.raises(UsageError, match="sent shape"):
                publisher.send(came)
            assert next(came, None) is None  # other ranks gather all of it
            assert publisher.position.version == number - 1
            publisher.send(held(model)).result(60)
            assert follow(store, tmp_path / "mirror") == saved_digest(model, tmp_path / str(number))


def test_without_the_model_the_error_names_it(tmp_path: Path) -> None:
    model, store = built("qwen3_moe"), MemoryStore()
    model.save_pretrained(tmp_path)
    wc.init(store, tmp_path)
    with wc.StreamPublisher(store, threads=1) as publisher:
        with pytest.raises(UsageError, match=r"experts.*pass the model as well: model=") as caught:
            publisher.send(held(model))
        assert caught.value.tensor == FUSED
