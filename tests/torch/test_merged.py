"""A PEFT model as merged weights: at every version the bits of a copy's `merge_and_unload().save_pretrained`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from adapters import BF16, F32, adam, adapted, assert_same, lora, names_in, pulled, save_merged, step  # noqa: E402
from families import built  # noqa: E402
from torch import nn  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.errors import UsageError  # noqa: E402
from weightcast.store.memory import MemoryStore  # noqa: E402
from weightcast.torch import Merged  # noqa: E402
from weightcast.torch.adapters import layout_of  # noqa: E402

STEPS = 3
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

ADAPTERS: dict[str, dict[str, Any]] = {
    "float32 on bf16": {},
    "bf16": {"adapter_dtype": BF16},
    "float32": {"dtype": F32},
    "rslora on all linear layers": {"family": "qwen3 tied", "target_modules": "all-linear", "use_rslora": True},
    "ranks and alphas": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}, "lora_alpha": 5},
    "dora": {"use_dora": True},
    "a module to save": {"modules_to_save": ["lm_head"]},
    "a module to save, untied by it": {"family": "qwen3 tied", "modules_to_save": ["lm_head"]},
    "a tied embedding": {"family": "qwen3 tied", "target_modules": ["embed_tokens"]},
    "both of the tied embeddings": {"family": "qwen3 tied", "target_modules": ["embed_tokens", "lm_head"]},
    "tokens": {"trainable_token_indices": [1, 5]},
    "biases": {"family": "gpt2", "target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "lora_only"},
    "experts": {"family": "qwen3_moe", "target_parameters": EXPERTS},
    "what the checkpoint fuses": {"family": "hrm_text", "target_modules": ["q_proj", "down_proj"]},
}


@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")
@pytest.mark.parametrize("what", ADAPTERS)
def test_mirror_is_what_a_merged_copy_saves_at_every_version(what: str, tmp_path: Path) -> None:
    model = adapted(**ADAPTERS[what])
    optimizer, store = adam(model), MemoryStore("merged")
    frozen = {name: one.clone() for name, one in model.named_parameters() if not one.requires_grad}
    with wc.Publisher(store, Merged(model), optimizer=optimizer, threads=1) as publisher:
        for number in range(STEPS + 1):
            if number:
                step(model, optimizer, number)
                assert publisher.publish(step=number).result(60).position.version == number
            mirror, saved = pulled(store, tmp_path / "mirror"), save_merged(model, tmp_path / str(number))
            assert_same(mirror, saved)
    assert names_in(mirror) == names_in(saved)
    one, other = (json.loads((folder / "config.json").read_text()) for folder in (mirror, saved))
    assert one == {key: other[key] for key in one}
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in frozen.items())


@pytest.mark.parametrize("detect", ["transient", "device", "host"])
def test_all_detectors_publish_merged_weights(detect: Any, tmp_path: Path) -> None:
    model = adapted()
    optimizer, store = adam(model), MemoryStore("merged")
    with wc.Publisher(store, Merged(model), optimizer=optimizer, detect=detect, threads=1) as publisher:
        step(model, optimizer, 1)
        publisher.publish().result(60)
    assert_same(pulled(store, tmp_path / "mirror"), save_merged(model, tmp_path / "saved"))


def test_merged_weights_continue_the_channel_of_the_base_model(tmp_path: Path) -> None:
    """At its beginning an adapter changes nothing, so version 0 may be the base, by name."""
    store = MemoryStore("merged")
    built("qwen3").save_pretrained(tmp_path / "base")
    wc.init(store, tmp_path / "base")
    model = adapted(init_lora_weights=True)
    optimizer = adam(model)
    with wc.Publisher(store, Merged(model), optimizer=optimizer, threads=1) as publisher:
        assert publisher.position.version == 0
        step(model, optimizer, 1)
        step(model, optimizer, 2)
        assert publisher.publish().result(60).position.version == 1
    assert_same(pulled(store, tmp_path / "mirror"), save_merged(model, tmp_path / "saved"))


def test_what_the_adapter_does_not_touch_stays_where_it_is() -> None:
    model = adapted()
    layout = layout_of(Merged(model))
    assert {made.name for made in layout.made} == {
        f"model.layers.{i}.self_attn.{name}_proj.weight" for i in range(2) for name in "qv"
    }
    own = {id(parameter) for parameter in model.parameters()}
    assert {id(piece.source) for piece in layout.pieces} <= own


def test_tensors_of_untouched_layers_are_not_made_by_another_adapter() -> None:
    model = adapted()
    model.add_adapter("other", lora(target_modules=["o_proj"]))
    model.set_adapter("other")
    names = {made.name for made in layout_of(Merged(model)).made}
    assert names == {f"model.layers.{i}.self_attn.o_proj.weight" for i in range(2)}


def test_merged_tensors_take_memory_only_while_they_are_compared() -> None:
    """Beside the detector's copy of what the adapter touches, only a layer at a time is merged."""
    from weightcast.torch.model import LiveModel

    live = LiveModel(Merged(adapted(target_modules="all-linear")))
    assert live.made
    live.digests()
    assert [slot.source.numel() for name, slot in live.slots.items() if name in live.made] == [0] * len(live.made)


def test_experts_that_are_read_one_by_one_are_merged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.lora.layer import ParamWrapper

    from weightcast.torch.model import LiveModel

    model = adapted("qwen3_moe", target_parameters=EXPERTS)
    live, merges, merge = LiveModel(Merged(model)), [], ParamWrapper.merge
    monkeypatch.setattr(ParamWrapper, "merge", lambda layer, **options: merges.append(1) or merge(layer, **options))
    experts = [name for name in live.made if ".experts." in name]
    before = [live.read(name).copy() for name in experts]
    assert len(experts) == 2 * 4 * 3
    assert len(merges) == 2 * len(EXPERTS)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1)
    assert all((live.read(name) != bits).any() for name, bits in zip(experts, before, strict=True))


def test_merging_two_active_adapters_is_exact(tmp_path: Path) -> None:
    model = adapted(use_dora=True)
    model.add_adapter("other", lora(r=2))
    model.base_model.set_adapter(["default", "other"])
    optimizer, store = adam(model), MemoryStore("merged")
    with wc.Publisher(store, Merged(model), optimizer=optimizer, threads=1) as publisher:
        step(model, optimizer, 1)
        publisher.publish().result(60)
    assert_same(pulled(store, tmp_path / "mirror"), save_merged(model, tmp_path / "saved"))


def test_merged_weights_in_wrappers(tmp_path: Path) -> None:
    model, store = adapted(), MemoryStore("merged")
    saved = save_merged(model, tmp_path / "saved")
    inner = model.base_model.model.model
    inner.layers[0] = torch.compile(inner.layers[0], backend="eager")
    wc.Publisher(store, Merged(nn.DataParallel(model)), threads=1).close()
    assert_same(pulled(store, tmp_path / "mirror"), saved)


# What is refused


def test_another_active_adapter_is_refused_before_anything_is_lost() -> None:
    model = adapted()
    model.add_adapter("other", lora(target_modules=["o_proj"]))
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if "lora_" in name])
    with wc.Publisher(MemoryStore("merged"), Merged(model), optimizer=optimizer, threads=1) as publisher:
        step(model, optimizer, 1)
        model.set_adapter("other")
        with pytest.raises(UsageError, match="other adapters are active"):
            publisher.publish()
        model.set_adapter("default")
        assert publisher.publish().result(60).position.version == 1


def test_model_without_adapters_is_refused() -> None:
    with pytest.raises(UsageError, match="expected a model of PEFT, got Qwen3ForCausalLM"):
        Merged(built("qwen3"))


def test_optimizer_of_another_model_is_refused() -> None:
    other = adapted()
    with pytest.raises(UsageError, match="owns none of the model's parameters"):
        wc.Publisher(MemoryStore("merged"), Merged(adapted()), optimizer=adam(other))
