"""`WeightcastTransfer` as TRL calls it, without TRL and without vLLM: exact, live when it says so, never in the way."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import Bag
from scripted_store import ScriptedStore

torch = pytest.importorskip("torch")

from changes import changed  # noqa: E402
from local_engine import Local  # noqa: E402
from sharded_engine import SHAPES, stream, weights_of  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.channel.chain import Chain  # noqa: E402
from weightcast.channel.heartbeats import heartbeats, put_heartbeat  # noqa: E402
from weightcast.channel.keys import ANCHORS, CHANNEL, MANIFESTS, REPLICAS, Position, replica_key  # noqa: E402
from weightcast.channel.records import Heartbeat, heartbeat_to_json, manifest_from_json  # noqa: E402
from weightcast.disk.checkpoint import save  # noqa: E402
from weightcast.engine import followers as following  # noqa: E402
from weightcast.engine.agent import Agent  # noqa: E402
from weightcast.engine.followers import Followers  # noqa: E402
from weightcast.engine.proof import prove  # noqa: E402
from weightcast.errors import (  # noqa: E402
    ConflictError,
    EngineError,
    EngineGoneError,
    StoreError,
    UnreachableError,
    UsageError,
    WeightcastError,
)
from weightcast.format.spec import TensorSpec  # noqa: E402
from weightcast.format.tensors import Bits, Copies  # noqa: E402
from weightcast.integrations import trl as transferring  # noqa: E402
from weightcast.integrations.trl import Sync, WeightcastTransfer  # noqa: E402
from weightcast.store.base import Data, Listed, Store  # noqa: E402
from weightcast.store.memory import MemoryStore  # noqa: E402
from weightcast.torch.stream import Streamed  # noqa: E402

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Pairs = Iterable[tuple[str, Any]]


# -- TRL's side --------------------------------------------------------------------------------------------------------


class Trainer:
    """Calls a transfer as TRL 1.16 does: once when training begins, for each sync, and when it ends."""

    def __init__(self, transfer: WeightcastTransfer, tensors: Callable[[], Pairs]):
        self.transfer, self._tensors = transfer, tensors
        self.exhausted = 0
        self.model_version = 0

    def begin(self) -> None:
        self.transfer.init_weight_transfer()
        self.sync()

    def sync(self) -> Sync:
        self.transfer.pause()
        self.transfer.send_weights(self._stream())
        self.transfer.resume()
        self.model_version += 1
        assert self.transfer.last is not None
        return self.transfer.last

    def _stream(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self._tensors():
            yield name, tensor.detach()
        self.exhausted += 1

    def end(self) -> None:
        self.transfer.destroy()


def sync(transfer: WeightcastTransfer, tensors: Mapping[str, Any] | Pairs) -> Sync:
    transfer.pause()
    transfer.send_weights(iter(tensors.items() if isinstance(tensors, Mapping) else tensors))
    transfer.resume()
    assert transfer.last is not None
    return transfer.last


# -- buckets -----------------------------------------------------------------------------------------------------------


class Bucket(MemoryStore):
    """One that may be away, and that notes commits among what others do."""

    def __init__(self, calls: list[str] | None = None):
        super().__init__("bucket")
        self.away = self.full = False
        self.calls: list[str] = [] if calls is None else calls

    def _answer(self, key: str, write: bool = False) -> None:
        if self.away or (self.full and write):
            raise UnreachableError("away", url=self.url, key=key)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self._answer(key)
        return super().get(key, start, length)

    def put(self, key: str, data: Data) -> None:
        self._answer(key, write=True)
        super().put(key, data)

    def create(self, key: str, data: Data) -> bool:
        self._answer(key, write=True)
        made = super().create(key, data)
        if made and key.startswith(MANIFESTS):
            self.calls.append("commit")
            self.committed(manifest_from_json(bytes(data)).position)
        return made

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        self._answer(prefix)
        return super().list(prefix, after)

    def delete(self, key: str) -> None:
        self._answer(key)
        super().delete(key)

    def committed(self, position: Position) -> None:
        """A version was."""

    def tell(self, position: Position, replica: str = "engine", pause: float | None = 0.01) -> None:
        """The last word of an engine."""
        word = Heartbeat(replica, position, time.time(), None, pause)
        MemoryStore.put(self, replica_key(replica), heartbeat_to_json(word))


class Attended(Bucket):
    """A bucket with an engine behind it that has every version the moment it is committed."""

    def committed(self, position: Position) -> None:
        self.tell(position)


def versions(store: Store) -> list[int]:
    return list(Chain.open(store).versions())


def pulled(store: Store) -> dict[str, Bits]:
    """What a subscriber gets who begins with nothing."""
    table = Chain.open(store).channel.table
    held = Copies(table, {spec.name: np.zeros(spec.elements, spec.kind.word) for spec in table})
    with wc.Subscriber(store, held, threads=1) as subscriber:
        staged = subscriber.poll()
        if staged is not None:
            subscriber.apply(staged)
    return {spec.name: held.read(spec.name) for spec in table}


def holds(store: Store, tensors: Mapping[str, Any], dtype: str | None = "BF16") -> None:
    """The channel's head has these very tensors, float32 ones rounded to ``dtype``, and no others."""
    found = pulled(store)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert np.array_equal(found[name], bits(tensor, dtype)), name


def bits(tensor: Any, dtype: str | None = "BF16") -> Bits:
    """A tensor's wire bits, by way of numpy."""
    flat = tensor.detach().reshape(-1).contiguous()
    if flat.dtype == F32 and dtype is not None:
        return wc.round_to(dtype, flat.numpy())
    raw = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return raw.view(f"<u{flat.element_size()}")


def words(dtype: Any, *patterns: int) -> Any:
    """A tensor of these bits."""
    signed = torch.int32 if dtype == F32 else torch.int16
    unsigned = np.array(patterns, np.uint32 if dtype == F32 else np.uint16)
    return torch.from_numpy(unsigned.view(np.int32 if dtype == F32 else np.int16)).to(signed).view(dtype)


def model(dtype: Any = F32, seed: int = 0) -> dict[str, Any]:
    luck = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (40, 16), "layers.0.up.weight": (24, 16), "layers.0.norm.weight": (16,)}
    return {name: (0.02 * torch.randn(shape, generator=luck)).to(dtype) for name, shape in shapes.items()}


def step(tensors: Mapping[str, Any], seed: int) -> None:
    """Some elements move, in place."""
    luck = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        moves = 0.01 * torch.randn(tensor.shape, generator=luck)
        tensor += (moves * (torch.rand(tensor.shape, generator=luck) < 0.1)).to(tensor.dtype)


@pytest.fixture(autouse=True)
def _no_time_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sync waits as long as all others."""
    monkeypatch.setattr(transferring, "_JOINING", 0.0)


@pytest.fixture
def opened() -> Iterator[Callable[..., WeightcastTransfer]]:
    """Makes transfers that are ended when the test is."""
    made: list[WeightcastTransfer] = []

    def make(store: Any, **options: Any) -> WeightcastTransfer:
        made.append(WeightcastTransfer(store, **({"threads": 1, "patience": 30.0, "retry_after": 0.05} | options)))
        return made[-1]

    yield make
    for transfer in made:
        transfer.destroy()


Opened = Callable[..., WeightcastTransfer]


def begun(transfer: WeightcastTransfer, tensors: Mapping[str, Any] | Pairs) -> WeightcastTransfer:
    transfer.init_weight_transfer()
    sync(transfer, tensors)
    return transfer


# -- the protocol ------------------------------------------------------------------------------------------------------


def test_it_has_the_methods_that_trl_calls_and_takes_what_trl_passes() -> None:
    wanted = {"init_weight_transfer": 0, "pause": 0, "send_weights": 1, "resume": 0, "destroy": 0}
    for name, arguments in wanted.items():
        parameters = inspect.signature(getattr(WeightcastTransfer("memory://protocol"), name)).parameters
        assert len(parameters) == arguments, name


def test_several_syncs_in_trls_order_are_as_many_versions_and_every_stream_is_exhausted() -> None:
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


def test_where_nothing_changed_the_stream_is_exhausted_all_the_same() -> None:
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


def test_pause_and_resume_ask_nothing_of_an_engine(opened: Opened, tmp_path: Path) -> None:
    weights = weights_of(SHAPES)
    engine = Local(weights)
    transfer = begun(opened(Bucket(), engine=engine, mirror=tmp_path / "mirror", dtype=None), stream(weights))
    engine.calls.clear()
    transfer.pause()
    transfer.resume()
    assert engine.calls == []
    assert not engine.paused


def test_a_sync_is_one_line_that_says_it_all(opened: Opened) -> None:
    store, tensors = Attended(), model()
    transfer = opened(store)
    assert transfer.last is None
    begun(transfer, tensors)
    step(tensors, 1)
    done = sync(transfer, tensors)
    manifest = Chain.open(store).head()
    assert manifest is not None
    assert (
        transfer.last
        == done
        == Sync(1, True, manifest.changed, manifest.object.size, done.broadcast, 0.01, done.seconds)
    )
    assert done.broadcast == sum(tensor.nbytes for tensor in tensors.values())
    assert 0 < done.nbytes < done.broadcast
    assert list(done.seconds) == ["take", "detect", "upload", "live"]
    assert "\n" not in str(done)
    for part in ("version 1:", f"{done.changed:,} changed", f"{done.nbytes:,} of {done.broadcast:,}", "paused 10.0 ms"):
        assert part in str(done)
    assert "not live yet" in str(Sync(1, False, 0, 0, 5, None, {}))


# -- exactness ---------------------------------------------------------------------------------------------------------

STRANGE_F32 = (
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00008000, 0x00018000, 0x7F800000, 0xFF800000, 0x7F800001,
    0xFFC12345, 0x7FFFFFFF, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 0x3F808001, 0xBF807FFF, 0x7F7F8000, 0xFF7F7FFF,
)  # fmt: skip
STRANGE_BF16 = (0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7F81, 0xFFC1, 0x7FFF, 0xFFA5)


def test_float32_masters_arrive_as_we_round_them_nan_zero_and_ties_alike(opened: Opened) -> None:
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


def test_bf16_weights_arrive_bit_for_bit_nan_payloads_and_signs_of_zero_too(opened: Opened) -> None:
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


def test_f16_is_rounded_to_where_it_is_asked_for(opened: Opened) -> None:
    store, tensors = Attended(), model() | {"strange": words(F32, *STRANGE_F32)}
    begun(opened(store, dtype="F16"), tensors)
    holds(store, tensors, "F16")


@pytest.mark.parametrize("dtype", [None, "F16", "BF16"])
def test_the_dtype_of_a_channel_that_is_there_wins(dtype: str | None, opened: Opened, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_what_a_stream_gave_is_not_read_again_from_the_trainer(dtype: Any) -> None:
    """TRL frees a gathered tensor, or trains on, once the next one is asked for."""
    received = Streamed(None, "BF16")
    tensors = model(dtype)
    wanted = {name: bits(tensor).copy() for name, tensor in tensors.items()}

    def fleeting() -> Iterator[tuple[str, Any]]:
        for name, tensor in tensors.items():
            room = tensor.clone()
            yield name, room
            room.fill_(7.0)

    assert received.take(fleeting()) == sum(tensor.nbytes for tensor in tensors.values())
    assert all(np.array_equal(received.read(name), wanted[name]) for name in tensors)


# -- the first sync ----------------------------------------------------------------------------------------------------


def test_a_new_channel_is_begun_with_the_whole_model(opened: Opened) -> None:
    store, tensors = Attended(), model()
    transfer = opened(store)
    transfer.init_weight_transfer()
    assert list(MemoryStore.list(store, "")) == []
    done = sync(transfer, tensors)
    elements = sum(tensor.numel() for tensor in tensors.values())
    assert (done.version, done.changed, done.nbytes, done.broadcast) == (0, elements, 2 * elements, 4 * elements)
    assert versions(store) == [0]
    holds(store, tensors)


def test_a_channel_that_has_these_weights_gets_no_new_version(opened: Opened) -> None:
    store, tensors = Attended(), model()
    begun(opened(store), tensors).destroy()
    step(tensors, 1)
    begun(opened(store), tensors).destroy()
    done = begun(opened(store), tensors).last
    assert done is not None
    assert (done.version, done.changed, done.nbytes, done.live) == (1, 0, 0, True)
    assert versions(store) == [0, 1]


def test_a_channel_that_has_other_weights_gets_exactly_one_version(opened: Opened) -> None:
    store = Attended()
    begun(opened(store), model(seed=1)).destroy()
    tensors = model(seed=1)
    step(tensors, 1)
    done = begun(opened(store), tensors).last
    head = Chain.open(store).head()
    assert done is not None
    assert head is not None
    assert (done.version, done.changed, done.nbytes) == (1, head.changed, head.object.size)
    assert versions(store) == [0, 1]
    holds(store, tensors)


def test_frozen_tensors_keep_the_heads_bits_for_good(opened: Opened) -> None:
    store, tensors = Attended(), model(BF16)
    frozen = {"vision.weight": words(BF16, *STRANGE_BF16), "vision.bias": torch.randn(7).to(F16)}
    begun(opened(store), tensors | frozen)
    step(frozen, 5)  # the bits of version 0 are not the ones to keep
    before = opened(store)
    begun(before, tensors | frozen).destroy()
    transfer = begun(opened(store), tensors)
    assert transfer.last is not None
    assert (transfer.last.version, transfer.last.nbytes) == (1, 0)
    for number in range(1, 4):
        step(tensors, number)
        sync(transfer, tensors)
        holds(store, tensors | frozen)
    assert versions(store) == [0, 1, 2, 3, 4]


def test_a_tied_output_layer_that_the_checkpoint_has_twice_goes_with_its_embedding(opened: Opened) -> None:
    """Some checkpoints of tied models have both, Qwen3-0.6B's for one; TRL sends what the model has once."""
    store, tensors = Attended(), model(BF16)
    copies = {"lm_head.weight": tensors["embed.weight"], "frozen.weight": tensors["layers.0.up.weight"].clone()}
    begun(opened(store), tensors | copies).destroy()
    for training in range(2):
        transfer = begun(opened(store), tensors)
        assert transfer.last is not None
        assert transfer.last.nbytes == 0
        for number in range(2):
            step(tensors, 10 * training + number)
            sync(transfer, tensors)
            holds(store, tensors | copies)  # a frozen block that is a copy of a trained one does not go with it
        transfer.destroy()


def test_an_output_layer_of_its_own_that_is_frozen_stays_as_it_is(opened: Opened) -> None:
    store, tensors = Attended(), model(BF16)
    frozen = {"lm_head.weight": tensors["embed.weight"] + 1}
    begun(opened(store), tensors | frozen).destroy()
    transfer = begun(opened(store), tensors)
    step(tensors, 1)
    sync(transfer, tensors)
    holds(store, tensors | frozen)


def test_a_tensor_that_is_unfrozen_later_is_published_from_then_on(opened: Opened) -> None:
    store, tensors = Attended(), model(BF16)
    begun(opened(store), tensors).destroy()
    some = {name: tensor for name, tensor in tensors.items() if "norm" not in name}
    transfer = begun(opened(store), some)
    step(tensors, 1)
    sync(transfer, tensors)
    holds(store, tensors)


def test_what_a_channel_without_a_version_would_lack_is_named(opened: Opened) -> None:
    store, tensors = Attended(), model(BF16)
    table = Streamed(None, None)
    table.take(tensors.items())
    Chain.create(store, table.table)
    transfer = opened(store)
    transfer.init_weight_transfer()
    with pytest.raises(UsageError, match="weightcast init") as caught:
        sync(transfer, dict(islice(tensors.items(), 2)))
    assert caught.value.tensor == "layers.0.norm.weight"
    assert versions(store) == []
    sync(transfer, tensors)
    holds(store, tensors)


def test_patience_begins_when_a_first_upload_is_over(opened: Opened) -> None:
    class Slow(Bucket):
        """Takes long for a whole model, and its engine is live only at the third look."""

        looks = 0
        newest: Position | None = None

        def put(self, key: str, data: Data) -> None:
            if key.startswith(ANCHORS):
                time.sleep(0.5)
            super().put(key, data)

        def committed(self, position: Position) -> None:
            self.newest = position

        def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
            if prefix == REPLICAS and self.newest is not None:
                self.looks += 1
                if self.looks == 3:
                    self.tell(self.newest)
            return super().list(prefix, after)

    done = begun(opened(Slow(), patience=0.9), model()).last
    assert done is not None
    assert done.seconds["upload"] > 0.9
    assert done.live


# -- errors ------------------------------------------------------------------------------------------------------------


def _with(**other: Any) -> Callable[[dict[str, Any]], Pairs]:
    return lambda tensors: (tensors | other).items()


def _broken(tensors: dict[str, Any]) -> Pairs:
    yield from islice(tensors.items(), 2)
    raise RuntimeError("a rank is gone")


BAD: dict[str, tuple[Callable[[dict[str, Any]], Pairs], type[Exception], str, str | None]] = {
    "fused": (
        _with(**{"layers.0.experts.gate_up_proj": torch.zeros(3, 4, 5)}),
        UsageError,
        "channel has no such tensor.*WeightcastCallback",
        "layers.0.experts.gate_up_proj",
    ),
    "shape": (_with(**{"embed.weight": torch.zeros(16, 40)}), UsageError, r"\[16, 40\].*\[40, 16\]", "embed.weight"),
    "f16": (_with(**{"embed.weight": torch.zeros(40, 16, dtype=F16)}), UsageError, "F16.* BF16", "embed.weight"),
    "f64": (_with(**{"embed.weight": torch.zeros(40, 16, dtype=F64)}), UsageError, "F64.* BF16", "embed.weight"),
    "unknown": (
        _with(**{"embed.weight": torch.zeros(40, 16, dtype=torch.complex128)}),
        UsageError,
        "complex128.* BF16",
        "embed.weight",
    ),
    "twice": (lambda tensors: [*tensors.items(), *tensors.items()], UsageError, "twice", "embed.weight"),
    "raises": (_broken, RuntimeError, "a rank is gone", None),
    "nothing": (lambda tensors: [], UsageError, "sends no tensors", None),
}
EARLY = (
    lambda tensors: islice(tensors.items(), 2),
    UsageError,
    "did not send all.*norm.*Restart",
    "layers.0.norm.weight",
)


@pytest.mark.parametrize("case", [*BAD, "early"])
def test_a_bad_stream_is_refused_commits_nothing_and_a_good_one_goes_on(case: str, opened: Opened) -> None:
    spoil, kind, says, tensor = EARLY if case == "early" else BAD[case]
    store, tensors = Attended(), model()
    transfer = begun(opened(store), tensors)
    transfer.destroy()
    begun(transfer, tensors)  # a channel that was there
    step(tensors, 1)
    before = {listed.key: listed for listed in store.list("")}
    with pytest.raises(kind, match=says) as caught:
        sync(transfer, spoil(tensors))
    if tensor is not None:
        assert isinstance(caught.value, WeightcastError)
        assert caught.value.tensor == tensor
    assert {listed.key: listed for listed in store.list("")} == before
    step(tensors, 2)
    assert sync(transfer, tensors).version == 1
    holds(store, tensors)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("case", ["twice", "raises", "nothing"])
def test_a_first_stream_that_is_bad_leaves_the_bucket_alone_and_a_good_one_goes_on(
    case: str, there: bool, opened: Opened
) -> None:
    spoil, kind, says, _ = BAD[case]
    store, tensors = Attended(), model()
    if there:
        begun(opened(store), tensors).destroy()
    before = {listed.key: listed for listed in store.list("")}
    transfer = opened(store)
    transfer.init_weight_transfer()
    with pytest.raises(kind, match=says):
        sync(transfer, spoil(tensors | {"only once": torch.zeros(3)} if not there else tensors))
    assert {listed.key: listed for listed in store.list("")} == before
    step(tensors, 1)
    assert sync(transfer, tensors).version == int(there)
    holds(store, tensors)


def test_a_tensor_that_comes_later_than_the_first_stream_is_refused(opened: Opened) -> None:
    store, tensors = Attended(), model()
    transfer = begun(opened(store), tensors)
    with pytest.raises(UsageError, match="did not send before") as caught:
        sync(transfer, tensors | {"new": torch.zeros(2)})
    assert caught.value.tensor == "new"
    assert versions(store) == [0]


def test_float32_is_not_rounded_to_what_we_cannot_round_to(opened: Opened) -> None:
    store = Attended()
    spec = TensorSpec("w", "F8_E4M3", (4,))
    wc.init(store, Bag({spec: np.arange(4, dtype=np.uint8)}))
    transfer = opened(store)
    transfer.init_weight_transfer()
    with pytest.raises(UsageError, match="sends F32, the channel has F8_E4M3"):
        sync(transfer, {"w": torch.zeros(4)})
    assert versions(store) == [0]


def test_a_dtype_that_no_format_has_is_refused_for_a_new_channel(opened: Opened) -> None:
    store = Attended()
    transfer = opened(store)
    transfer.init_weight_transfer()
    with pytest.raises(UsageError, match="complex128 is no dtype"):
        sync(transfer, {"w": torch.zeros(4, dtype=torch.complex128)})
    assert list(MemoryStore.list(store, "")) == []


def test_weights_before_init_are_refused(opened: Opened) -> None:
    transfer = opened(Attended())
    with pytest.raises(UsageError, match="init_weight_transfer was not called"):
        sync(transfer, model())
    transfer.destroy()


def test_a_wrong_address_or_dtype_is_known_at_once() -> None:
    with pytest.raises(UsageError, match="Did you mean s3://"):
        WeightcastTransfer("s4://bucket/run")
    with pytest.raises(UsageError, match="F64"):
        WeightcastTransfer(MemoryStore(), dtype="F64")


def test_a_bucket_that_is_away_when_training_begins_is_an_error_at_once(opened: Opened) -> None:
    store = Bucket()
    store.away = True
    with pytest.raises(UnreachableError, match="away"):
        opened(store).init_weight_transfer()


def test_what_is_no_channel_is_named_before_anything_is_computed(opened: Opened) -> None:
    store = Bucket()
    store.put(CHANNEL, b"{}")
    with pytest.raises(WeightcastError, match=CHANNEL):
        opened(store).init_weight_transfer()


def test_of_two_trainers_the_one_that_was_outrun_hears_of_it_at_its_sync(opened: Opened) -> None:
    store, mine, theirs = Attended(), model(), model()
    first = begun(opened(store), mine)
    step(theirs, 9)
    second = begun(opened(store), theirs)
    step(mine, 1)
    with pytest.raises(ConflictError, match="Only one writer may publish"):
        sync(first, mine)
    holds(store, theirs)
    with pytest.raises(ConflictError):
        sync(first, mine)
    step(theirs, 10)
    assert sync(second, theirs).version == 2
    first.destroy()
    holds(store, theirs)


# -- engines that are followed by agents -------------------------------------------------------------------------------


class Following:
    """An agent in a thread of its own, as `weightcast attach` runs it."""

    def __init__(self, store: Store, engine: Any, mirror: Path, replica: str = "engine-0"):
        self.agent = Agent(store, engine, mirror, replica=replica)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for _ in self.agent.follow(every=0.01, on_error=lambda error: None):
            pass

    def stop(self) -> None:
        self.agent.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.agent.close()

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def until_heard(store: Store) -> None:
    while not Followers(Chain.open(store)).now():
        time.sleep(0.01)


def publish(store: Store, weights: wc.Weights) -> None:
    """Another trainer's version."""
    with wc.Publisher(store, weights) as publisher:
        publisher.publish().result(30)


def must_be_live(engine: Local, store: Store, version: int) -> None:
    """The engine serves the version, and its live parameters are that to the last bit."""
    assert (engine.served, engine.paused) == (str(version), False)
    proof = prove(engine, Chain.open(store))
    assert (proof.version, dict(proof.wrong), dict(proof.unproven)) == (version, {}, {})


def test_a_sync_comes_back_when_every_engine_that_follows_is_at_its_version(opened: Opened, tmp_path: Path) -> None:
    store, weights = Bucket(), weights_of(SHAPES)
    wc.init(store, weights)
    engines = [Local(weights), Local(weights)]
    with (
        Following(store, engines[0], tmp_path / "0", "engine-0"),
        Following(store, engines[1], tmp_path / "1", "engine-1"),
    ):
        transfer = begun(opened(store, dtype=None), stream(weights))
        for number in range(1, 5):
            weights = changed(weights, 0.01, number)
            done = sync(transfer, stream(weights))
            assert [engine.served for engine in engines] == [str(number)] * 2
            assert (done.version, done.live) == (number, True)
            assert done.pause is not None
            assert done.pause > 0
            assert done.nbytes > 0
    for engine in engines:
        must_be_live(engine, store, 4)
    transfer.destroy()


def test_what_goes_up_is_less_than_what_trl_would_have_sent(opened: Opened) -> None:
    store = Attended()
    tensors = {"w": torch.randn(400, 256)}
    transfer = begun(opened(store), tensors)
    step(tensors, 1)
    done = sync(transfer, tensors)
    assert 0 < done.nbytes < done.broadcast / 10


def test_one_engine_of_two_that_is_late_is_waited_for(opened: Opened) -> None:
    class Half(Bucket):
        def committed(self, position: Position) -> None:
            self.tell(position, "quick")

    store, tensors = Half(), model()
    transfer = begun(opened(store, patience=0.3), tensors)
    head = Chain.open(store).head()
    assert head is not None
    store.tell(head.position, "slow")
    step(tensors, 1)
    done = sync(transfer, tensors)
    assert (done.version, done.live, done.pause) == (1, False, None)
    assert done.seconds["live"] > 0.1


def test_a_position_of_another_channel_is_not_taken_for_ours(opened: Opened) -> None:
    """A channel that was reset counts from 0 again: an engine that still holds what it had is not live."""

    class Reset(Bucket):
        def committed(self, position: Position) -> None:
            self.tell(Position(position.version + 7, position.digest[::-1]))

    with pytest.raises(EngineError, match=r"engine is at 7.*patience"):
        begun(opened(Reset(), patience=0.1), model())


def test_nobody_follows_the_first_sync_says_so_and_what_to_do(opened: Opened) -> None:
    store, tensors = Bucket(), model()
    transfer = opened(store, patience=0.2)
    transfer.init_weight_transfer()
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"no engine follows.*weightcast attach memory://bucket --engine"):
        sync(transfer, tensors)
    assert 0.2 <= time.monotonic() - began < 10
    assert transfer.last is None
    holds(store, tensors)


def test_a_mirror_without_an_engine_is_no_follower(opened: Opened, tmp_path: Path) -> None:
    store, tensors = Bucket(), model()
    begun(opened(store, patience=0), tensors).destroy()
    with wc.Subscriber(store, tmp_path / "mirror", replica="pull", threads=1) as subscriber:
        staged = subscriber.poll()
        assert staged is not None
        subscriber.apply(staged)
    assert list(store.list(replica_key("pull")))
    assert Followers(Chain.open(store)).now() == []
    with pytest.raises(EngineError, match="no engine follows"):
        begun(opened(store, patience=0.1), tensors)


@pytest.mark.parametrize(("age", "counts"), [(0, True), (80, True), (91, False), (1e6, False)])
def test_only_what_was_told_lately_by_the_stores_own_clock_counts(age: float, counts: bool) -> None:
    store = ScriptedStore(now=1e9)  # long ago, by ours
    head = wc.init(store, wc.Arrays({"w": np.zeros(3, np.float32)})).position
    chain = Chain.open(store)
    put_heartbeat(chain, Heartbeat("engine", head, time.time(), None, 0.0))
    store.now += age
    assert [found.replica for found in Followers(chain).now()] == ["engine"] * counts


def test_an_engine_whose_word_is_old_is_not_waited_for_and_not_believed(opened: Opened, tmp_path: Path) -> None:
    store, weights = ScriptedStore(now=1e9), weights_of(SHAPES)
    head = wc.init(store, weights).position
    put_heartbeat(Chain.open(store), Heartbeat("gone", head, time.time(), None, 0.0))
    store.now += 91
    with pytest.raises(EngineError, match="no engine follows"):
        begun(opened(store, patience=0.1, dtype=None), stream(weights))
    engine = Local(weights)
    done = begun(opened(store, engine=engine, mirror=tmp_path / "mirror", dtype=None), stream(weights)).last
    assert done is not None
    assert done.live
    must_be_live(engine, store, 0)


def test_an_agent_that_dies_costs_a_warning_and_its_successor_catches_up(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, weights = Bucket(), weights_of(SHAPES)
    wc.init(store, weights)
    engine = Local(weights)
    transfer = opened(store, dtype=None)
    with Following(store, engine, tmp_path / "mirror"):
        begun(transfer, stream(weights))
        last_word = store.get("replicas/engine-0.json")
    store.put("replicas/engine-0.json", last_word)  # one that is killed does not take it back
    transfer._patience = 0.3
    for number in (1, 2):
        weights = changed(weights, 0.05, number)
        caplog.clear()
        began = time.monotonic()
        done = sync(transfer, stream(weights))
        assert 0.3 <= time.monotonic() - began < 10
        assert (done.version, done.live, done.pause) == (number, False, None)
        (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert f"version {number} is not live after 0.3 s: engine-0 is at 0; training goes on" in warning
        assert engine.served == "0"
    transfer._patience = 30.0
    with Following(store, engine, tmp_path / "mirror"):
        weights = changed(weights, 0.05, 3)
        done = sync(transfer, stream(weights))
        assert (done.version, done.live) == (3, True)
        assert engine.served == "3"
    must_be_live(engine, store, 3)


def test_an_engine_whose_agent_is_gone_is_taken_over_and_given_back(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, weights = Bucket(), weights_of(SHAPES)
    wc.init(store, weights)
    engine = Local(weights)
    transfer = opened(store, engine=engine, mirror=tmp_path / "own", dtype=None)
    with Following(store, engine, tmp_path / "mirror"):
        until_heard(store)
        begun(transfer, stream(weights))
        assert transfer._agent is None
    for number in (1, 2):  # the agent has left
        weights = changed(weights, 0.05, number)
        assert sync(transfer, stream(weights)).live
        assert engine.served == str(number)
    with Following(store, engine, tmp_path / "mirror") as other:
        until_heard(store)
        weights = changed(weights, 0.05, 3)
        assert sync(transfer, stream(weights)).live
        assert transfer._agent is None
        assert other.agent.position is not None
        assert other.agent.position.version == 3
    must_be_live(engine, store, 3)


def test_a_mirror_of_nobodys_choice_is_made_in_a_home_that_is_empty(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    store, weights = Bucket(), weights_of(SHAPES)
    wc.init(store, weights)
    engine = Local(weights)
    transfer = begun(opened(store, engine=engine, dtype=None), stream(weights))
    assert sync(transfer, stream(changed(weights, 0.05, 1))).live
    must_be_live(engine, store, 1)


def test_the_word_of_an_agent_that_was_killed_is_not_taken_for_ever(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, weights = Bucket(), weights_of(SHAPES)
    head = wc.init(store, weights)
    monkeypatch.setattr(following, "_FRESH", 1.0)
    put_heartbeat(Chain.open(store), Heartbeat("killed", head.position, time.time(), None, 0.0))
    engine = Local(weights)
    transfer = opened(store, engine=engine, mirror=tmp_path / "own", dtype=None)
    begun(transfer, stream(weights))
    weights = changed(weights, 0.05, 1)
    assert sync(transfer, stream(weights)).live
    assert engine.served == "1"
    must_be_live(engine, store, 1)


def test_an_engine_that_joins_is_waited_for_longer_than_patience(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transferring, "_JOINING", 30.0)
    monkeypatch.setattr(transferring, "_SOON", 0.2)
    store, weights = Bucket(), weights_of(SHAPES)
    wc.init(store, weights)
    transfer = opened(store, dtype=None, patience=0.1)
    late: list[Following] = []
    timer = threading.Timer(0.6, lambda: late.append(Following(store, Local(weights), tmp_path / "mirror")))
    timer.start()
    try:
        assert begun(transfer, stream(weights)).last.live
    finally:
        timer.join()
        late[0].stop()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning == "waiting for version 0 to be live: no engine follows the channel"


def test_an_agent_that_leaves_takes_its_last_word_back(tmp_path: Path) -> None:
    store, weights = Bucket(), weights_of(SHAPES)
    wc.init(store, weights)
    followers = Followers(Chain.open(store))
    with Agent(store, Local(weights), tmp_path / "mirror", replica="engine-0") as agent:
        assert followers.now() == []
        publish(store, changed(weights, 0.05, 1))
        next(agent.follow(every=0.01))
        assert [beat.replica for beat in followers.now()] == ["engine-0"]
    assert followers.now() == []
    assert list(store.list("replicas/")) == []


def test_an_engine_that_is_held_at_a_version_is_not_waited_for(tmp_path: Path) -> None:
    store, weights = Bucket(), weights_of(SHAPES)
    wc.init(store, weights)
    publish(store, changed(weights, 0.05, 1))
    other = Local(changed(weights, 0.5, 9))
    with Agent(store, other, tmp_path / "mirror", policy=wc.Pinned(0), replica="engine-0") as agent:
        next(agent.follow(every=0.01))
        assert len(heartbeats(Chain.open(store))) == 1
        assert Followers(Chain.open(store)).now() == []


@pytest.mark.parametrize("attended", [True, False])
def test_without_patience_nothing_is_waited_for_and_nothing_is_lost(
    attended: bool, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    store, tensors = Attended() if attended else Bucket(), model()
    transfer = begun(opened(store, patience=0), tensors)
    for number in range(1, 6):
        step(tensors, number)
        done = sync(transfer, tensors)
        assert not done.live
        assert done.version <= number
    transfer.destroy()
    holds(store, tensors)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_patience_may_be_endless(opened: Opened) -> None:
    store, tensors = Attended(), model()
    transfer = begun(opened(store, patience=float("inf")), tensors)
    step(tensors, 1)
    assert sync(transfer, tensors).live


# -- an engine that the trainer drives itself --------------------------------------------------------------------------


def test_an_engine_that_nobody_follows_is_paused_once_a_sync_and_only_when_all_is_uploaded(
    opened: Opened, tmp_path: Path
) -> None:
    weights = weights_of(SHAPES)
    engine = Local(weights)
    store = Bucket(engine.calls)
    transfer = opened(store, engine=engine, mirror=tmp_path / "mirror", dtype=None)
    transfer.init_weight_transfer()
    assert engine.calls == []

    def streamed() -> Iterator[tuple[str, Any]]:
        yield from stream(weights)
        engine.calls.append("streamed")

    done = sync(transfer, streamed())
    assert (done.version, done.live, engine.calls.count("pause")) == (0, True, 0)  # it has these weights
    for number in range(1, 5):
        weights = changed(weights, 0.05, number)
        engine.calls.clear()
        done = sync(transfer, streamed())
        must = ["streamed", "commit", "stage_patches", "pause", "update", "finish", "resume"]
        assert [call for call in engine.calls if call in must] == must
        assert (done.version, done.live) == (number, True)
        assert done.pause is not None
        assert 0 < done.pause <= done.seconds["live"]
        must_be_live(engine, store, number)
    transfer.destroy()
    assert not engine.paused


def test_an_engine_with_other_weights_is_brought_to_the_first_version(opened: Opened, tmp_path: Path) -> None:
    weights = weights_of(SHAPES)
    engine, store = Local(changed(weights, 0.5, 99)), Bucket()
    begun(opened(store, engine=engine, mirror=tmp_path / "mirror", dtype=None), stream(weights))
    must_be_live(engine, store, 0)


def test_where_an_agent_follows_the_trainer_keeps_its_hands_off_the_engine(opened: Opened, tmp_path: Path) -> None:
    store, weights = Attended(), weights_of(SHAPES)
    wc.init(store, weights)
    engine = Local(weights)
    transfer = begun(opened(store, engine=engine, mirror=tmp_path / "mirror", dtype=None), stream(weights))
    assert sync(transfer, stream(changed(weights, 0.05, 1))).live
    assert engine.calls == []
    assert not (tmp_path / "mirror").exists()


def _gone(engine: Local) -> None:
    def ask(request: Mapping[str, Any]) -> Any:
        raise EngineGoneError("the engine does not answer", url=engine.url)

    engine.ask = ask  # type: ignore[method-assign]


def _back(engine: Local) -> None:
    del engine.ask


def test_an_engine_that_is_dead_when_training_begins_is_an_error(opened: Opened, tmp_path: Path) -> None:
    weights = weights_of(SHAPES)
    engine = Local(weights)
    _gone(engine)
    transfer = opened(Bucket(), engine=engine, mirror=tmp_path / "mirror", dtype=None, patience=0.2)
    transfer.init_weight_transfer()
    with pytest.raises(EngineError, match=r"does not answer.*on this host.*weightcast attach") as caught:
        sync(transfer, stream(weights))
    assert caught.value.url == engine.url
    assert isinstance(caught.value.__cause__, EngineGoneError)


def test_an_engine_that_dies_later_costs_a_warning_and_is_brought_up_to_date_when_it_is_back(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, weights = Bucket(), weights_of(SHAPES)
    engine = Local(weights)
    transfer = opened(store, engine=engine, mirror=tmp_path / "mirror", dtype=None)
    begun(transfer, stream(weights))
    transfer._patience = 0.2
    _gone(engine)
    for number in (1, 2):
        weights = changed(weights, 0.05, number)
        done = sync(transfer, stream(weights))
        assert (done.version, done.live, done.pause) == (number, False, None)
        assert f"version {number} is not live after 0.2 s: the engine does not answer" in caplog.text
    _back(engine)
    engine.calls.clear()
    transfer._patience = 30.0
    weights = changed(weights, 0.05, 3)
    assert sync(transfer, stream(weights)).live
    assert engine.calls.count("pause") == 1
    must_be_live(engine, store, 3)


def test_a_disk_without_room_for_the_mirror_does_not_end_training(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, weights = Bucket(), weights_of(SHAPES)
    engine = Local(weights)
    transfer = begun(opened(store, engine=engine, mirror=tmp_path / "mirror", dtype=None), stream(weights))
    with monkeypatch.context() as full:

        def poll(*_: object) -> None:
            raise wc.errors.SpaceError("the disk is full")

        full.setattr(wc.Subscriber, "poll", poll)
        transfer._patience = 0.1
        weights = changed(weights, 0.05, 1)
        assert not sync(transfer, stream(weights)).live
    assert "the disk is full" in caplog.text
    transfer._patience = 30.0
    assert sync(transfer, stream(weights)).live
    must_be_live(engine, store, 1)


def test_without_patience_a_driven_engine_gets_what_is_in_the_bucket(opened: Opened, tmp_path: Path) -> None:
    store, weights = Bucket(), weights_of(SHAPES)
    engine = Local(weights)
    transfer = begun(opened(store, engine=engine, mirror=tmp_path / "mirror", dtype=None, patience=0), stream(weights))
    for number in (1, 2):
        weights = changed(weights, 0.05, number)
        sync(transfer, stream(weights))
    assert transfer._publisher is not None
    head = transfer._publisher.flush(30).version
    sync(transfer, stream(weights))
    assert int(engine.served) >= head
    assert not engine.paused
    transfer._publisher.flush(30)
    store.full = True
    done = sync(transfer, stream(changed(weights, 0.05, 3)))
    assert (done.live, done.pause) == (False, None)  # what was sent is not what the engine has
    store.full = False


class Reset(Bucket):
    """Somebody resets the channel as soon as version 1 is committed, and publishes another version 1."""

    def __init__(self, other: Bag):
        super().__init__()
        self._other: Bag | None = other

    def committed(self, position: Position) -> None:
        if position.version == 1 and self._other is not None:
            other, self._other = self._other, None
            for listed in [*self.list("")]:
                self.delete(listed.key)
            wc.init(self, other)
            publish(self, changed(other, 0.05, 8))


def test_driven_engine_at_another_version_of_the_same_number_is_not_live(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = weights_of(SHAPES)
    store, engine = Reset(changed(weights, 0.5, 7)), Local(weights)
    transfer = begun(opened(store, engine=engine, mirror=tmp_path / "mirror", dtype=None), stream(weights))
    transfer._patience = 0.5
    done = sync(transfer, stream(changed(weights, 0.05, 1)))
    assert engine.served == "1"
    assert (done.version, done.live, done.pause) == (1, False, None)
    assert "the engine is at 1 (" in caplog.text


# -- a bucket that is away ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["away", "full"])
def test_in_an_outage_training_goes_on_and_all_of_it_arrives_afterwards(
    trouble: str, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    store, tensors = Attended(), model()
    transfer = begun(opened(store), tensors)
    step(tensors, 1)
    sync(transfer, tensors)
    transfer._patience = 0.2
    setattr(store, trouble, True)
    for number in range(2, 6):
        step(tensors, number)
        caplog.clear()
        began = time.monotonic()
        done = sync(transfer, tensors)
        assert 0.2 <= time.monotonic() - began < 10
        assert (done.version, done.live, done.changed, done.nbytes, done.pause) == (1, False, 0, 0, None)
        assert "memory://bucket did not take the weights in 0.2 s" in caplog.text
        assert "training goes on" in caplog.text
        assert "not live" not in "".join(r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    setattr(store, trouble, False)
    transfer._patience = 30.0
    step(tensors, 6)
    done = sync(transfer, tensors)
    assert done.live
    assert done.version in (2, 3)  # five syncs: together, or those of the outage before the last
    assert versions(store)[-1] == done.version
    holds(store, tensors)


def test_a_bucket_that_comes_back_while_a_sync_waits_is_no_trouble(opened: Opened) -> None:
    store, tensors = Attended(), model()
    transfer = begun(opened(store), tensors)
    store.away = True
    step(tensors, 1)
    back = threading.Timer(0.3, lambda: setattr(store, "away", False))
    back.start()
    done = sync(transfer, tensors)
    back.join()
    assert (done.version, done.live) == (1, True)
    holds(store, tensors)


def test_a_bucket_that_is_away_once_all_is_uploaded_costs_a_warning(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    class Going(Attended):
        leaves = False

        def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
            if prefix == REPLICAS and self.leaves:
                raise UnreachableError("away", url=self.url)
            return super().list(prefix, after)

    store, tensors = Going(), model()
    transfer = begun(opened(store), tensors)
    store.leaves, transfer._patience = True, 0.2
    step(tensors, 1)
    done = sync(transfer, tensors)
    assert (done.version, done.live) == (1, False)
    assert "version 1 is not live after 0.2 s: away" in caplog.text
    holds(store, tensors)


def unsent(opened: Opened) -> tuple[Attended, dict[str, Any], WeightcastTransfer]:
    """A bucket that is away, and what it was to get."""
    store, tensors = Attended(), model()
    transfer = begun(opened(store), tensors)
    transfer._patience = 0.1
    store.away = True
    step(tensors, 1)
    sync(transfer, tensors)
    return store, tensors, transfer


def test_the_end_sends_what_was_not_sent(opened: Opened) -> None:
    store, tensors, transfer = unsent(opened)
    store.away = False
    transfer.destroy()
    holds(store, tensors)


def test_the_end_says_what_could_not_be_sent_and_another_training_makes_it_good(opened: Opened) -> None:
    store, tensors, transfer = unsent(opened)
    with pytest.raises(StoreError, match="away"):
        transfer.destroy()
    transfer.destroy()
    store.away = False
    assert versions(store) == [0]
    begun(opened(store), tensors)
    assert versions(store) == [0, 1]
    holds(store, tensors)


# -- trainings, one behind the other -----------------------------------------------------------------------------------


def test_a_training_may_end_twice_and_another_may_begin() -> None:
    store, tensors = Attended(), model()
    transfer = WeightcastTransfer(store, threads=1)
    transfer.destroy()
    trainer = Trainer(transfer, lambda: tensors.items())
    for training in range(3):
        trainer.begin()
        step(tensors, training)
        done = trainer.sync()
        assert (done.version, done.live) == (training + 1, True)
        trainer.end()
        trainer.end()
        with pytest.raises(UsageError, match="init_weight_transfer"):
            trainer.sync()
        holds(store, tensors)
    assert versions(store) == [0, 1, 2, 3]


def test_no_thread_is_left_behind_by_a_training_that_ended(tmp_path: Path) -> None:
    weights = weights_of(SHAPES)
    before = set(threading.enumerate())
    transfer = WeightcastTransfer(
        Bucket(), engine=Local(weights), mirror=tmp_path / "mirror", dtype=None, patience=30.0, threads=2
    )
    begun(transfer, stream(weights))
    sync(transfer, stream(changed(weights, 0.05, 1)))
    transfer.destroy()
    assert set(threading.enumerate()) <= before


def test_a_training_that_begins_before_the_last_has_ended_publishes_its_own_weights(opened: Opened) -> None:
    store, tensors = Attended(), model()
    transfer = begun(opened(store), tensors)
    others = model(seed=5)
    begun(transfer, others)
    holds(store, others)
    step(others, 1)
    assert sync(transfer, others).version == 2
    holds(store, others)


def test_a_trainer_that_was_killed_is_followed_by_one_that_goes_on(opened: Opened) -> None:
    store, tensors, last = Attended(), model(), -1
    for life in range(4):
        transfer = begun(opened(store), tensors)  # the one before never ends, and never says anything again
        assert transfer.last is not None
        assert transfer.last.version >= last
        for number in range(2):
            step(tensors, 10 * life + number)
            done = sync(transfer, tensors)
            assert done.version > last
            last = done.version
        holds(store, tensors)
        if life % 2:
            step(tensors, 99 + life)  # trained on, and killed before it could say so
    assert versions(store) == list(range(last + 1))


def test_a_trainer_that_goes_on_from_an_older_checkpoint_publishes_that(opened: Opened) -> None:
    store, tensors = Attended(), model()
    transfer = begun(opened(store), tensors)
    older = {name: tensor.clone() for name, tensor in tensors.items()}
    step(tensors, 1)
    sync(transfer, tensors)
    done = begun(opened(store), older).last
    assert done is not None
    assert (done.version, done.live) == (2, True)
    holds(store, older)
