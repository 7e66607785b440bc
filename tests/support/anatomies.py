"""Successive states of weights for the tests of `weightcast analyze`, and the recorded training of benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from cases import Bag
from codec_sizes import SHIPPED
from hypothesis import strategies as st

import weightcast as wc
from weightcast.format.spec import DTYPES, TensorSpec

MASTERS, DIRECT = SHIPPED / "fp32-master-lr1e-6", SHIPPED / "pure-bf16-lr1e-6"


@st.composite
def runs(draw: st.DrawFn, dtypes: Sequence[str] = tuple(DTYPES)) -> list[Bag]:
    """States of a small model of any dtypes. Few bits are drawn, so that elements often return to earlier ones."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    specs = []
    for i in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(dtypes))
        shape = (draw(st.integers(0, 12)), 4)  # packed values fill whole bytes
        specs.append(TensorSpec(f"layer.{i}.w", dtype, shape))
    words = {spec: np.frombuffer(rng.bytes(4 * 8), spec.kind.word)[:4].copy() for spec in specs}
    state = {spec: rng.choice(words[spec], spec.elements) for spec in specs}
    states = [Bag(state)]
    for _ in range(draw(st.integers(1, 9))):
        density = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
        state = {
            spec: np.where(rng.random(bits.size) < density, rng.choice(words[spec], bits.size), bits)
            for spec, bits in state.items()
        }
        states.append(Bag(state))
    return states


def publish(url: Path, states: Sequence[wc.Arrays], codec: str = "banded") -> None:
    """A channel of these states; the first is version 0."""
    wc.init(url, states[0], step=0)
    with wc.Publisher(url, wc.Arrays.copy_of(states[0]), codec=codec, writer="trainer") as publisher:  # type: ignore[arg-type]
        for step, state in enumerate(states[1:], 1):
            publisher.publish(step, state).result(60)
