"""The layout of live models against what `save_pretrained` writes of them, and every refusal."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")

from torch import distributed, nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from transformers.core_model_loading import Concatenate, ConversionOps, WeightConverter  # noqa: E402

from weightcast.disk.checkpoint import Checkpoint  # noqa: E402
from weightcast.errors import UsageError  # noqa: E402
from weightcast.format.digest import fingerprint  # noqa: E402
from weightcast.format.spec import DTYPES as BIT_DTYPES  # noqa: E402
from weightcast.format.tensors import Arrays  # noqa: E402
from weightcast.torch.coordinates import DTYPES, Coordinates, coordinates_of, unwrapped  # noqa: E402

TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    **TOKENS,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
VISION: dict[str, Any] = {"depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 4}


def qwen3(tied: bool = True) -> Any:
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=tied))


def qwen3_moe() -> Any:
    return tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=8))


def deepseek_v3() -> Any:
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
    routing = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    sizes = {**SMALL, "num_key_value_heads": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
    return tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**sizes, **ranks, **routing))


def gpt2() -> Any:
    return tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, **TOKENS))


def t5() -> Any:
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return tf.T5ForConditionalGeneration(tf.T5Config(**sizes, tie_word_embeddings=True))


def llava() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {"model_type": "clip_vision_model", **sizes, "image_size": 8, "patch_size": 4, "projection_dim": 16}
    config = tf.LlavaConfig(text_config={"model_type": "llama", **SMALL}, vision_config=vision)
    return tf.LlavaForConditionalGeneration(config)


def qwen2_vl() -> Any:
    config = tf.Qwen2VLConfig(text_config=SMALL, vision_config={**VISION, "embed_dim": 16})
    return tf.Qwen2VLForConditionalGeneration(config)


def qwen3_vl_moe() -> Any:
    sizes = {"intermediate_size": 24, "out_hidden_size": 16, "num_position_embeddings": 16}
    vision = {**VISION, **sizes, "deepstack_visual_indexes": [0]}
    config = tf.Qwen3VLMoeConfig(text_config={**SMALL, **EXPERTS, "head_dim": 8}, vision_config=vision)
    return tf.Qwen3VLMoeForConditionalGeneration(config)


def ernie_vl_moe() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    moe = {"moe_intermediate_size": [8, 4], "moe_num_experts": 4, "moe_k": 2, "mlp_layer_types": ["dense", "sparse"]}
    text = {**SMALL, **moe, "rope_parameters": rope}
    config = tf.Ernie4_5_VLMoeConfig(text_config=text, vision_config={**VISION, "intermediate_size": 24})
    return tf.Ernie4_5_VLMoeForConditionalGeneration(config)


def marian() -> Any:
    sides = {
        f"{side}_{what}": number
        for side in ("encoder", "decoder")
        for what, number in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 24))
    }
    start = {"decoder_start_token_id": 0, "forced_eos_token_id": 2}
    config = tf.MarianConfig(vocab_size=64, d_model=16, max_position_embeddings=32, **sides, **TOKENS, **start)
    return tf.MarianMTModel(config)


def jina() -> Any:
    config = tf.JinaEmbeddingsV3Config(**SMALL, max_position_embeddings=32)
    return tf.JinaEmbeddingsV3Model(config)


FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3 tied": qwen3,
    "qwen3": lambda: qwen3(tied=False),
    "qwen3_moe": qwen3_moe,
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**SMALL, num_local_experts=4)),
    "deepseek_v3": deepseek_v3,
    "gpt_oss": lambda: tf.GptOssForCausalLM(tf.GptOssConfig(**SMALL, head_dim=8, num_local_experts=4)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**SMALL, head_dim=8)),
    "gpt2": gpt2,
    "t5": t5,
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**SMALL)),
    "qwen2_vl": qwen2_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
    "llava": llava,
    "marian": marian,
    "ernie4_5_vl_moe": ernie_vl_moe,
    "jina_embeddings_v3": jina,
    "hrm_text": lambda: tf.HrmTextForCausalLM(tf.HrmTextConfig(**SMALL, head_dim=8)),
}

MADE = {
    "ernie4_5_vl_moe": {  # gates are transposed, the biases of two routers stacked
        "model.layers.*.mlp.gate.weight",
        "model.layers.*.mlp.gate.weight_*",
        "model.layers.*.mlp.moe_statics.e_score_correction_bias",
    },
    "jina_embeddings_v3": {"encoder.layers.*.mixer.Wqkv.bias", "encoder.layers.*.mixer.Wqkv.weight"},
    "hrm_text": {
        f"model.{side}_module.layers.*.{name}.weight"
        for side in "HL"
        for name in ("attn.gqkv_proj", "mlp.gate_up_proj")
    },
}
"""The families whose checkpoints have tensors that are no part of a parameter; all others have none."""


def change(model: nn.Module, seed: int) -> None:
    """New values in place, from the whole range of the dtype's bits but NaN."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=random))


def built(family: str, dtype: Any = None) -> Any:
    model = FAMILIES[family]().to(dtype or torch.bfloat16)
    change(model, 0)
    return model


def arrays_of(layout: Coordinates) -> Arrays:
    words = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
    tensors = {piece.name: piece.view() for piece in layout.pieces} | {made.name: made.tensor() for made in layout.made}
    arrays = {name: tensor.view(words[tensor.itemsize]).numpy() for name, tensor in tensors.items()}
    return Arrays(arrays, {name: DTYPES[tensor.dtype] for name, tensor in tensors.items()}, layout.aliases)


def assert_is_saved(layout: Coordinates, model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    arrays = arrays_of(layout)
    with Checkpoint(folder) as checkpoint:
        assert arrays.table == checkpoint.table
        for spec in checkpoint.table:
            assert np.array_equal(arrays.read(spec.name), checkpoint.read(spec.name)), spec.name
        assert fingerprint(arrays).digest == fingerprint(checkpoint).digest


def patterns(names: Iterator[str]) -> set[str]:
    return {re.sub(r"\d+", "*", name) for name in names}


# Families


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layout_is_what_save_pretrained_writes(family: str, tmp_path: Path) -> None:
    model = built(family)
    layout = coordinates_of(model)
    assert layout.model is model
    assert not layout.aliases
    assert patterns(made.name for made in layout.made) == MADE.get(family, set())
    assert_is_saved(layout, model, tmp_path / "first")
    change(model, 1)
    assert_is_saved(layout, model, tmp_path / "second")


@pytest.mark.parametrize("family", ["qwen3 tied", "mixtral", "gpt2", "t5", "hrm_text", "ernie4_5_vl_moe"])
def test_in_fp32(family: str, tmp_path: Path) -> None:
    model = built(family, torch.float32)
    assert_is_saved(coordinates_of(model), model, tmp_path)


def test_in_several_dtypes_at_once(tmp_path: Path) -> None:
    model = built("qwen3_moe")
    model.model.norm.float()
    model.model.layers[0].mlp.gate.half()
    assert_is_saved(coordinates_of(model), model, tmp_path)


@pytest.mark.parametrize("family", ["qwen3_moe", "llava", "qwen2_vl", "hrm_text", "t5"])
def test_a_loaded_model_goes_back_to_the_names_it_was_loaded_from(family: str, tmp_path: Path) -> None:
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


def test_a_sharded_checkpoint_is_the_same(tmp_path: Path) -> None:
    model = built("qwen3_moe")
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    with Checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint.files) > 1
        assert checkpoint.table == arrays_of(coordinates_of(model)).table


def test_sources_are_the_parameters_that_an_optimizer_has() -> None:
    model = built("hrm_text")
    layout = coordinates_of(model)
    own = {id(parameter) for parameter in model.parameters()}
    sources = {id(piece.source) for piece in layout.pieces} | {id(s) for made in layout.made for s in made.sources}
    assert sources == own


def test_made_tensors_have_no_other_sources_than_they_need() -> None:
    (layer, *_) = (model := built("jina_embeddings_v3")).layers
    wqkv = next(made for made in coordinates_of(model).made if made.name == "encoder.layers.0.mixer.Wqkv.weight")
    attention = layer.self_attn
    wanted = {id(part.weight) for part in (attention.q_proj, attention.k_proj, attention.v_proj)}
    assert {id(source) for source in wqkv.sources} == wanted
    assert wqkv.shape == tuple(wqkv.tensor().shape) == (48, 16)
    assert wqkv.dtype == wqkv.tensor().dtype == torch.bfloat16
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
        assert (view.data_ptr(), tuple(view.shape), view.dtype) == (start, piece.shape, piece.dtype)


def test_names_are_sorted_by_their_bytes() -> None:
    names = [piece.name.encode() for piece in coordinates_of(built("qwen3_moe")).pieces]
    assert names == sorted(names)


class NeedsAll(ConversionOps):
    """Hands one of its tensors on, changed, but wants to see them all."""

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        first, _ = (input_dict[pattern] for pattern in ("q_norm.weight", "k_norm.weight"))
        return {target_patterns[0]: first[0].clone() + 1}

    @property
    def reverse_op(self) -> NeedsAll:
        return self


def test_conversions_that_want_to_see_tensors_they_do_not_use(tmp_path: Path) -> None:
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


def test_conversions_that_count_on_contiguous_memory(tmp_path: Path) -> None:
    model = built("qwen3")
    model._weight_conversions = [WeightConverter(["left.weight", "right.weight"], "o_proj.weight", [Halves()])]
    layout = coordinates_of(model)
    assert patterns(made.name for made in layout.made) == {
        f"model.layers.*.self_attn.{side}.weight" for side in ("left", "right")
    }
    assert_is_saved(layout, model, tmp_path)


# What a layout costs


def test_twenty_thousand_experts_are_found() -> None:
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
def test_a_layout_takes_no_memory_and_leaves_the_model_as_it_is(family: str) -> None:
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


def test_made_tensors_are_logged_by_kind(caplog: pytest.LogCaptureFixture) -> None:
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


# Wrappers


def compiled(module: Any) -> Any:
    """Never run, so any backend will do; importing the usual one takes seconds and warns."""
    return torch.compile(module, backend="eager")


def table_of(model: Any) -> Any:
    return arrays_of(coordinates_of(model)).table


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2"])
def test_compiled_and_in_data_parallel(family: str) -> None:
    model = built(family)
    wanted = table_of(model)
    for wrapped in (
        compiled(model),
        nn.DataParallel(model),
        compiled(nn.DataParallel(compiled(model))),
    ):
        assert unwrapped(wrapped) is coordinates_of(wrapped).model is model
        assert table_of(wrapped) == wanted


@pytest.mark.usefixtures("one_process")
def test_in_distributed_data_parallel() -> None:
    model = built("qwen3 tied")
    wanted = table_of(model)
    wrapped = compiled(nn.parallel.DistributedDataParallel(model))
    assert coordinates_of(wrapped).model is model
    assert table_of(wrapped) == wanted


@pytest.mark.parametrize("family", ["qwen3 tied", "qwen3_moe", "llava", "t5", "hrm_text"])
def test_compiled_inside(family: str, tmp_path: Path) -> None:
    model, same = built(family), built(family)
    for name, module in list(model.named_modules()):
        if name and (
            isinstance(module, tf.PreTrainedModel) or name.endswith(("layers.0", "block.0", "mlp", "lm_head"))
        ):
            model.set_submodule(name, compiled(module))
    assert any("_orig_mod" in name for name in model.state_dict())
    layout = coordinates_of(compiled(model))
    assert layout.model is model
    assert_is_saved(layout, same, tmp_path)
    own = {id(parameter) for parameter in model.parameters()}
    assert {id(piece.source) for piece in layout.pieces} <= own


# Plain modules


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.module = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("forgotten", torch.arange(3), persistent=False)
        self.register_parameter("absent", None)
        self.scale = nn.Parameter(torch.tensor(2.0))


PLAIN = [
    "embed.weight",
    "kept",
    "module.bias",
    "module.weight",
    "norm.bias",
    "norm.num_batches_tracked",
    "norm.running_mean",
    "norm.running_var",
    "norm.weight",
    "scale",
]


def test_a_plain_module_goes_by_its_state_dict() -> None:
    model = Plain()
    layout = coordinates_of(model)
    assert [piece.name for piece in layout.pieces] == PLAIN
    assert layout.aliases == {"head.weight": "embed.weight"}
    assert not layout.made
    state = model.state_dict()
    for piece in layout.pieces:
        assert torch.equal(piece.view(), state[piece.name])
        assert piece.view().data_ptr() == state[piece.name].data_ptr()
    model.norm.train()(torch.randn(5, 4))
    seen = {piece.name: piece.view() for piece in layout.pieces}
    assert seen["norm.num_batches_tracked"].item() == 1
    assert torch.equal(seen["norm.running_mean"], model.norm.running_mean)


def test_wrappers_in_a_plain_module_leave_its_own_names_alone() -> None:
    model = Plain()
    model.module = nn.DataParallel(compiled(model.module))
    model.norm = compiled(model.norm)
    assert [piece.name for piece in coordinates_of(nn.DataParallel(model)).pieces] == PLAIN


def test_shared_modules_are_ties() -> None:
    layer = nn.Linear(2, 2)
    layout = coordinates_of(nn.ModuleList([nn.Identity(), layer, compiled(layer)]))
    assert [piece.name for piece in layout.pieces] == ["1.bias", "1.weight"]
    assert layout.aliases == {"2.bias": "1.bias", "2.weight": "1.weight"}


def test_tensors_without_elements_share_nothing() -> None:
    model = nn.ParameterDict({"a": torch.empty(0, 3), "b": torch.empty(0), "c": torch.ones(2)})
    layout = coordinates_of(model)
    assert {piece.name: tuple(piece.view().shape) for piece in layout.pieces} == {"a": (0, 3), "b": (0,), "c": (2,)}
    assert not layout.aliases


@pytest.mark.parametrize("build", [Plain, qwen3], ids=["plain", "qwen3"])
def test_parameters_that_are_parts_of_one_buffer(build: Callable[[], Any]) -> None:
    """As optimizers with flat buffers have them."""
    model = build()
    wanted = arrays_of(coordinates_of(model))
    parameters = list(model.parameters())
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view(parameter.shape)
    layout = coordinates_of(model)
    assert fingerprint(arrays_of(layout)).digest == fingerprint(wanted).digest
    parts = [piece for piece in layout.pieces if isinstance(piece.source, nn.Parameter)]
    assert {piece.source.untyped_storage().data_ptr() for piece in parts} == {flat.data_ptr()}


def test_ties_by_memory_are_ties(tmp_path: Path) -> None:
    model, pretrained = Plain(), built("qwen3 tied")
    model.head.weight = nn.Parameter(model.embed.weight.data)
    pretrained.lm_head.weight = nn.Parameter(pretrained.model.embed_tokens.weight.data)
    assert coordinates_of(model).aliases == {"head.weight": "embed.weight"}
    assert_is_saved(coordinates_of(pretrained), pretrained, tmp_path)
    assert table_of(pretrained) == table_of(built("qwen3 tied"))


def test_dtypes_are_those_of_the_wire() -> None:
    assert set(DTYPES.values()) <= BIT_DTYPES.keys()
    assert all(BIT_DTYPES[name].per_value == 8 * dtype.itemsize for dtype, name in DTYPES.items())
    assert {torch.complex128, torch.qint8, torch.quint8, torch.float4_e2m1fn_x2}.isdisjoint(DTYPES)
    parameters = {name: torch.empty(2, 2).to(dtype) for dtype, name in DTYPES.items()}
    module = nn.Module()
    for name, tensor in parameters.items():
        module.register_buffer(name, tensor)
    layout = coordinates_of(module)
    assert {piece.name: DTYPES[piece.dtype] for piece in layout.pieces} == {name: name for name in DTYPES.values()}


# Refusals


def holding(tensor: Any) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].weight = nn.Parameter(tensor, requires_grad=False)
    return module


def refusal_of(model: Any, tensor: str | None = "0.weight") -> UsageError:
    with pytest.raises(UsageError) as caught:
        coordinates_of(model)
    assert caught.value.tensor == tensor
    assert tensor is None or caught.value.hint or "not supported yet" in caught.value.problem
    return caught.value


def test_refuses_meta_tensors() -> None:
    assert "Materialise the model first" in str(refusal_of(holding(torch.empty(2, 2, device="meta"))))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_refuses_lazy_modules() -> None:
    assert "Materialise the model first" in str(refusal_of(nn.Sequential(nn.LazyLinear(2))))


def test_refuses_non_contiguous_parameters() -> None:
    error = refusal_of(holding(torch.empty(2, 3).t()))
    assert "not contiguous" in error.problem
    model = holding(torch.empty(2, 3).t())
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # what the hint says
    assert len(coordinates_of(model).pieces) == 2


@pytest.mark.usefixtures("one_process")
def test_refuses_sharded_parameters() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    error = refusal_of(holding(distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)])))
    assert error.problem == "sharded parameters are not supported yet"


def test_refuses_parameters_that_deepspeed_has_partitioned() -> None:
    model = holding(torch.empty(0))
    model[0].weight.ds_shape = torch.Size([2, 2])
    assert refusal_of(model).problem == "sharded parameters are not supported yet"


def test_refuses_fsdp_of_the_first_kind() -> None:
    class FullyShardedDataParallel(nn.Sequential):
        pass

    error = refusal_of(nn.ModuleDict({"inner": FullyShardedDataParallel(nn.Linear(2, 2))}), "inner")
    assert error.problem == "sharded parameters are not supported yet"


class Wrapping(torch.Tensor):
    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Wrapping((2, 2))


def test_refuses_tensors_without_plain_memory() -> None:
    assert refusal_of(holding(Wrapping((2, 2)))).problem == "a Wrapping has no plain memory"


def test_refuses_sparse_tensors() -> None:
    assert refusal_of(holding(torch.eye(2).to_sparse())).problem == "a torch.sparse_coo tensor has no plain memory"


def test_refuses_dtypes_that_safetensors_cannot_hold() -> None:
    error = refusal_of(holding(torch.ones(2, 2, dtype=torch.complex128)))
    assert error.problem == "safetensors files cannot hold torch.complex128"


def test_refuses_made_tensors_of_such_dtypes() -> None:
    class Widen(NeedsAll):
        def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
            return {target_patterns[0]: input_dict[source_patterns[0]][0].to(torch.complex128)}

    model = built("qwen3")
    model._weight_conversions = [WeightConverter("a.weight", "q_norm.weight", [Widen()])]
    error = refusal_of(model, "model.layers.0.self_attn.a.weight")
    assert error.problem == "safetensors files cannot hold torch.complex128"


def test_refuses_a_model_without_tensors() -> None:
    assert refusal_of(nn.Identity(), None).problem == "the model has no tensors"


def test_refuses_memory_that_is_shared_in_part() -> None:
    memory = torch.zeros(10)
    error = refusal_of(nn.ParameterDict({"a": memory[:6], "b": memory[5:]}), "b")
    assert "shares memory with a" in error.problem


def test_refuses_two_views_of_the_same_memory() -> None:
    memory = torch.zeros(4)
    refusal_of(nn.ParameterDict({"a": memory, "b": memory.view(2, 2)}), "b")
    refusal_of(nn.ParameterDict({"a": memory, "b": memory[:3]}), "b")
    module = nn.ParameterDict({"a": memory})
    module.register_buffer("b", memory.view(torch.int32))
    refusal_of(module, "b")


def test_refuses_state_that_is_no_parameter() -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"steps": 1}

    error = refusal_of(nn.Sequential(Counting(2, 2)), "0._extra_state")
    assert "no parameter or buffer" in error.problem


def test_refuses_ties_that_transformers_does_not_know(tmp_path: Path) -> None:
    model = built("qwen3")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    error = refusal_of(model, "model.layers.0.mlp.up_proj.weight")
    assert "model.layers.1.mlp.up_proj.weight" in error.problem
    with pytest.raises(RuntimeError, match="not properly defined"):
        model.save_pretrained(tmp_path)


def test_refuses_what_transformers_cannot_convert() -> None:
    model = built("qwen3")
    model._weight_conversions = [WeightConverter(["a.weight", "b.weight"], "q_norm.weight", [Concatenate(0)])]
    model._weight_conversions[0].operations[0].num_shards_attribute = "no_such_attribute"
    assert "save_pretrained" in str(refusal_of(model, None))


@pytest.mark.parametrize("inner", [False, True])
def test_refuses_adapters(inner: bool) -> None:
    peft_model = type("PeftModel", (nn.Linear,), {"__module__": "peft.peft_model"})(2, 2)
    assert "merge_and_unload" in str(refusal_of(nn.Sequential(peft_model) if inner else peft_model, None))
    model = built("qwen3")
    model._hf_peft_config_loaded = True
    assert "merge_and_unload" in str(refusal_of(model, None))


def test_refuses_quantised_models() -> None:
    model = built("qwen3")
    model.hf_quantizer = object()
    assert "quantised" in refusal_of(model, None).problem
