"""Parameters that an engine repacks after loading are found again, element by element."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from cases import Bag
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from sharded_engine import model_of, stream  # noqa: E402

import weightcast as wc  # noqa: E402
from weightcast.engine.learn import learn  # noqa: E402
from weightcast.engine.live import LiveParameters  # noqa: E402
from weightcast.engine.packing import packing_of, probed, repacked  # noqa: E402
from weightcast.format.spec import TensorSpec, TensorTable  # noqa: E402


@given(
    rows=st.sampled_from([16, 32, 48]),
    columns=st.sampled_from([4, 8, 24]),
    group=st.sampled_from([1, 4, 16]),
    pair=st.sampled_from([1, 2]),
    first=st.integers(0, 8),
    count=st.integers(1, 8),
    turned=st.booleans(),
)
def test_packed_stack_is_read_through_its_layout(
    rows: int, columns: int, group: int, pair: int, first: int, count: int, turned: bool
) -> None:
    def pack(matrix: np.ndarray) -> np.ndarray:
        split = matrix.reshape(rows // group, group, columns // pair, pair)
        return np.ascontiguousarray(split.transpose(0, 2, 1, 3)).reshape(rows, columns)

    places = probed((rows, columns), pack)
    assert places is not None
    packing = packing_of(places)
    assert packing is not None
    shape = (columns, count) if turned else (count, columns)
    table = TensorTable.of([TensorSpec("a", "BF16", shape), TensorSpec("b", "BF16", shape)])
    model = model_of(p=torch.zeros(2, rows, columns, dtype=torch.bfloat16))

    def load(given: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in given:
            model.p.data[int(name == "b"), first : first + count].copy_(tensor.t() if turned else tensor)

    layout = repacked(learn(model, load, table), ["p"], packing)
    assert not layout.unknown
    rng = np.random.default_rng(0)
    weights = Bag({spec: rng.integers(0, 2**16, spec.elements, np.uint16) for spec in table})
    load(stream(weights))
    with torch.no_grad():
        for matrix in model.p:
            matrix.view(torch.int16).copy_(torch.from_numpy(pack(matrix.view(torch.int16).numpy())))
    live = LiveParameters(model, layout)
    for spec in table:
        assert sum(one.digest or 0 for one in live.digest(spec)) % 2**64 == wc.fingerprint(weights)[spec.name]


def test_kernel_that_computes_has_no_packing() -> None:
    assert probed((4, 4), lambda matrix: matrix * 0) is None
    rng = np.random.default_rng(0)
    assert packing_of(rng.permutation(64 * 64).reshape(64, 64)) is None
