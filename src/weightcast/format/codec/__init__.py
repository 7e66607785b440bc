"""Codecs: a tensor's patch as streams of bytes and back, by name."""

from collections.abc import Mapping
from typing import Literal, cast

from weightcast.errors import UsageError
from weightcast.format.codec import blocks, plain
from weightcast.format.codec.coded import Codec, Coded

CodecName = Literal["plain", "gap", "banded"]

CODECS: Mapping[str, Codec] = {
    "plain": Codec("plain", plain.encode, plain.decode),
    "gap": Codec("gap", blocks.encode_gap, blocks.decode),
    "banded": Codec("banded", blocks.encode_banded, blocks.decode),
}


def check_codec(name: str) -> CodecName:
    """The name of a codec; `UsageError` for anything else."""
    if name not in CODECS:
        raise UsageError(f"there is no codec {name!r}", hint=f"Choose one of {', '.join(map(repr, CODECS))}.")
    return cast(CodecName, name)


__all__ = ["CODECS", "Codec", "CodecName", "Coded", "check_codec"]
