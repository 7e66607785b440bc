"""`banded`: elements in bands of their old exponent, changes as ranks within a band.

Small weights change far more often than large ones, since the bf16 step shrinks with the weight and Adam's does not.
The reader holds the old weights, so it knows every element's exponent for nothing.
"""

from __future__ import annotations

from weightcast.bits import Bits
from weightcast.codec import blocks
from weightcast.codec.coded import Codec, Coded
from weightcast.patch import TensorPatch
from weightcast.workers import Workers


def encode(patch: TensorPatch, old: Bits | None, workers: Workers) -> Coded:
    return blocks.encode(patch, old, banded=True, workers=workers)


BANDED = Codec("banded", encode=encode, decode=blocks.decode)
