"""One engine, all that a user asks of it: exact bits, versions in requests and responses, proofs, an agent's words."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from engines import Engine, serving
from pictures import picture_url
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from world import Attached, Clients, attached, live, must_be, report
from written import Written

SPECIALS = np.array([0x7F81, 0xFFC1, 0x7FFF, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80], np.uint16)
"""NaNs with payloads, -0.0, denormals and infinities, as bf16."""


@pytest.fixture(scope="module")
def writer(model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    written = Written(model("blip2"), tmp_path_factory.mktemp("live") / "channel")
    yield written
    written.close()


@pytest.fixture(scope="module")
def engine(model: Callable[[str], Path], writer: Written) -> Iterator[Engine]:
    with serving(model("blip2"), extra_args=["--enable-scale-out", "--enable-prompt-tokens-details"]) as running:
        yield running


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mirrors") / "mirror"


@pytest.fixture
def agent(writer: Written, engine: Engine, mirror: Path) -> Iterator[Attached]:
    with attached(writer.channel, engine, mirror) as running:
        yield running


def test_nan_payloads_minus_zero_and_denormals_are_written_and_overwritten_exactly(
    agent: Attached, writer: Written, engine: Engine
) -> None:
    before = {}
    for i, name in enumerate(spec.name for spec in writer.weights.table):
        bits = writer.weights.read(name)
        places = np.arange(i, bits.size, max(1, bits.size // 20))[: SPECIALS.size]
        before[name] = places, bits[places].copy()
        bits[places] = SPECIALS[: places.size]
    version = writer.publish()
    agent.wait(version)
    must_be(engine, writer.channel, version)
    for name, (places, bits) in before.items():
        writer.weights.read(name)[places] = bits
    version = writer.publish()
    agent.wait(version)
    must_be(engine, writer.channel, version)


def test_sparse_path_of_vllm_refuses_a_nan() -> None:
    value, place = torch.tensor([float("nan")], dtype=torch.bfloat16), torch.tensor([3])
    patch = CheckpointWeightPatch("w", (8,), torch.bfloat16, value, place)
    with pytest.raises(ValueError, match="NaN"):
        load_checkpoint_weight_patches(torch.nn.Module(), [patch])


def test_dense_version_is_written_whole(agent: Attached, writer: Written, engine: Engine) -> None:
    for spec in writer.weights.table:
        writer.weights.read(spec.name)[...] ^= 1
    version = writer.publish()
    event = agent.wait(version)
    assert event["changed"] >= sum(spec.elements for spec in writer.weights.table)
    assert event["reloaded"] == 0
    must_be(engine, writer.channel, version)


def ask(engine: Engine, headers: dict[str, str]) -> tuple[int, str | None, Any]:
    body = {"model": engine.model, "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"{engine.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers["x-weight-version"], json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.headers["x-weight-version"], json.load(error)


def test_request_waits_for_its_version_and_the_response_names_it(
    agent: Attached, writer: Written, engine: Engine
) -> None:
    version = writer.step()
    agent.wait(version)
    assert ask(engine, {})[:2] == (200, str(version))
    found: list[tuple[int, str | None, Any]] = []
    waiting = threading.Thread(
        target=lambda: found.append(ask(engine, {"x-weight-version-at-least": str(version + 1)}))
    )
    waiting.start()
    time.sleep(0.5)
    assert not found
    assert writer.step() == version + 1
    waiting.join(60)
    assert found[0][:2] == (200, str(version + 1))


def test_request_for_a_version_that_never_arrives_is_refused(agent: Attached, writer: Written, engine: Engine) -> None:
    version = writer.step()
    agent.wait(version)
    wanted = {"x-weight-version-at-least": str(version + 5), "x-weight-version-wait": "1"}
    status, _, body = ask(engine, wanted)
    assert status == 503
    assert f"serves version {version}, not {version + 5}" in body["error"]["message"]
    assert ask(engine, {"x-weight-version-at-least": "soon"})[0] == 400


@pytest.mark.skipif(vllm.__version__.startswith("0.31."), reason="vLLM names versions of tokens from 0.32 on")
def test_tokens_are_tied_to_the_version_that_made_them(agent: Attached, writer: Written, engine: Engine) -> None:
    version = writer.step()
    agent.wait(version)
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "temperature": 0}}
    choice = engine.post("/inference/v1/generate", body)["choices"][0]
    assert [span["version"] for span in choice["weight_versions"]] == [str(version)], choice


@pytest.mark.parametrize("keeps", [False, True], ids=["cleared", "kept"])
def test_prefixes_of_old_weights_are_computed_again_unless_they_shall_be_kept(
    keeps: bool, writer: Written, engine: Engine, mirror: Path
) -> None:
    def is_cached() -> bool:
        body = {"model": engine.model, "prompt": list(range(1, 201)), "max_tokens": 1}
        details = engine.post("/v1/completions", body)["usage"]["prompt_tokens_details"]
        return bool(details and details["cached_tokens"])

    with attached(writer.channel, engine, mirror, *(["--keep-cache"] if keeps else [])) as agent:
        agent.wait(writer.step())
        is_cached()
        assert is_cached()
        agent.wait(writer.step())
        assert is_cached() is keeps
        assert is_cached()


def look(engine: Engine) -> Any:
    """What the engine makes of the picture."""
    content = [{"type": "image_url", "image_url": {"url": picture_url()}}, {"type": "text", "text": "abc"}]
    body = {"model": engine.model, "messages": [{"role": "user", "content": content}], "max_tokens": 8}
    answer = engine.post("/v1/chat/completions", {**body, "temperature": 0, "logprobs": True, "ignore_eos": True})
    return answer["choices"][0]["logprobs"]["content"]


def test_picture_is_looked_at_again_after_each_update(agent: Attached, writer: Written, engine: Engine) -> None:
    """The encoder's output is cached by the picture alone."""
    agent.wait(writer.step())
    seen = []
    for _ in range(3):
        seen.append(look(engine))
        assert look(engine) == seen[-1]
        writer.flip("vision_model.")
        version = writer.publish()
        agent.wait(version)
    assert seen[1] != seen[0]
    assert seen[2] == seen[0]
    must_be(engine, writer.channel, version)


def test_requests_with_pictures_do_not_fail_during_updates(agent: Attached, writer: Written, engine: Engine) -> None:
    """vLLM sends a picture to its engine once; both sides must go on to agree on which ones are there."""
    agent.wait(writer.step())
    clients = Clients(4, lambda which: look(engine))
    for _ in range(8):
        agent.wait(writer.step())
    clients.close()


def test_agent_goes_back_to_a_version_and_forward_again(writer: Written, engine: Engine, mirror: Path) -> None:
    head = writer.step()
    for version in (head - 1, head - 3, head):
        with attached(writer.channel, engine, mirror, "--version", str(version)) as agent:
            agent.wait(version) if version == head else _until(engine, version)
        must_be(engine, writer.channel, version)


def _until(engine: Engine, version: int) -> None:
    end = time.monotonic() + 60
    while (found := report(engine)).served != str(version) or found.paused:
        assert time.monotonic() < end, version
        time.sleep(0.05)


def test_agent_answers_over_http_with_its_token(writer: Written, engine: Engine, mirror: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-that-is-long-enough\n")
    version = writer.step()
    port, events = "29417", tmp_path / "events.jsonl"
    options = "--listen", port, "--token-file", str(token), "--events", str(events)
    with attached(writer.channel, engine, mirror, *options) as agent:
        agent.wait(version)

        def get(path: str, key: str = "a-token-that-is-long-enough") -> tuple[int, bytes]:
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {key}"}
            )
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return answer.status, answer.read()
            except urllib.error.HTTPError as error:
                return error.code, error.read()

        assert get("/status", "another")[0] == 401
        status = json.loads(get("/status")[1])
        assert (status["version"], status["lag"], status["error"], status["unproven"]) == (version, 0, None, [])
        assert {"fetch", "stage", "pause", "apply", "resume"} <= status["last"]["seconds"].keys()
        metrics = get("/metrics")[1].decode()
        assert f"weightcast_version {float(version)}" in metrics
        assert f'weightcast_applied_version{{role="engine"}} {float(version)}' in metrics
        told = [json.loads(line) for line in events.read_text().splitlines()]
        assert [line["phase"] for line in told if line["role"] == "engine"] == ["pause", "apply", "resume"]
        assert {line["version"] for line in told} == {version}
        assert {line["digest"] for line in told} == {status["digest"]}
        assert get(f"/wait?version={version}")[0] == 200
        assert get(f"/wait?version={version + 1}&seconds=1")[0] == 503
        assert get("/wait?version=x")[0] == 400
        found: list[int] = []
        waiting = threading.Thread(target=lambda: found.append(get(f"/wait?version={version + 1}&seconds=60")[0]))
        waiting.start()
        writer.step()
        waiting.join()
        assert found == [200]


def test_agent_on_a_reachable_address_needs_a_token(writer: Written, engine: Engine, mirror: Path) -> None:
    command = [sys.executable, "-m", "weightcast", "attach", writer.channel, "--engine", engine.url]
    more = ["--mirror", str(mirror), "--listen", "0.0.0.0:29418"]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "can be reached by others" in done.stderr
    assert "--token-file" in done.stderr


def test_verify_reports_what_is_live(agent: Attached, writer: Written, engine: Engine) -> None:
    version = writer.step()
    agent.wait(version)
    command = [sys.executable, "-m", "weightcast", "verify", "--engine", engine.url, writer.channel]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["claimed"], told["version"], told["wrong"], told["unproven"]) == (version, version, {}, {})
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert f"version {version} to the last bit, live on all workers" in done.stdout
    assert live(engine, writer.channel).holds
