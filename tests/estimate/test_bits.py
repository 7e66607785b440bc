"""The model of bits per change: against recorded steps, and at its ends."""

from __future__ import annotations

import pytest
from codec_sizes import SHIPPED, after_step, load_trace

import weightcast as wc
from weightcast.estimate.bits import Training, bits_per_change

FP32, WIRE = SHIPPED / "fp32-master-lr1e-6", SHIPPED / "pure-bf16-lr1e-6"


def measured(trace: str, span: int, codec: wc.CodecName) -> tuple[float, float]:
    """Of patches over so many recorded steps each: the share of elements that changes, and bits per change."""
    before, steps = load_trace(SHIPPED / trace)
    states = [before]
    for step in steps:
        states.append(after_step(states[-1], step))
    pairs = [(states[i], states[i + span]) for i in range(0, len(states) - span, span)]
    changed = bits = 0
    for old, new in pairs:
        patch = wc.diff(old, new)
        changed += patch.changed
        bits += 8 * len(wc.encode(patch, codec, old))
    return changed / before.table.elements / len(pairs), bits / changed


@pytest.mark.parametrize("codec", ["plain", "gap", "banded"])
@pytest.mark.parametrize(
    ("trace", "training", "span"),
    [(FP32.name, "fp32", 1), (FP32.name, "fp32", 3), (FP32.name, "fp32", 6), (WIRE.name, "wire", 1)],
)
def test_bits_are_those_of_recorded_steps(trace: str, training: Training, span: int, codec: wc.CodecName) -> None:
    density, bits = measured(trace, span, codec)
    assert bits_per_change(codec, density, training) == pytest.approx(bits, rel=0.04)


def test_coded_form_is_never_larger_than_the_weights() -> None:
    for density in (1e-6, 0.01, 0.3, 0.99, 1.0):
        for codec in ("gap", "banded"):
            for training in ("fp32", "wire"):
                assert 0 < bits_per_change(codec, density, training) * density <= 16


def test_fewer_changes_cost_more_bits_each() -> None:
    for codec in ("gap", "banded"):
        bits = [bits_per_change(codec, density) for density in (0.0001, 0.001, 0.01, 0.1)]
        assert bits == sorted(bits, reverse=True)


def test_more_changes_cost_more_bytes() -> None:
    for codec in ("gap", "banded"):
        for training in ("fp32", "wire"):
            densities = (0.01, 0.1, 0.3, 0.6, 0.9)
            sizes = [density * bits_per_change(codec, density, training) for density in densities]
            assert sizes == sorted(sizes)


def test_plain_has_an_index_and_a_value() -> None:
    assert [bits_per_change("plain", 0.01, itemsize=size) for size in (1, 2, 4)] == [40, 48, 64]
