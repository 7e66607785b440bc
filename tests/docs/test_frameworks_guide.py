"""docs/guides/frameworks.md and its pages: `mirrors.py` runs in two processes, and what the pages add to it is used
with stand-ins for the frameworks, which are not here."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from guides import GUIDES, Page

torch = pytest.importorskip("torch")

import weightcast as wc  # noqa: E402

PAGE = Page.of("frameworks.md")
PUBLISH, ONE_RANK, MIRRORS = PAGE.python
FRAMEWORKS = sorted(path.stem for path in (GUIDES / "frameworks").glob("*.md"))
VERL = Page.of("frameworks/verl.md").python[0]
NEMO = Page.of("frameworks/nemo-rl.md").python[0]


class Published:
    """A channel to which the page's own example publishes a small model, and what it published last."""

    def __init__(self, folder: Path):
        self.url, self.weights = str(folder / "channel"), {"w": torch.zeros(64, 8, dtype=torch.bfloat16)}
        self.known: dict[str, Any] = {"print": lambda version: None}

    def train(self, step: int) -> None:
        self.weights["w"][step] += 1
        self.known |= {"stream": iter(self.weights.items()), "step": step}
        exec(PUBLISH.replace("s3://bucket/run-42", self.url), self.known)
        self.known["publisher"].close()


def test_stream_is_published_and_one_rank_sends(tmp_path: Path) -> None:
    published = Published(tmp_path)
    published.train(1)
    assert published.known["receipt"].result().position.version == 0
    with wc.StreamPublisher(published.url) as publisher:
        for rank in (0, 1):
            published.weights["w"][7] += 1
            stream = iter(published.weights.items())
            exec(ONE_RANK, {"rank": rank, "publisher": publisher, "stream": stream, "step": 2})
            assert next(stream, None) is None, "the stream was read to its end"
        publisher.flush()
        assert publisher.position.version == 1


@pytest.fixture
def mirrors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page's module, in a file as the page says, found by imports."""
    (tmp_path / "mirrors.py").write_text(MIRRORS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mirrors", raising=False)
    import mirrors

    assert Path(mirrors.__file__).parent == tmp_path
    return mirrors


def held_by(mirrors: Any, folder: Path) -> dict[str, Any]:
    return dict(mirrors.tensors(folder, device="cpu"))


def test_two_processes_bring_one_mirror(mirrors: Any, tmp_path: Path) -> None:
    published = Published(tmp_path)
    folder = tmp_path / "mirror"
    for step in (1, 2, 3):
        published.train(step)
        bring = f"import mirrors; mirrors.bring({published.url!r}, {str(folder)!r}, {step - 1})"
        children = [subprocess.Popen([sys.executable, "-c", bring], cwd=tmp_path) for _ in range(2)]
        assert [child.wait(120) for child in children] == [0, 0]
        assert torch.equal(held_by(mirrors, folder)["w"], published.weights["w"])


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """A module that stands for one of a framework's."""
    made = types.ModuleType(name)
    vars(made).update(members)
    monkeypatch.setitem(sys.modules, name, made)


class Board:
    """What torch's `TCPStore` is to the two sides: one writes a key, the other waits for it."""

    port, kept = 1, {}  # type: ignore[var-annotated]

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value

    def get(self, key: str) -> bytes:
        return self.kept[key].encode()


@pytest.fixture
def _frameworks(monkeypatch: pytest.MonkeyPatch, mirrors: Any) -> None:
    """Stand-ins for what the pages of verl and NeMo-RL import."""
    Board.kept = {}
    registry = types.SimpleNamespace(register=lambda name: lambda kind: kind)
    module(monkeypatch, "ray", util=types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"))
    module(monkeypatch, "verl")
    module(monkeypatch, "verl.checkpoint_engine", CheckpointEngine=object, CheckpointEngineRegistry=registry)
    for name in ("nemo_rl", "nemo_rl.utils", "nemo_rl.utils.checkpoint_engines"):
        module(monkeypatch, name)
    module(monkeypatch, "nemo_rl.utils.checkpoint_engines.base", CheckpointEngine=object)
    monkeypatch.setattr(torch.distributed, "TCPStore", Board)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(mirrors.tensors, "__defaults__", ("cpu",))


async def everything(batches: Any) -> list[Any]:
    return [one async for one in batches]


@pytest.mark.usefixtures("_frameworks")
def test_engine_for_verl_brings_what_was_sent(tmp_path: Path) -> None:
    exec(VERL, known := {})  # type: ignore[var-annotated]
    kind, url, mirror = known["WeightcastEngine"], str(tmp_path / "channel"), str(tmp_path / "mirror")
    actor, other, rollout = kind(1, url, mirror, is_master=True), kind(1, url, mirror), kind(1, url, mirror)
    for step in (1, 2):
        weights = {"w": torch.full((64, 8), step, dtype=torch.bfloat16)}
        actors, rollouts = kind.build_topology(2, 1, [actor.prepare(), None])
        for engine, place in zip((actor, other, rollout), actors["place"] + rollouts["place"], strict=True):
            engine.init_process_group(place)
        asyncio.run(other.send_weights(iter(weights.items())))
        told = asyncio.run(actor.send_weights(iter(weights.items()), global_steps=step))
        assert told == {"weightcast/version": step - 1}
        ((name, tensor),) = asyncio.run(everything(rollout.receive_weights()))
        assert (name, torch.equal(tensor, weights["w"])) == ("w", True)
    actor.publisher.close()


@pytest.mark.usefixtures("_frameworks")
def test_engine_for_nemo_rl_brings_what_was_sent(tmp_path: Path) -> None:
    exec(NEMO, known := {})  # type: ignore[var-annotated]
    kind, url, mirror = known["WeightcastEngine"], str(tmp_path / "channel"), str(tmp_path / "mirror")
    policy, other, rollout = (kind(1, False, url, mirror) for _ in range(3))
    metadata = [policy.prepare()]
    policy.init_policy_process_group(worker_rank=0)
    other.init_policy_process_group(worker_rank=1)
    rollout.init_rollout_process_group(metadata=metadata)
    for step in (1, 2):
        weights = {"w": torch.full((64, 8), step, dtype=torch.bfloat16)}
        asyncio.run(other.send_weights(iter(weights.items())))
        asyncio.run(policy.send_weights(iter(weights.items())))
        (((name, tensor),),) = asyncio.run(everything(rollout.receive_weight_batches()))
        assert (name, torch.equal(tensor, weights["w"])) == ("w", True)
    policy.publisher.close()


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_examples_of_a_framework_compile_and_import_what_mirrors_has(name: str) -> None:
    examples = Page.of(f"frameworks/{name}.md").python
    for example in examples:
        compile(example, name, "exec")
    imported = re.findall(r"^from mirrors import (.*)$", "\n".join(examples), re.MULTILINE)
    assert {one for line in imported for one in line.split(", ")} <= set(
        re.findall(r"^def (\w+)", MIRRORS, re.MULTILINE)
    )
