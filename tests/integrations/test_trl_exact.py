"""What TRL calls, and that every tensor arrives bit for bit."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from local_engine import Local  # noqa: E402
from sharded_engine import SHAPES, stream, weights_of  # noqa: E402
from trl_transfer import (  # noqa: E402
    BF16,
    F32,
    STRANGE_BF16,
    Attended,
    Bucket,
    Opened,
    Trainer,
    begun,
    bits,
    holds,
    model,
    pulled,
    step,
    sync,
    versions,
    words,
)

import weightcast as wc  # noqa: E402
from weightcast.channel.chain import Chain  # noqa: E402
from weightcast.disk.checkpoint import save  # noqa: E402
from weightcast.integrations.trl import Sync, WeightcastTransfer  # noqa: E402

# -- the protocol ------------------------------------------------------------------------------------------------------


def test_transfer_satisfies_the_protocol_of_trl() -> None:
    wanted = {"init_weight_transfer": 0, "pause": 0, "send_weights": 1, "resume": 0, "destroy": 0}
    for name, arguments in wanted.items():
        parameters = inspect.signature(getattr(WeightcastTransfer("memory://protocol"), name)).parameters
        assert len(parameters) == arguments, name


def test_each_sync_is_one_version_and_its_stream_is_exhausted() -> None:
    store, tensors = Attended(), model()
    transfer = WeightcastTransfer(store, threads=1)
    trainer = Trainer(transfer, lambda: tensors.items())
    trainer.begin()
    holds(store, tensors)
    for number in range(1, 5):
        step(tensors, number)
        done = trainer.sync()
        assert (done.version, done.live) == (number, True)
        holds(store, tensors)
    trainer.end()
    assert trainer.exhausted == trainer.model_version == len(versions(store)) == 5


def test_stream_without_changes_is_exhausted_too() -> None:
    store, tensors = Attended(), model()
    transfer = WeightcastTransfer(store, threads=1)
    trainer = Trainer(transfer, lambda: tensors.items())
    trainer.begin()
    for _ in range(2):
        done = trainer.sync()
        assert done.changed == 0
        assert done.live
    assert trainer.exhausted == 3
    holds(store, tensors)
    trainer.end()


def test_pause_and_resume_make_no_request(opened: Opened, tmp_path: Path) -> None:
    weights = weights_of(SHAPES)
    engine = Local(weights)
    transfer = begun(opened(Bucket(), engine=engine, mirror=tmp_path / "mirror", dtype=None), stream(weights))
    engine.calls.clear()
    transfer.pause()
    transfer.resume()
    assert engine.calls == []
    assert not engine.paused


def test_sync_is_logged_in_one_line(opened: Opened) -> None:
    store, tensors = Attended(), model()
    transfer = opened(store)
    assert transfer.last is None
    begun(transfer, tensors)
    step(tensors, 1)
    done = sync(transfer, tensors)
    manifest = Chain.open(store).head()
    assert manifest is not None
    assert transfer.last == done == Sync(1, True, manifest.changed, manifest.nbytes, done.broadcast, 0.01, done.seconds)
    assert done.broadcast == sum(tensor.nbytes for tensor in tensors.values())
    assert 0 < done.nbytes < done.broadcast
    assert list(done.seconds) == ["detect", "upload", "live"]
    assert "\n" not in str(done)
    for part in ("version 1:", f"{done.changed:,} changed", f"{done.nbytes:,} of {done.broadcast:,}", "paused 10.0 ms"):
        assert part in str(done)
    assert "not live yet" in str(Sync(1, False, 0, 0, 5, None, {}))


# -- exactness ---------------------------------------------------------------------------------------------------------

STRANGE_F32 = (
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00008000, 0x00018000, 0x7F800000, 0xFF800000, 0x7F800001,
    0xFFC12345, 0x7FFFFFFF, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 0x3F808001, 0xBF807FFF, 0x7F7F8000, 0xFF7F7FFF,
)  # fmt: skip


def test_float32_weights_arrive_rounded_with_nan_zero_and_ties(opened: Opened) -> None:
    store, rng = Attended(), np.random.default_rng(3)
    masters = {"strange": words(F32, *STRANGE_F32), "any": words(F32, *rng.integers(0, 2**32, 5000).tolist())}
    transfer = begun(opened(store), masters)
    for number in range(1, 4):
        found = pulled(store)
        for name, tensor in masters.items():
            assert np.array_equal(found[name], wc.round_to("BF16", tensor.numpy()))
            nan = tensor.isnan().numpy()
            torchs = tensor.to(BF16).view(torch.int16).numpy().view(np.uint16)
            assert np.array_equal(found[name][~nan], torchs[~nan])
            assert nan.any()
            assert set(found[name][nan].tolist()) == {0x7FC0}
        masters["strange"].copy_(masters["strange"].roll(number))
        masters["any"][rng.integers(0, 5000, 60)] = words(F32, *rng.integers(0, 2**32, 60).tolist())
        assert sync(transfer, masters).version == number
    holds(store, masters)


def test_bf16_weights_arrive_exactly_with_nan_payloads_and_signs_of_zero(opened: Opened) -> None:
    store, rng = Attended(), np.random.default_rng(4)
    tensors = {"strange": words(BF16, *STRANGE_BF16), "any": words(BF16, *rng.integers(0, 2**16, 5000).tolist())}
    transfer = begun(opened(store), tensors)
    holds(store, tensors)
    for number in range(1, 4):
        tensors["strange"] = tensors["strange"].roll(number)
        tensors["any"][rng.integers(0, 5000, 60)] = words(BF16, *rng.integers(0, 2**16, 60).tolist())
        sync(transfer, tensors)
        holds(store, tensors)


def test_tensors_of_any_shape_stride_and_dtype_arrive(opened: Opened) -> None:
    store = Attended()

    def tensors(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        base = torch.randn(12, 10)
        return {
            "transposed": base.t(),
            "strided": base[1::2, ::3],
            "expanded": base[:1].expand(7, 10),
            "bf16 transposed": base.to(BF16).t(),
            "scalar": base[3, 3].clone(),
            "bf16 scalar": base[4, 4].to(BF16),
            "empty": torch.empty(0),
            "empty matrix": torch.empty(3, 0, dtype=BF16),
            "counts": torch.randint(0, 2**40, (5,)),
            "mask": base[0] > 0,
            "parameter": torch.nn.Parameter(base[:, 1]),
        }

    transfer = begun(opened(store), tensors(0))
    for seed in (0, 1, 2):
        sync(transfer, tensors(seed))
        holds(store, tensors(seed))
    assert {spec.name: spec.shape for spec in Chain.open(store).channel.table} == {
        name: tuple(tensor.shape) for name, tensor in tensors(0).items()
    }


def test_without_a_dtype_float32_is_published_as_it_is(opened: Opened) -> None:
    store, tensors = Attended(), model() | {"strange": words(F32, *STRANGE_F32)}
    transfer = begun(opened(store, dtype=None), tensors)
    step(tensors, 1)
    sync(transfer, tensors)
    holds(store, tensors, None)
    assert {spec.dtype for spec in Chain.open(store).channel.table} == {"F32"}


def test_float32_is_rounded_to_f16_on_request(opened: Opened) -> None:
    store, tensors = Attended(), model() | {"strange": words(F32, *STRANGE_F32)}
    begun(opened(store, dtype="F16"), tensors)
    holds(store, tensors, "F16")


@pytest.mark.parametrize("dtype", [None, "F16", "BF16"])
def test_dtype_of_an_existing_channel_wins(dtype: str | None, opened: Opened, tmp_path: Path) -> None:
    store, tensors = Attended(), model(F32)
    halves = wc.Arrays({name: bits(t).reshape(t.shape) for name, t in tensors.items()}, dict.fromkeys(tensors, "BF16"))
    save(halves, tmp_path)
    wc.init(store, tmp_path)
    transfer = begun(opened(store, dtype=dtype), tensors)
    assert transfer.last is not None
    assert (transfer.last.version, transfer.last.nbytes) == (0, 0)
    step(tensors, 1)
    sync(transfer, tensors)
    holds(store, tensors)
