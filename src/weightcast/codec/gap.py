"""`gap`: one band per block, so the reader needs old bits only where something changed."""

from __future__ import annotations

from weightcast.bits import Bits
from weightcast.codec import blocks
from weightcast.codec.coded import Codec, Coded
from weightcast.patch import TensorPatch
from weightcast.workers import Workers


def encode(patch: TensorPatch, old: Bits | None, workers: Workers) -> Coded:
    return blocks.encode(patch, old, banded=False, workers=workers)


GAP = Codec("gap", encode=encode, decode=blocks.decode)
