"""Export and import again: the same bits, whatever the weights."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from cases import Bag, changes, write_folder
from hypothesis import given, settings
from importing import bring, manifests, write_out

from weightcast.format.digest import fingerprint


@pytest.mark.parametrize("layout", ["history", "slime"])
@settings(max_examples=12)
@given(pair=changes())
def test_weights_of_any_dtype_go_out_and_in_again(layout: str, pair: tuple[Bag, Bag]) -> None:
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        for step, weights in enumerate(pair):
            write_folder(root / f"run/checkpoint-{step}", weights, shards=1)
        bring(root / "channel", root / "run")
        options = {"checksum": "adler32"} if layout == "slime" else {}
        write_out(root / "channel", root / "out", layout, **options)
        bring(root / "again", root / "out")
        found = {step: manifest.position.digest for step, manifest in manifests(root / "again").items()}
        assert found == {step: fingerprint(weights).digest for step, weights in enumerate(pair)}
