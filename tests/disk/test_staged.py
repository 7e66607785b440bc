"""A staged patch: absolute bits in a file of their own, each tensor written to its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases import DENSITIES, PACKED_DTYPES, VALUE_DTYPES, Bag, gaussian, moved, random_bits

import weightcast as wc
from weightcast.disk.staged import Overlay, scatter_into, stage
from weightcast.errors import SpaceError, UsageError
from weightcast.format.patch import TensorPatch
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import BytesSource, FileSource
from weightcast.format.table import Row


def states(seed: int = 0) -> tuple[Bag, Bag]:
    """Two states of a model: each dtype at each density, and two tensors that threads write."""
    rng = np.random.default_rng(seed)
    old, new = {}, {}
    for dtype in VALUE_DTYPES + PACKED_DTYPES:
        for density in DENSITIES:
            spec = wc.TensorSpec(f"{dtype}.{density}", dtype, (96,))
            old[spec] = random_bits(rng, spec)
            new[spec] = moved(rng, old[spec], density)
    for density in (0.2, 0.6):
        spec = wc.TensorSpec(f"large.{density}", "BF16", (1 << 20,))
        old[spec] = gaussian(rng, 1 << 20)
        new[spec] = moved(rng, old[spec], density)
    return Bag(old), Bag(new)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("codec", ["banded", "gap", "plain"])
def test_staged_patch_has_the_bytes_of_a_plain_one(tmp_path: Path, codec: str, threads: int) -> None:
    old, new = states()
    patch, out = wc.diff(old, new), tmp_path / "staged"
    with wc.Workers(threads) as workers:
        reader = PatchReader(BytesSource(wc.encode(patch, codec, old)))
        reached = stage(reader, old, wc.fingerprint(old), out, workers)
    assert reached == wc.fingerprint(new)
    assert out.read_bytes() == wc.encode(patch, "plain", old)


def test_tensor_that_was_sent_whole_is_staged_whole(tmp_path: Path) -> None:
    """Its writer did not know the old bits; some of them, or all, are the same."""
    old, new = states()
    patch = wc.diff(old, new)
    tensors = [
        TensorPatch(spec, np.arange(spec.elements), new.read(spec.name), None, wc.fingerprint(new)[spec.name])
        for spec in new.table
    ]
    everything = wc.encode(replace(patch, tensors=tuple(tensors)), "plain")
    out, target = tmp_path / "staged", old.copy()
    stage(PatchReader(BytesSource(everything)), old, wc.fingerprint(old), out)
    with FileSource(out) as source:
        staged = PatchReader(source)
        over = Overlay(old, [staged])
        assert all(np.array_equal(over.read(spec.name), new.read(spec.name)) for spec in new.table)
        scatter_into(target, staged)
    assert wc.fingerprint(target) == wc.fingerprint(new)


def test_patch_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = states()
    reader = PatchReader(BytesSource(wc.encode(wc.diff(old, new), "banded", old)))

    def full(path: Path, nbytes: int) -> None:
        raise SpaceError(f"{nbytes} bytes are needed")

    monkeypatch.setattr("weightcast.disk.staged.require_space", full)
    with pytest.raises(SpaceError):
        stage(reader, old, wc.fingerprint(old), tmp_path / "staged")
    assert not list(tmp_path.iterdir())


def test_tensor_that_the_weights_do_not_have_is_refused_before_its_size_is_believed(tmp_path: Path) -> None:
    """It would need more than the disk has: then the disk would be blamed, and not the patch."""
    old, new = states()
    reader = PatchReader(BytesSource(wc.encode(wc.diff(old, new), "gap")))
    reader.rows += (Row(wc.TensorSpec("z", "F64", (1 << 20, 1 << 20)), 1 << 39, 7, ((0, 1),)),)
    with pytest.raises(UsageError, match="the weights do not have"):
        stage(reader, old, wc.fingerprint(old), tmp_path / "staged")
    assert not list(tmp_path.iterdir())
