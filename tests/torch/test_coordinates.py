"""The coordinates of live models against what `save_pretrained` writes of them."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")

from families import (  # noqa: E402
    EXPERTS,
    FAMILIES,
    MADE,
    SMALL,
    NeedsAll,
    arrays_of,
    assert_is_saved,
    built,
    change,
    patterns,
)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from transformers.core_model_loading import WeightConverter  # noqa: E402

from weightcast.disk.checkpoint import Checkpoint  # noqa: E402
from weightcast.torch.coordinates import coordinates_of  # noqa: E402

# Families


@pytest.mark.parametrize("family", FAMILIES)
def test_layout_is_what_save_pretrained_writes(family: str, tmp_path: Path) -> None:
    model = built(family)
    layout = coordinates_of(model)
    assert layout.model is model
    assert not layout.aliases
    assert patterns(made.name for made in layout.made) == MADE.get(family, set())
    assert_is_saved(layout, model, tmp_path / "first")
    change(model, 1)
    assert_is_saved(layout, model, tmp_path / "second")


@pytest.mark.parametrize("family", ["qwen3 tied", "mixtral", "gpt2", "t5", "hrm_text", "ernie4_5_vl_moe"])
def test_layout_in_fp32_is_what_save_pretrained_writes(family: str, tmp_path: Path) -> None:
    model = built(family, torch.float32)
    assert_is_saved(coordinates_of(model), model, tmp_path)


def test_layout_of_mixed_dtypes_is_what_save_pretrained_writes(tmp_path: Path) -> None:
    model = built("qwen3_moe")
    model.model.norm.float()
    model.model.layers[0].mlp.gate.half()
    assert_is_saved(coordinates_of(model), model, tmp_path)


@pytest.mark.parametrize("family", ["qwen3_moe", "llava", "qwen2_vl", "hrm_text", "t5"])
def test_loaded_model_is_saved_under_the_names_it_was_loaded_from(family: str, tmp_path: Path) -> None:
    """A loaded model carries conversions of its own, which transformers would edit."""
    made = built(family)
    made.save_pretrained(tmp_path / "first")
    model = type(made).from_pretrained(tmp_path / "first")
    kept = model._weight_conversions
    before = [(c._original_source_patterns[:], c._original_target_patterns[:]) for c in kept]
    layout = coordinates_of(model)
    change(model, 1)
    assert_is_saved(layout, model, tmp_path / "second")
    with Checkpoint(tmp_path / "first") as first:
        assert arrays_of(layout).table == first.table
    fresh = coordinates_of(type(made).from_pretrained(tmp_path / "first")).model
    assert [(c._original_source_patterns, c._original_target_patterns) for c in fresh._weight_conversions] == before


def test_sharded_checkpoint_has_the_same_layout(tmp_path: Path) -> None:
    model = built("qwen3_moe")
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    with Checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint.files) > 1
        assert checkpoint.table == arrays_of(coordinates_of(model)).table


def test_sources_are_the_parameters_of_the_optimizer() -> None:
    model = built("hrm_text")
    layout = coordinates_of(model)
    own = {id(parameter) for parameter in model.parameters()}
    sources = {id(piece.source) for piece in layout.pieces} | {id(s) for made in layout.made for s in made.sources}
    assert sources == own


def test_converted_tensors_have_only_the_sources_they_need() -> None:
    (layer, *_) = (model := built("jina_embeddings_v3")).layers
    wqkv = next(made for made in coordinates_of(model).made if made.name == "encoder.layers.0.mixer.Wqkv.weight")
    attention = layer.self_attn
    wanted = {id(part.weight) for part in (attention.q_proj, attention.k_proj, attention.v_proj)}
    assert {id(source) for source in wqkv.sources} == wanted
    assert wqkv.shape == tuple(wqkv.tensor().shape) == (48, 16)
    assert wqkv.tensor().dtype == torch.bfloat16
    assert not wqkv.tensor().requires_grad


def test_views_follow_memory_that_is_replaced() -> None:
    model = built("qwen3_moe")
    layout = coordinates_of(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() + 1
    for piece in layout.pieces:
        view = piece.view()
        assert view.is_contiguous()
        assert not view.requires_grad
        start = piece.source.data_ptr() + piece.offset * view.itemsize
        assert (view.data_ptr(), tuple(view.shape), view.dtype) == (start, piece.shape, piece.source.dtype)


def test_names_are_sorted_by_their_bytes() -> None:
    names = [piece.name.encode() for piece in coordinates_of(built("qwen3_moe")).pieces]
    assert names == sorted(names)


def test_conversion_that_reads_tensors_it_does_not_use_is_traced(tmp_path: Path) -> None:
    model = built("qwen3")
    converter = WeightConverter(["qk.weight"], ["q_norm.weight", "k_norm.weight"], [NeedsAll()])
    model._weight_conversions = [converter]
    layout = coordinates_of(model)
    (first, second) = layout.made
    assert [first.name, second.name] == [f"model.layers.{i}.self_attn.qk.weight" for i in range(2)]
    assert [id(source) for source in first.sources] == [id(model.model.layers[0].self_attn.q_norm.weight)]
    assert_is_saved(layout, model, tmp_path)


class Halves(NeedsAll):
    """The columns of each half, which lie apart, as a flat tensor."""

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        (tensor,) = input_dict[source_patterns[0]]
        return {
            target: half.contiguous().view(-1) for target, half in zip(target_patterns, tensor.chunk(2, 1), strict=True)
        }


def test_conversion_that_needs_contiguous_memory_is_traced(tmp_path: Path) -> None:
    model = built("qwen3")
    model._weight_conversions = [WeightConverter(["left.weight", "right.weight"], "o_proj.weight", [Halves()])]
    layout = coordinates_of(model)
    assert patterns(made.name for made in layout.made) == {
        f"model.layers.*.self_attn.{side}.weight" for side in ("left", "right")
    }
    assert_is_saved(layout, model, tmp_path)


# What a layout costs


def test_twenty_thousand_experts_are_traced() -> None:
    sizes = {**SMALL, **EXPERTS, "hidden_size": 8, "num_hidden_layers": 52, "moe_intermediate_size": 4}
    config = tf.Qwen3MoeConfig(**{**sizes, "num_experts": 128, "head_dim": 4, "_experts_implementation": "eager"})
    with torch.device("meta"):
        model = tf.Qwen3MoeForCausalLM(config)
    model.to_empty(device="cpu")
    layout = coordinates_of(model)
    assert len(layout.pieces) > 20_000
    assert not layout.made


class NoNewMemory(TorchDispatchMode):
    """Allows nothing but views of tensors that have memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id_of_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                assert id_of_storage(tensor) in given, func
        return result


def id_of_storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


@pytest.mark.parametrize("family", ["qwen3 tied", "qwen3_moe", "hrm_text", "ernie4_5_vl_moe", "llava", "t5"])
def test_layout_takes_no_memory_and_leaves_the_model_unchanged(family: str) -> None:
    def ids(values: dict[str, Any]) -> dict[str, int]:
        return {name: id(value) for name, value in values.items()}

    def state() -> Any:
        return [
            (name, ids(vars(module)), ids(module._parameters), ids(module._buffers), ids(module._modules))
            for name, module in model.named_modules()
        ]

    model = built(family)
    before, config, versions = state(), model.config.to_dict(), [p._version for p in model.parameters()]
    with NoNewMemory():
        coordinates_of(model)
    assert state() == before
    assert model.config.to_dict() == config
    assert [p._version for p in model.parameters()] == versions


def test_transformers_is_not_imported_for_a_plain_module() -> None:
    code = (
        "import sys, torch; from weightcast.torch.coordinates import coordinates_of;"
        "coordinates_of(torch.nn.Linear(2, 2));"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_converted_tensors_are_logged_by_kind(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weightcast")
    coordinates_of(built("qwen3_moe"))
    assert not caplog.messages
    coordinates_of(built("ernie4_5_vl_moe"))
    coordinates_of(built("jina_embeddings_v3"))
    prefix = "not part of a parameter, computed again for each version: "
    assert caplog.messages == [
        prefix + "model.layers.1.mlp.gate.weight",
        prefix + "model.layers.1.mlp.gate.weight_1",
        prefix + "model.layers.1.mlp.moe_statics.e_score_correction_bias",
        prefix + "encoder.layers.0.mixer.Wqkv.bias and 1 more of its kind",
        prefix + "encoder.layers.0.mixer.Wqkv.weight and 1 more of its kind",
    ]
