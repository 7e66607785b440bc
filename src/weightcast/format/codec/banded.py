"""`banded`: elements in bands of their old exponent, changes as ranks within a band.

Small weights change far more often than large ones, since the bf16 step shrinks with the weight and Adam's does not.
The reader holds the old weights, so it knows every element's exponent for nothing.
"""

from __future__ import annotations

from weightcast.errors import UsageError
from weightcast.format.codec import blocks
from weightcast.format.codec.coded import Codec, Coded
from weightcast.format.codec.ranks import Ranks, rank
from weightcast.format.patch import TensorPatch
from weightcast.format.tensors import Bits
from weightcast.format.workers import Workers


def encode(patch: TensorPatch, old: Bits | Ranks | None, workers: Workers) -> Coded:
    if isinstance(old, Ranks):
        return blocks.encode(patch, None, old, workers)
    if old is None:
        hint = "Pass `old`, or use `gap`."
        raise UsageError("`banded` needs the whole old tensor", tensor=patch.spec.name, hint=hint)
    if patch.old is None:
        raise UsageError("only `plain` can carry a patch whose old bits are not known", tensor=patch.spec.name)
    found = rank(patch.spec, patch.indices, patch.old, patch.new, lambda at, size: old[at : at + size], workers)
    return blocks.encode(patch, old, found, workers)


BANDED = Codec("banded", encode=encode, decode=blocks.decode)
