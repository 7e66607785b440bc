"""docs/guides/frameworks.md and its pages: `mirrors.py` runs in two processes, and what the pages add to it is used
with stand-ins for the frameworks, which are not here."""

from __future__ import annotations

import asyncio
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
VERL, NEMO, SKYRL, SLIME, PRIME = (
    Page.of(f"frameworks/{name}.md").python for name in ("verl", "nemo-rl", "skyrl", "slime", "prime-rl")
)


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
    """A module that stands for one of a framework's, and those above it."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        at = ".".join(parts[:depth])
        if at not in sys.modules:
            monkeypatch.setitem(sys.modules, at, types.ModuleType(at))
        if depth > 1:
            monkeypatch.setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], sys.modules[at], False)
    vars(sys.modules[name]).update(members)


class Board:
    """What torch's `TCPStore` is to the two sides: one writes a key, the other waits for it."""

    port, kept = 1, {}  # type: ignore[var-annotated]

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value

    def get(self, key: str) -> bytes:
        return self.kept[key].encode()


class Task:
    """A task of Ray's that runs at once, in this process."""

    def __init__(self, call: Any):
        self._call = call

    def options(self, **_: Any) -> Task:
        return self

    def remote(self, *given: Any, **named: Any) -> Any:
        return self._call(*given, **named)


@pytest.fixture
def _frameworks(monkeypatch: pytest.MonkeyPatch, mirrors: Any) -> None:
    """Ray and torch.distributed on one node, one rank."""
    Board.kept = {}
    util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    module(monkeypatch, "ray.util.scheduling_strategies", NodeAffinitySchedulingStrategy=lambda node, soft: node)
    module(monkeypatch, "ray", util=util, get=lambda results: results, remote=lambda **_: Task)
    vars(sys.modules["ray"])["nodes"] = lambda: [{"NodeID": "n", "Alive": True}]
    monkeypatch.setattr(torch.distributed, "TCPStore", Board)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: None)
    monkeypatch.setattr(mirrors.tensors, "__defaults__", ("cpu",))


def placed(example: str, folder: Path) -> str:
    """An example with a channel and a mirror in a folder."""
    return example.replace("s3://bucket/run-42", str(folder / "channel")).replace(
        "/data/mirror", str(folder / "mirror")
    )


def weights_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((64, 8), step, dtype=torch.bfloat16)}


async def everything(batches: Any) -> list[Any]:
    return [one async for one in batches]


@pytest.mark.usefixtures("_frameworks")
def test_engine_for_verl_brings_what_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = types.SimpleNamespace(register=lambda name: lambda kind: kind)
    module(monkeypatch, "verl.checkpoint_engine", CheckpointEngine=object, CheckpointEngineRegistry=registry)
    exec(VERL[0], known := {})  # type: ignore[var-annotated]
    kind, url, mirror = known["WeightcastEngine"], str(tmp_path / "channel"), str(tmp_path / "mirror")
    actor, other, rollout = kind(1, url, mirror, is_master=True), kind(1, url, mirror), kind(1, url, mirror)
    for step in (1, 2):
        weights = weights_of(step)
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
def test_engine_for_nemo_rl_brings_what_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(monkeypatch, "nemo_rl.utils.checkpoint_engines.base", CheckpointEngine=object)
    exec(NEMO[0], known := {})  # type: ignore[var-annotated]
    kind, url, mirror = known["WeightcastEngine"], str(tmp_path / "channel"), str(tmp_path / "mirror")
    policy, other, rollout = (kind(1, False, url, mirror) for _ in range(3))
    metadata = [policy.prepare()]
    policy.init_policy_process_group(worker_rank=0)
    other.init_policy_process_group(worker_rank=1)
    rollout.init_rollout_process_group(metadata=metadata)
    for step in (1, 2):
        weights = weights_of(step)
        asyncio.run(other.send_weights(iter(weights.items())))
        asyncio.run(policy.send_weights(iter(weights.items())))
        (((name, tensor),),) = asyncio.run(everything(rollout.receive_weight_batches()))
        assert (name, torch.equal(tensor, weights["w"])) == ("w", True)
    policy.publisher.close()


class Servers:
    """SkyRL's client of engines, which notes what was asked and what the mirror held then."""

    def __init__(self, held: Any):
        self._held, self.asked = held, []

    def __getattr__(self, name: str) -> Any:
        async def call(*given: Any, **named: Any) -> None:
            self.asked.append((name, given, self._held()))

        return call


@pytest.mark.usefixtures("_frameworks")
def test_sender_for_skyrl_reloads_what_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirrors: Any) -> None:
    sync, base = "skyrl.backends.skyrl_train", {"__init__": lambda self: None}
    module(monkeypatch, f"{sync}.weight_sync", WeightTransferSender=object)
    module(monkeypatch, f"{sync}.workers.fsdp.fsdp_worker", FSDPPolicyWorkerBase=type("Worker", (), base))
    module(monkeypatch, "skyrl.train.entrypoints.main_base", BasePPOExp=type("Experiment", (), base))
    module(monkeypatch, "skyrl.train.trainer", RayPPOTrainer=type("Trainer", (), base))
    exec(placed(SKYRL[0], tmp_path), known := {})  # type: ignore[var-annotated]
    client = Servers(lambda: held_by(mirrors, tmp_path / "mirror")["w"])
    worker = known["PolicyWorker"]()
    asyncio.run(worker.init_weight_sync_state(client, None))
    for step in (1, 2):
        chunks = [types.SimpleNamespace(names=list(weights_of(step)), tensors=list(weights_of(step).values()))]
        asyncio.run(vars(worker)["_weight_transfer_sender"].send_chunks(chunks, reset_prefix_cache=True))
        names = [name for name, _, _ in client.asked]
        assert names == ["pause_generation", "reset_prefix_cache", "_call_all_servers", "resume_generation"] * step
        _, given, held = client.asked[-2]
        assert given[1]["kwargs"] == {"weights_path": str(tmp_path / "mirror")}
        assert torch.equal(held, weights_of(step)["w"])
    vars(worker)["_weight_transfer_sender"].teardown()


@pytest.mark.usefixtures("_frameworks")
def test_update_for_slime_reloads_what_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirrors: Any) -> None:
    class Update:
        def __init__(self, args: Any, model: Any, weights_getter: Any):
            self.args, self.model = args, model

    class Chunks:
        def __init__(self, **_: Any):
            pass

        def get_hf_weight_chunks(self, weights: Any, should_convert_chunk: Any) -> Any:
            yield list(weights.items()) if should_convert_chunk(0) else []

    asked: list[tuple[str, Any, Any]] = []

    def asking(name: str) -> Task:
        return Task(lambda **given: asked.append((name, given, held_by(mirrors, tmp_path / "mirror")["w"])))

    engine = type("Engine", (), {"__getattr__": lambda self, name: asking(name)})()
    parts = "slime.backends.megatron_utils"
    module(monkeypatch, f"{parts}.update_weight.common", named_params_and_buffers=lambda args, model: model.items())
    module(monkeypatch, f"{parts}.update_weight.hf_weight_iterator_direct", HfWeightIteratorDirect=Chunks)
    distributed = f"{parts}.update_weight.update_weight_from_distributed"
    module(monkeypatch, distributed, UpdateWeightFromDistributed=Update)
    module(monkeypatch, f"{parts}.actor", UpdateWeightFromDistributed=Update)
    module(monkeypatch, "slime.utils.distributed_utils", get_gloo_group=lambda: None)
    exec(placed(SLIME[0], tmp_path), known := {})  # type: ignore[var-annotated]
    known["install"](None)
    update = sys.modules[f"{parts}.actor"].UpdateWeightFromDistributed(None, model := weights_of(0), None)
    update.connect_rollout_engines([engine], None)
    for step in (1, 2):
        model.update(weights_of(step))
        update.update_weights()
        (name, given, held) = asked[-2]
        assert (name, given["weight_version"]) == ("update_weights_from_disk", str(step - 1))
        assert torch.equal(held, model["w"])
    update.publisher.close()


@pytest.mark.usefixtures("_frameworks")
def test_parts_for_prime_rl_load_what_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirrors: Any) -> None:
    loaded: list[Any] = []

    class Worker:
        def update_weights_from_path(self, path: str) -> None:
            loaded.append(held_by(mirrors, Path(path))["w"])

    class Broadcast:
        world = types.SimpleNamespace(is_master=True)

        def __init__(self, output: Path, config: Any):
            self.output_dir = output

        def _notify_orchestrator(self, folder: Path) -> None:
            inference["WeightcastWorker"]().update_weights_from_path(str(folder))

    class Model:
        config = None

        def state_dict(self) -> dict[str, Any]:
            return weights_of(step)

    train = types.SimpleNamespace(main=lambda: None)
    by_layer = {"filter_state_dict_by_layers": lambda state, layers, prefix: [(0, state)]}
    by_layer |= {"preprocess_layer_checkpoint": lambda model, layer, index: layer}
    paths = {"get_broadcast_dir": lambda output: output, "get_step_path": lambda output, step: output / str(step)}
    module(monkeypatch, "prime_rl.trainer.conversion_utils", get_max_layer_num=lambda state, prefix: 1)
    module(monkeypatch, "prime_rl.trainer.rl", train=train)
    module(monkeypatch, "prime_rl.transports.weights.filesystem", FileSystemWeightBroadcast=Broadcast)
    module(monkeypatch, "prime_rl.transports.weights.nccl", **by_layer)
    module(monkeypatch, "prime_rl.utils.utils", **paths)
    module(monkeypatch, "prime_rl.utils.vlm", get_layer_prefix=lambda config: "")
    module(monkeypatch, "prime_rl.inference.vllm.worker.filesystem", FileSystemWeightUpdateWorker=Worker)
    launching, loading = PRIME
    exec(placed(loading, tmp_path), inference := {})  # type: ignore[var-annotated]
    exec(placed(launching, tmp_path), {"__name__": "__main__"})
    broadcast = train.setup_weight_broadcast(tmp_path / "output", None, None, None)
    for step in (1, 2):
        broadcast.broadcast_weights(Model(), step)
        assert torch.equal(loaded[-1], weights_of(step)["w"])
    broadcast.publisher.close()


def test_every_framework_has_its_test() -> None:
    assert sorted(path.stem for path in (GUIDES / "frameworks").glob("*.md")) == sorted(
        ("verl", "nemo-rl", "skyrl", "slime", "prime-rl")
    )
