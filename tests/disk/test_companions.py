"""Which files a checkpoint folder may hold beside its weights, and what is removed from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weightcast.disk.companions import is_companion, is_wanted, remove_code_references


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
    assert is_wanted(name)


@pytest.mark.parametrize(
    "name",
    ["modeling_evil.py", "pytorch_model.bin", "model.pt", "x.pkl", "x.so", "run.sh", "model.gguf", "a.pyc", "x", ""],
)
def test_code_and_pickles_are_never_wanted(name: str) -> None:
    assert not is_wanted(name)


@pytest.mark.parametrize("name", ["adapter_config.json", "modules.json", "model_index.json"])
def test_files_that_turn_a_model_into_something_else_are_not_wanted(name: str) -> None:
    assert not is_wanted(name)


def test_weights_are_wanted_but_no_companions() -> None:
    assert is_wanted("model-00001-of-00002.safetensors")
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
