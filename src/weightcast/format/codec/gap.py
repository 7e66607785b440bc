"""`gap`: one band per block, so the reader needs old bits only where something changed."""

from __future__ import annotations

from weightcast.format.codec import blocks
from weightcast.format.codec.coded import Codec, Coded
from weightcast.format.codec.ranks import Ranks, one_band
from weightcast.format.patch import TensorPatch
from weightcast.format.tensors import Bits
from weightcast.format.workers import Workers


def encode(patch: TensorPatch, old: Bits | Ranks | None, workers: Workers) -> Coded:
    bits = None if isinstance(old, Ranks) else old
    return blocks.encode(patch, bits, one_band(patch.spec, patch.indices), workers)


GAP = Codec("gap", encode=encode, decode=blocks.decode)
