"""docs/guides/lora.md: its examples publish and load a small model's adapter, and its script loads each version."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guides import Page, nothing, play

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from adapters import adam, adapted, assert_same, save_adapter, save_merged, step  # noqa: E402
from families import built  # noqa: E402

import weightcast as wc  # noqa: E402

PAGE = Page.of("lora.md")
PUBLISHING, LOADING, MERGING = PAGE.python


@pytest.fixture
def known(tmp_path: Path) -> dict[str, Any]:
    """What the examples use and do not say."""
    model = adapted()
    optimizer, seeds = adam(model), iter(range(100))
    return {
        "url": str(tmp_path / "channel"),
        "folder": tmp_path / "mirror",
        "peft_model": model,
        "optimizer": optimizer,
        "data": range(3),
        "train": lambda model, batch: step(model, optimizer, next(seeds)),
    }


def test_adapter_is_loaded_as_peft_would_have_saved_it(known: dict[str, Any], tmp_path: Path) -> None:
    exec(PUBLISHING, known)
    exec(LOADING, loaded := known | {"base_model": built("qwen3")})
    assert_same(tmp_path / "mirror", save_adapter(known["peft_model"], tmp_path / "saved"))
    ours, theirs = known["peft_model"].state_dict(), loaded["peft_model"].state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_merged_weights_are_those_that_peft_merges(known: dict[str, Any], tmp_path: Path) -> None:
    exec(MERGING, known)
    with wc.Subscriber(known["url"], tmp_path / "whole") as subscriber:
        subscriber.sync()
        subscriber.fold()
    assert_same(tmp_path / "whole", save_merged(known["peft_model"], tmp_path / "merged-saved"))


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server with vLLM's route for adapters; its address, and what it was asked to load."""
    asked: list[dict[str, Any]] = []

    class Routes(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            names = {path.name for path in Path(body["lora_path"]).iterdir()}
            asked.append(body | {"at": self.path, "files": names})
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Routes) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.05,))
        thread.start()
        yield f"127.0.0.1:{listening.server_port}", asked
        listening.shutdown()
        thread.join()


def test_script_has_a_server_load_each_version_under_its_name(
    known: dict[str, Any], server: tuple[str, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, asked = server
    exec(PUBLISHING, known)
    head = known["publisher"].position.version  # publishes are merged where they are faster than commits
    monkeypatch.chdir(tmp_path)
    (script,) = (block for block in PAGE.blocks("") if block.startswith("#!"))
    Path("load.sh").write_text(script.replace("127.0.0.1:8000", address))
    Path("load.sh").chmod(0o755)
    places = {"s3://bucket/adapter": known["url"], "/data/adapter": tmp_path / "adapter", "--follow": "--quiet"}
    play(PAGE, places=places, instead={"VLLM_ALLOW": nothing})
    (one,) = asked
    assert (one["at"], one["lora_name"], one["load_inplace"]) == ("/v1/load_lora_adapter", f"policy-{head}", True)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= one["files"]
