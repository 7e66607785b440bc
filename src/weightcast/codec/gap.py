"""`gap`: one band per block, so the reader needs old bits only where something changed."""

from __future__ import annotations

from weightcast.bits import Bits
from weightcast.codec import blocks
from weightcast.codec.coded import Codec, Coded
from weightcast.codec.ranks import Ranks, one_band
from weightcast.patch import TensorPatch
from weightcast.workers import Workers


def encode(patch: TensorPatch, old: Bits | Ranks | None, workers: Workers) -> Coded:
    bits = None if isinstance(old, Ranks) else old
    return blocks.encode(patch, bits, one_band(patch.spec, patch.indices), workers)


GAP = Codec("gap", encode=encode, decode=blocks.decode)
