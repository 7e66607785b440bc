"""The first sync starts or continues a channel; bad streams and wrong addresses commit nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
from cases import Bag

torch = pytest.importorskip("torch")

from trl_transfer import (  # noqa: E402
    BF16,
    F16,
    F64,
    STRANGE_BF16,
    Attended,
    Bucket,
    Opened,
    Pairs,
    begun,
    holds,
    model,
    step,
    sync,
    versions,
    words,
)

import weightcast as wc  # noqa: E402
from weightcast.channel.chain import Chain  # noqa: E402
from weightcast.channel.keys import ANCHORS, CHANNEL, REPLICAS, Position  # noqa: E402
from weightcast.errors import (  # noqa: E402
    ConflictError,
    UnreachableError,
    UsageError,
    WeightcastError,
)
from weightcast.format.spec import TensorSpec, TensorTable  # noqa: E402
from weightcast.integrations.trl import WeightcastTransfer  # noqa: E402
from weightcast.store.memory import MemoryStore  # noqa: E402

# -- the first sync ----------------------------------------------------------------------------------------------------


def test_new_channel_starts_with_the_whole_model(opened: Opened) -> None:
    store, tensors = Attended(), model()
    transfer = opened(store)
    transfer.init_weight_transfer()
    assert store.keys() == set()
    done = sync(transfer, tensors)
    elements = sum(tensor.numel() for tensor in tensors.values())
    assert (done.version, done.changed, done.nbytes, done.broadcast) == (0, elements, 2 * elements, 4 * elements)
    assert versions(store) == [0]
    holds(store, tensors)


def test_channel_with_these_weights_gets_no_new_version(opened: Opened) -> None:
    store, tensors = Attended(), model()
    begun(opened(store), tensors).destroy()
    step(tensors, 1)
    begun(opened(store), tensors).destroy()
    done = begun(opened(store), tensors).last
    assert done is not None
    assert (done.version, done.changed, done.nbytes, done.live) == (1, 0, 0, True)
    assert versions(store) == [0, 1]


def test_channel_with_other_weights_gets_exactly_one_version(opened: Opened) -> None:
    store = Attended()
    begun(opened(store), model(seed=1)).destroy()
    tensors = model(seed=1)
    step(tensors, 1)
    done = begun(opened(store), tensors).last
    head = Chain.open(store).head()
    assert done is not None
    assert head is not None
    assert (done.version, done.changed, done.nbytes) == (1, head.changed, head.nbytes)
    assert versions(store) == [0, 1]
    holds(store, tensors)


def test_frozen_tensors_keep_the_bits_of_the_head(opened: Opened) -> None:
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


def test_tied_output_layer_stored_twice_follows_its_embedding(opened: Opened) -> None:
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


def test_frozen_untied_output_layer_stays_unchanged(opened: Opened) -> None:
    store, tensors = Attended(), model(BF16)
    frozen = {"lm_head.weight": tensors["embed.weight"] + 1}
    begun(opened(store), tensors | frozen).destroy()
    transfer = begun(opened(store), tensors)
    step(tensors, 1)
    sync(transfer, tensors)
    holds(store, tensors | frozen)


def test_tensor_unfrozen_later_is_published_from_then_on(opened: Opened) -> None:
    store, tensors = Attended(), model(BF16)
    begun(opened(store), tensors).destroy()
    some = {name: tensor for name, tensor in tensors.items() if "norm" not in name}
    transfer = begun(opened(store), some)
    step(tensors, 1)
    sync(transfer, tensors)
    holds(store, tensors)


def test_tensors_missing_from_a_new_channel_are_named(opened: Opened) -> None:
    store, tensors = Attended(), model(BF16)
    Chain.create(store, TensorTable.of(TensorSpec(name, "BF16", tuple(t.shape)) for name, t in tensors.items()))
    transfer = opened(store)
    transfer.init_weight_transfer()
    with pytest.raises(UsageError, match="weightcast init") as caught:
        sync(transfer, dict(islice(tensors.items(), 2)))
    assert caught.value.tensor == "layers.0.norm.weight"
    assert versions(store) == []
    sync(transfer, tensors)
    holds(store, tensors)


def test_patience_starts_after_the_first_upload(opened: Opened) -> None:
    """A whole model takes long, and its engine is live only when it is looked for the third time."""
    newest: list[Position] = []
    store = Bucket(newest.append)
    store.after("put", ANCHORS, lambda _: time.sleep(0.5))
    store.before(
        "list", lambda prefix: prefix == REPLICAS and bool(newest), lambda _: store.tell(newest[-1]), skip=2, times=1
    )
    done = begun(opened(store, patience=0.9), model()).last
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
        "channel has no such tensor.*pass the model",
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
    "nothing": (lambda tensors: [], UsageError, "sent no tensors", None),
}
EARLY = (
    lambda tensors: islice(tensors.items(), 2),
    UsageError,
    "did not send tensors.*norm.*restart",
    "layers.0.norm.weight",
)


@pytest.mark.parametrize("case", [*BAD, "early"])
def test_bad_stream_is_refused_without_a_commit_and_a_good_one_continues(case: str, opened: Opened) -> None:
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
def test_bad_first_stream_leaves_the_bucket_untouched_and_a_good_one_continues(
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


def test_tensor_missing_from_the_first_stream_is_refused_later(opened: Opened) -> None:
    store, tensors = Attended(), model()
    transfer = begun(opened(store), tensors)
    with pytest.raises(UsageError, match="did not send before") as caught:
        sync(transfer, tensors | {"new": torch.zeros(2)})
    assert caught.value.tensor == "new"
    assert versions(store) == [0]


def test_rounding_to_an_unsupported_dtype_is_refused(opened: Opened) -> None:
    store = Attended()
    spec = TensorSpec("w", "F8_E4M3", (4,))
    wc.init(store, Bag({spec: np.arange(4, dtype=np.uint8)}))
    transfer = opened(store)
    transfer.init_weight_transfer()
    with pytest.raises(UsageError, match="sent F32, the channel has F8_E4M3"):
        sync(transfer, {"w": torch.zeros(4)})
    assert versions(store) == [0]


def test_unknown_dtype_is_refused_for_a_new_channel(opened: Opened) -> None:
    store = Attended()
    transfer = opened(store)
    transfer.init_weight_transfer()
    with pytest.raises(UsageError, match=r"cannot hold torch\.complex128"):
        sync(transfer, {"w": torch.zeros(4, dtype=torch.complex128)})
    assert store.keys() == set()


def test_weights_before_init_are_refused(opened: Opened) -> None:
    transfer = opened(Attended())
    with pytest.raises(UsageError, match="init_weight_transfer was not called"):
        sync(transfer, model())
    transfer.destroy()


def test_wrong_address_or_dtype_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="Did you mean s3://"):
        WeightcastTransfer("s4://bucket/run")
    with pytest.raises(UsageError, match="float32 cannot be published as 'F64'"):
        WeightcastTransfer(MemoryStore(), dtype="F64")


def test_unreachable_bucket_at_the_start_is_an_error_at_once(opened: Opened) -> None:
    store = Bucket()
    store.fail()
    with pytest.raises(UnreachableError, match="no answer"):
        opened(store).init_weight_transfer()


def test_malformed_channel_is_refused_before_anything_is_computed(opened: Opened) -> None:
    store = Bucket()
    store.put(CHANNEL, b"{}")
    with pytest.raises(WeightcastError, match=CHANNEL):
        opened(store).init_weight_transfer()


def test_slower_of_two_trainers_gets_a_conflict_at_its_sync(opened: Opened) -> None:
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
