"""Which files a checkpoint folder may hold beside its weights, and what is removed from them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import weightcast as wc
from weightcast.disk.checkpoint import save
from weightcast.disk.companions import is_companion, remove_code_references, wanted


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "merges.txt",
        "tokenizer.model",
        "qwen.tiktoken",
        "chat_template.jinja",
        "LICENSE",
    ],
)
def test_configuration_and_tokenizer_files_are_companions(name: str) -> None:
    assert is_companion(name)
    assert wanted([name]) == {name}


@pytest.mark.parametrize(
    "name",
    ["modeling_evil.py", "pytorch_model.bin", "model.pt", "x.pkl", "x.so", "run.sh", "model.gguf", "a.pyc", "x", ""],
)
def test_code_and_pickles_are_never_wanted(name: str) -> None:
    assert not wanted([name])


@pytest.mark.parametrize("name", ["adapter_config.json", "modules.json", "model_index.json"])
@pytest.mark.parametrize(
    "weights",
    [
        [],
        ["model.safetensors"],
        ["model.safetensors", "adapter_model.safetensors"],
        ["adapter_model-00001-of-00002.safetensors"],
    ],
)
def test_files_that_turn_a_model_into_something_else_are_not_wanted(name: str, weights: list[str]) -> None:
    assert wanted([name, "config.json", *weights]) == {"config.json", *weights}


def test_configuration_of_an_adapter_is_wanted_beside_the_weights_of_one() -> None:
    names = {"adapter_config.json", "adapter_model.safetensors", "README.md", "tokenizer.json"}
    assert wanted([*names, "adapter_model.bin", "modules.json"]) == names


def test_weights_are_wanted_but_no_companions() -> None:
    assert wanted(["model-00001-of-00002.safetensors"]) == {"model-00001-of-00002.safetensors"}
    assert not is_companion("model.safetensors")


def test_references_to_code_are_removed_at_any_depth(tmp_path: Path) -> None:
    config = {"hidden_size": 8, "auto_map": {"AutoModel": "evil.Evil"}, "text": [{"custom_pipelines": {}, "layers": 2}]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    escaped = '{"\\u0061uto_map": {"AutoTokenizer": "other/repo--evil.Evil"}, "name": "é"}'
    (tmp_path / "tokenizer_config.json").write_text(escaped)
    assert remove_code_references(tmp_path) == ["config.json", "tokenizer_config.json"]
    assert json.loads((tmp_path / "config.json").read_text()) == {"hidden_size": 8, "text": [{"layers": 2}]}
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == {"name": "é"}


def test_kernels_from_other_repositories_are_removed_and_others_stay(tmp_path: Path) -> None:
    config = {"_attn_implementation": "evil/repo:forward", "text": {"attn_implementation": "sdpa"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert remove_code_references(tmp_path) == ["config.json"]
    assert json.loads((tmp_path / "config.json").read_text()) == {"text": {"attn_implementation": "sdpa"}}


@pytest.mark.parametrize("depth", [600, 100_000])
def test_deep_nesting_hides_nothing(depth: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"auto_map": {}, "x": ' + "[" * depth + "]" * depth + "}")
    assert remove_code_references(tmp_path) == ["config.json"]
    path = tmp_path / "config.json"
    assert not path.exists() or "auto_map" not in path.read_text()


def test_malformed_json_file_is_removed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"auto_map": ')
    assert remove_code_references(tmp_path) == ["config.json"]
    assert list(tmp_path.iterdir()) == []


def test_other_files_keep_their_bytes(tmp_path: Path) -> None:
    contents = {"config.json": b'{ "a":1 }', "vocab.json": b'{"a":0,"auto_map":1}', "a.txt": b"x"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    assert remove_code_references(tmp_path) == []
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == contents


# Adapters

LORA = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": "someone/base", "megatron_core": "megatron.core"}


def adapter_in(folder: Path, config: object, *, file: str = "adapter_model.safetensors", prefix: str = "") -> Path:
    name = f"{prefix or 'base_model.model.'}model.q_proj.lora_A.weight"
    save(wc.Arrays({name: np.zeros(4, np.float32)}), folder, file)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_configuration_of_an_adapter_keeps_its_bytes(tmp_path: Path) -> None:
    adapter_in(tmp_path, LORA | {"auto_mapping": None, "megatron_config": None})
    before = (tmp_path / "adapter_config.json").read_bytes()
    assert remove_code_references(tmp_path) == []
    assert (tmp_path / "adapter_config.json").read_bytes() == before


def test_what_an_adapter_would_import_or_unpickle_is_removed(tmp_path: Path) -> None:
    evil = {
        "auto_mapping": {"parent_library": "evil", "base_model_class": "Evil"},
        "auto_map": {"AutoConfig": "evil.Evil"},
        "megatron_config": {"params_dtype": "evil"},
        "megatron_core": "evil",
        "corda_config": {"cache_file": "/tmp/evil.pt", "covariance_file": "/tmp/evil.pt", "corda_method": "ipm"},
    }
    adapter_in(tmp_path, LORA | evil)
    assert remove_code_references(tmp_path) == ["adapter_config.json"]
    left = json.loads((tmp_path / "adapter_config.json").read_text())
    assert left == {key: LORA[key] for key in LORA if key != "megatron_core"} | {
        "corda_config": {"corda_method": "ipm"}
    }


@pytest.mark.parametrize("config", [[], "LORA", {}, LORA | {"peft_type": "XLORA"}, LORA | {"peft_type": ["LORA"]}])
def test_configuration_of_another_method_than_lora_is_removed(config: object, tmp_path: Path) -> None:
    """Some of them name tokenizers or further adapters, which PEFT fetches."""
    adapter_in(tmp_path, config)
    assert remove_code_references(tmp_path) == ["adapter_config.json"]
    assert not (tmp_path / "adapter_config.json").exists()


@pytest.mark.parametrize("file", ["model.safetensors", "model-00001-of-00001.safetensors"])
def test_configuration_of_an_adapter_beside_a_model_is_removed(file: str, tmp_path: Path) -> None:
    adapter_in(tmp_path, LORA, file=file)
    assert remove_code_references(tmp_path) == ["adapter_config.json"]
    assert not (tmp_path / "adapter_config.json").exists()


def test_model_under_the_name_of_an_adapter_has_no_adapter_configuration(tmp_path: Path) -> None:
    """transformers would load the base that it names in the model's place."""
    adapter_in(tmp_path, LORA, prefix="model.")
    assert remove_code_references(tmp_path) == ["adapter_config.json"]
    assert not (tmp_path / "adapter_config.json").exists()


def test_damaged_weights_are_no_adapter(tmp_path: Path) -> None:
    adapter_in(tmp_path, LORA)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    assert remove_code_references(tmp_path) == ["adapter_config.json"]
