"""FSDP2 on a GPU with NCCL, one rank: every version is what the gathered model is. More ranks need more GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from torch import distributed  # noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard  # noqa: E402
from training import Small  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.torch.model import LiveModel  # noqa: E402

STEPS = 10
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    torch.cuda.set_device(0)
    distributed.init_process_group("cpu:gloo,cuda:nccl", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("detect", [None, "device", "host"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mp_policy": HALF},
        {"mp_policy": HALF, "reshard_after_forward": False},
        {"offload_policy": CPUOffloadPolicy()},
    ],
    ids=["plain", "mixed precision", "not resharded", "offloaded"],
)
def test_versions_of_a_sharded_model_on_a_gpu(options: dict[str, Any], detect: Any, tmp_path: Path) -> None:
    must_publish(fully_sharded(options), tmp_path, detect)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself
def test_versions_of_a_compiled_sharded_model(tmp_path: Path) -> None:
    must_publish(torch.compile(fully_sharded({"mp_policy": HALF})), tmp_path, None)


def fully_sharded(options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = Small(24, 41).cuda()
    fully_shard(model.up, **options)
    fully_shard(model, **options)
    return model


def gathered_state(model: Any) -> dict[str, Any]:
    state = {name.replace("_orig_mod.", ""): part for name, part in model.state_dict().items()}
    return {name: part.full_tensor() if hasattr(part, "full_tensor") else part for name, part in state.items()}


def must_publish(model: Any, folder: Path, detect: Any) -> None:
    plain, optimizer = Small(24, 41), torch.optim.AdamW(model.parameters(), lr=1e-3)
    with wc.Publisher(folder / "channel", model, optimizer=optimizer, dtype="BF16", detect=detect) as publisher:
        for step in range(1, STEPS + 1):
            torch.manual_seed(step)
            model(torch.randint(0, 41, (16,), device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            manifest = publisher.publish(step=step).result(60)
            plain.load_state_dict(gathered_state(model))
            assert manifest.position.digest == wc.fingerprint(LiveModel(plain, "BF16")).digest, step
            assert manifest.step == step
    with wc.Subscriber(folder / "channel", folder / "mirror") as subscriber:
        while subscriber.sync() is not None:
            pass
        assert subscriber.position == manifest.position
