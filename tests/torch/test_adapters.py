"""The adapter of a PEFT model as a channel: at every version a mirror is what PEFT's `save_pretrained` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from adapters import (  # noqa: E402
    BF16,
    F32,
    adam,
    adapted,
    assert_same,
    lora,
    names_in,
    pulled,
    save_adapter,
    step,
)
from families import built  # noqa: E402
from torch import nn  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.errors import UsageError  # noqa: E402
from weightcast.store.memory import MemoryStore  # noqa: E402
from weightcast.torch import Merged, TorchTarget  # noqa: E402
from weightcast.torch.adapters import layout_of  # noqa: E402
from weightcast.torch.sharded import ShardedModel  # noqa: E402
from weightcast.torch.structure import structure_of  # noqa: E402

STEPS = 3

ADAPTERS: dict[str, dict[str, Any]] = {
    "float32 on bf16": {},
    "bf16": {"adapter_dtype": BF16},
    "float32": {"dtype": F32},
    "rslora on all linear layers": {"family": "qwen3 tied", "target_modules": "all-linear", "use_rslora": True},
    "ranks and alphas": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}, "lora_alpha": 5},
    "dora": {"use_dora": True},
    "a module to save": {"modules_to_save": ["lm_head"]},
    "a module to save, untied by it": {"family": "qwen3 tied", "modules_to_save": ["lm_head"]},
    "biases": {"family": "gpt2", "target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "lora_only"},
    "experts": {"family": "qwen3_moe", "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("what", ADAPTERS)
def test_mirror_is_what_peft_saves_at_every_version(what: str, tmp_path: Path) -> None:
    model = adapted(**ADAPTERS[what])
    optimizer, store = adam(model), MemoryStore("adapter")
    with wc.Publisher(store, model, optimizer=optimizer, threads=1) as publisher:
        for number in range(STEPS + 1):
            if number:
                step(model, optimizer, number)
                assert publisher.publish(step=number).result(60).position.version == number
            mirror = pulled(store, tmp_path / "mirror")
            assert_same(mirror, save_adapter(model, tmp_path / str(number)))
            assert names_in(mirror) == {"adapter_model.safetensors", "adapter_config.json"}


@pytest.mark.parametrize("detect", ["transient", "device", "host"])
def test_all_detectors_publish_adapters(detect: Any, tmp_path: Path) -> None:
    model = adapted()
    optimizer, store = adam(model), MemoryStore("adapter")
    with wc.Publisher(store, model, optimizer=optimizer, detect=detect, threads=1) as publisher:
        step(model, optimizer, 1)
        publisher.publish().result(60)
    assert_same(pulled(store, tmp_path / "mirror"), save_adapter(model, tmp_path / "saved"))


def test_peft_loads_a_mirror_as_it_loads_what_it_saved(tmp_path: Path) -> None:
    model = adapted(use_rslora=True, modules_to_save=["lm_head"])
    store = MemoryStore("adapter")
    wc.Publisher(store, model, threads=1).close()
    mirror, saved = pulled(store, tmp_path / "mirror"), save_adapter(model, tmp_path / "saved")
    assert json.loads((mirror / "adapter_config.json").read_text()) == json.loads(
        (saved / "adapter_config.json").read_text()
    )
    one, other = (peft.PeftModel.from_pretrained(built("qwen3"), folder).eval() for folder in (mirror, saved))
    tokens = torch.arange(8)[None]
    assert torch.equal(one(input_ids=tokens).logits, other(input_ids=tokens).logits)
    assert torch.equal(one(input_ids=tokens).logits, model.eval()(input_ids=tokens).logits)


def test_active_one_of_several_adapters_is_published(tmp_path: Path) -> None:
    model = adapted()
    model.add_adapter("other", lora(r=2, target_modules=["o_proj"]))
    model.set_adapter("other")
    optimizer, store = adam(model), MemoryStore("adapter")
    with wc.Publisher(store, model, optimizer=optimizer, threads=1) as publisher:
        assert len(publisher.table) == 4
        step(model, optimizer, 1)
        publisher.publish().result(60)
    assert_same(pulled(store, tmp_path / "mirror"), save_adapter(model, tmp_path / "saved"))


def test_float32_adapter_is_rounded_on_request() -> None:
    model = adapted()
    with wc.Publisher(MemoryStore("adapter"), model, dtype="BF16", threads=1) as publisher:
        assert {spec.dtype for spec in publisher.table} == {"BF16"}


def test_adapter_in_wrappers_has_the_names_that_peft_saves() -> None:
    model = adapted()
    wanted = [(piece.name, id(piece.source)) for piece in layout_of(model).pieces]
    assert all(name.startswith("base_model.model.") for name, _ in wanted)
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        assert [(piece.name, id(piece.source)) for piece in layout_of(wrapped).pieces] == wanted
    inner = model.base_model.model.model
    inner.layers[0] = torch.compile(inner.layers[0], backend="eager")
    assert [(piece.name, id(piece.source)) for piece in layout_of(model).pieces] == wanted


def test_publisher_that_starts_again_continues_the_channel(tmp_path: Path) -> None:
    model = adapted()
    optimizer, store = adam(model), MemoryStore("adapter")
    wc.Publisher(store, model, optimizer=optimizer, threads=1).close()
    step(model, optimizer, 1)
    with wc.Publisher(store, model, optimizer=optimizer, threads=1) as publisher:
        assert publisher.publish().result(60).position.version == 1
    assert_same(pulled(store, tmp_path / "mirror"), save_adapter(model, tmp_path / "saved"))


def test_saved_adapter_begins_a_channel_that_a_publisher_continues(tmp_path: Path) -> None:
    model, store = adapted(), MemoryStore("adapter")
    wc.init(store, save_adapter(model, tmp_path / "saved"))
    with wc.Publisher(store, model, threads=1) as publisher:
        assert publisher.position.version == 0
    assert names_in(pulled(store, tmp_path / "mirror")) >= {"adapter_model.safetensors", "adapter_config.json"}


def test_follower_may_be_a_model_of_peft() -> None:
    model, follower, store = adapted(), adapted(), MemoryStore("adapter")
    optimizer = adam(model)
    with wc.Publisher(store, model, optimizer=optimizer, threads=1) as publisher:
        step(model, optimizer, 1)
        position = publisher.publish().result(60).position
    with wc.Subscriber(store, follower, threads=1) as subscriber:
        subscriber.sync()
    assert wc.fingerprint(TorchTarget(follower)).digest == position.digest
    theirs = follower.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in model.state_dict().items())


# What is refused


def test_several_active_adapters_are_refused() -> None:
    model = adapted()
    model.add_adapter("other", lora(r=2))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(UsageError, match="2 are active"):
        wc.Publisher(MemoryStore("adapter"), model)


def test_other_methods_than_lora_are_refused() -> None:
    model = peft.get_peft_model(built("qwen3"), peft.IA3Config(task_type="CAUSAL_LM", target_modules=["v_proj"]))
    with pytest.raises(UsageError, match="IA3"):
        wc.Publisher(MemoryStore("adapter"), model)


def test_model_that_holds_a_model_of_peft_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Merged\(peft_model\)"):
        wc.Publisher(MemoryStore("adapter"), nn.Sequential(adapted()))


def test_adapter_that_transformers_put_into_a_model_is_refused() -> None:
    model = built("qwen3")
    model.add_adapter(lora())
    with pytest.raises(UsageError, match="adapter"):
        wc.Publisher(MemoryStore("adapter"), model)


def test_models_with_adapters_are_refused_where_sharded_or_where_a_structure_is_wanted() -> None:
    for model in (adapted(), Merged(adapted())):
        for refusing, hint in ((ShardedModel, "by one rank"), (structure_of, "before adapters are put into it")):
            with pytest.raises(UsageError, match="a model with adapters") as caught:
                refusing(model)
            assert hint in str(caught.value)
