"""Streams of what a model holds, translated to what `save_pretrained` writes of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")

from families import FAMILIES, arrays_of, built, change  # noqa: E402
from torch import distributed, nn  # noqa: E402

from weightcast.errors import UsageError  # noqa: E402
from weightcast.torch.coordinates import coordinates_of  # noqa: E402
from weightcast.torch.structure import structure_of  # noqa: E402
from weightcast.torch.translation import Translation  # noqa: E402

FUSED = "model.layers.0.mlp.experts.gate_up_proj"


def held(model: Any) -> list[tuple[str, Any]]:
    """What a framework streams: each tensor once."""
    saved = model.state_dict().keys()
    return [(name, t.detach()) for name, t in chain(model.named_parameters(), model.named_buffers()) if name in saved]


def assert_is_saved(found: Any, model: Any) -> None:
    """The very tensors that the coordinates of the model have, which are those that it saves."""
    words = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
    tensors = dict(found)
    arrays = arrays_of(coordinates_of(model))
    assert set(tensors) == {spec.name for spec in arrays.table}
    for spec in arrays.table:
        bits = tensors[spec.name].contiguous().reshape(-1).view(words[tensors[spec.name].itemsize]).numpy()
        assert tuple(tensors[spec.name].shape) == spec.shape
        assert np.array_equal(bits, arrays.read(spec.name).reshape(-1)), spec.name


# -- exactness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_stream_of_a_family_is_what_it_saves(family: str) -> None:
    model = built(family)
    translation = Translation(model)
    for seed in (0, 1):
        change(model, seed)
        stream = held(model)
        random.Random(seed).shuffle(stream)
        assert_is_saved(translation.translate(stream), model)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "ernie4_5_vl_moe", "hrm_text"])
def test_dtype_of_the_stream_counts_not_that_of_the_model(family: str) -> None:
    model = built(family, torch.float32)
    translation = Translation(built(family))
    assert_is_saved(translation.translate(held(model)), model)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "ernie4_5_vl_moe", "jina_embeddings_v3"])
def test_tensor_may_be_overwritten_once_the_next_one_is_asked_for(family: str) -> None:
    model = built(family)

    def fleeting() -> Iterator[tuple[str, Any]]:
        room = torch.empty(1 << 16, dtype=torch.bfloat16)
        for name, tensor in held(model):
            there = room[: tensor.numel()].view(tensor.shape)
            there.copy_(tensor)
            yield name, there
            room.fill_(7.0)

    found = [(name, tensor.clone()) for name, tensor in Translation(model).translate(fleeting())]
    assert_is_saved(found, model)


def test_pieces_are_not_copied() -> None:
    model = built("mixtral")
    fused = model.get_parameter(FUSED)
    storage = fused.untyped_storage().data_ptr()
    found = dict(Translation(model).translate(held(model)))
    experts = [tensor for name, tensor in found.items() if ".0.block_sparse_moe.experts." in name]
    assert sum(t.untyped_storage().data_ptr() == storage for t in experts) == 8


def test_strides_of_the_stream_may_be_any() -> None:
    model = built("qwen3_moe")
    stream = [(name, t.mT.contiguous().mT if t.dim() > 1 else t) for name, t in held(model)]
    assert not dict(stream)[FUSED].is_contiguous()
    assert_is_saved(Translation(model).translate(stream), model)


# -- the model ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3 tied", "qwen3_moe", "mixtral", "t5", "llava", "ernie4_5_vl_moe"])
def test_model_on_the_meta_device_is_enough(family: str, tmp_path: Path) -> None:
    model = built(family)
    with torch.device("meta"):
        empty = type(model)(model.config)
    assert_is_saved(Translation(empty).translate(held(model)), model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, device_map="meta")
    assert_is_saved(Translation(loaded).translate(held(model)), model)


def test_structure_does_not_follow_what_happens_to_the_model() -> None:
    """TRL puts adapters into the model, and shards it, after it was passed."""
    model, same = built("qwen3_moe"), built("qwen3_moe")
    structure = structure_of(model)
    model.model.layers[0].mlp.experts = nn.Linear(2, 2)
    model.lm_head = nn.Sequential(model.lm_head)
    assert_is_saved(Translation(structure).translate(held(same)), same)
    assert all(tensor.is_meta for tensor in structure.state_dict().values())
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    "family", ["qwen3 tied", "qwen3_moe", "mixtral", "qwen3_vl_moe", "llava", "ernie4_5_vl_moe", "t5"]
)
def test_sharded_model_is_enough(family: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model, same = built(family), built(family)
    parts = [] if model.all_tied_weights_keys else [part for part in model.modules() if part is not model]
    for part in reversed(parts):  # the innermost first; what is tied is sharded together
        if isinstance(part, tf.PreTrainedModel | tf.modeling_layers.GradientCheckpointingLayer):
            fully_shard(part)
    fully_shard(model)
    stream = [(name, tensor.full_tensor()) for name, tensor in held(model)]
    assert_is_saved(Translation(model).translate(stream), same)
    with pytest.raises(UsageError, match="shard"):
        list(Translation(same).translate(held(model)))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module.", ""])
def test_names_of_wrappers_are_left_out(prefix: str) -> None:
    model = built("qwen3_moe")
    parts = {"layers.0.": "layers.0._checkpoint_wrapped_module.", "layers.1.mlp.": "layers.1.mlp._orig_mod."}
    stream = held(model)
    for part, wrapped in parts.items():
        stream = [(name.replace(part, wrapped), tensor) for name, tensor in stream]
    assert_is_saved(Translation(model).translate((prefix + name, t) for name, t in stream), model)
    compiled = torch.compile(model, backend="eager")
    assert_is_saved(Translation(compiled).translate(held(compiled)), model)


def test_module_of_that_name_is_not_a_wrapper() -> None:
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    names = {name for name, _ in Translation(model).translate(held(model))}
    assert names == {"module.weight", "module.bias"}


# -- ties and names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backwards", [False, True])
def test_tied_tensor_comes_once_under_the_name_of_the_checkpoint(backwards: bool) -> None:
    model = built("qwen3 tied")
    translation = Translation(model)
    assert translation.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    both = list(model.state_dict().items())
    found = list(translation.translate(reversed(both) if backwards else both))
    assert [name for name, _ in found if name in translation.tied] == ["lm_head.weight"]
    assert_is_saved([(name, tensor) for name, tensor in found if name not in translation.tied], model)
    only_head = [(name, tensor) for name, tensor in both if name != "model.embed_tokens.weight"]
    assert_is_saved(translation.translate(only_head), model)


def test_checkpoint_names_pass() -> None:
    model = built("mixtral")
    translation = Translation(model)
    saved = list(translation.translate(held(model)))
    assert_is_saved(translation.translate(saved), model)


def test_frozen_tensors_need_not_come() -> None:
    model = built("ernie4_5_vl_moe")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1." not in name and "embed" not in name)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = dict(Translation(model).translate((name, t) for name, t in held(model) if name in trained))
    whole = dict(Translation(model).translate(held(model)))
    assert found.keys() == {name for name in whole if "layers.1." not in name and "embed" not in name}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in found.items())


def bad(model: Any, case: str) -> list[tuple[str, Any]]:
    stream = dict(held(model))
    match case:
        case "twice":
            return [*stream.items(), (f"module.{FUSED}", stream[FUSED])]
        case "unknown":
            stream["model.layers.9.mlp.experts.gate_up_proj"] = stream[FUSED]
        case "shape":
            stream[FUSED] = stream[FUSED][:, :4]
        case "no tensor":
            stream[FUSED] = stream[FUSED].float().numpy()
        case "part":
            del stream["layers.0.self_attn.q_proj.weight"]
    return list(stream.items())


@pytest.mark.parametrize(
    ("case", "says", "tensor"),
    [
        ("twice", "twice", FUSED),
        ("unknown", "model has no such tensor.*same configuration", "model.layers.9.mlp.experts.gate_up_proj"),
        ("shape", r"sent shape \[4, 4, 16\], the model has \[4, 16, 16\]", FUSED),
        ("no tensor", "expected a tensor, got ndarray", FUSED),
        ("part", r"did not send layers\.0\.self_attn\.q_proj\.weight", "encoder.layers.0.mixer.Wqkv.weight"),
    ],
)
def test_stream_that_does_not_match_the_model_is_refused(case: str, says: str, tensor: str) -> None:
    model = built("jina_embeddings_v3" if case == "part" else "qwen3_moe")
    with pytest.raises(UsageError, match=says) as caught:
        list(Translation(model).translate(bad(model, case)))
    assert caught.value.tensor == tensor


def test_model_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match=r"expected a torch module, got str.*device_map='meta'"):
        structure_of("Qwen/Qwen3-30B-A3B")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no shape yet"):
        structure_of(nn.LazyLinear(3))
