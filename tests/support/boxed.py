"""Patches of boxes, cut as a test wants them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from weightcast.errors import UsageError
from weightcast.format.boxes import Box, Place, place_of
from weightcast.format.codec import check_codec
from weightcast.format.codec.coded import Parts
from weightcast.format.patch import Patch
from weightcast.format.patchfile import base_bits, encode_prepared
from weightcast.format.spec import TensorSpec
from weightcast.format.tensors import Weights
from weightcast.format.workers import ONE, Workers


def columns(spec: TensorSpec, parts: int) -> list[Place]:
    """A tensor's last dimension cut into so many boxes, or into as many as it has coordinates."""
    if parts < 1:
        raise UsageError(f"a tensor cannot be cut into {parts} boxes", tensor=spec.name)
    if len(spec.shape) < 2 or spec.kind.per_value < 8:
        return [place_of(spec, Box.of([0] * len(spec.shape), spec.shape))]
    *rows, width = spec.shape
    edges = [width * i // parts for i in range(parts + 1)]
    return [
        place_of(spec, Box.of([*[0] * len(rows), begin], [*rows, end - begin]))
        for begin, end in pairwise(edges)
        if end > begin
    ]


def encode_cut(
    patch: Patch,
    places: Mapping[str, Sequence[Place]],
    codec: str = "banded",
    old: Weights | None = None,
    workers: Workers = ONE,
) -> bytes:
    """`encode`, with some tensors cut into ``places`` that cover them; ``old`` is the base, which `banded` needs."""
    parts: dict[str, Parts] = {}
    for tensor in patch.tensors:
        cuts = places.get(tensor.spec.name) or columns(tensor.spec, 1)
        bits = None if old is None else base_bits(tensor, old)
        parts[tensor.spec.name] = Parts(
            tuple((place.box, None if bits is None else place.read(bits)) for place in cuts)
        )
    return encode_prepared(patch, check_codec(codec), parts, workers)
