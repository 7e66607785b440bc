"""Codecs: a tensor's patch as streams of bytes and back, by name."""

from collections.abc import Mapping

from weightcast.codec.banded import BANDED
from weightcast.codec.coded import Codec, Coded
from weightcast.codec.gap import GAP
from weightcast.codec.plain import PLAIN

CODECS: Mapping[str, Codec] = {codec.name: codec for codec in (PLAIN, GAP, BANDED)}

__all__ = ["CODECS", "Codec", "Coded"]
