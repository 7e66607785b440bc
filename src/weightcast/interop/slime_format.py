"""The layout of slime's delta sync over a shared disk: `weight_v000001/`, `weight_v000002/`, …

Read in THUDM/slime at 624b824a: the writer, `update_weight_from_disk_delta.py` below `slime/backends/megatron_utils`,
with `slime/utils/disk_delta.py`; and the receiver, a patch to SGLang, `docker/patch/latest/sglang-pull_weights.patch`.

- A version is a folder. It is a *delta* if the metadata of its `model.safetensors.index.json` has `delta_encoding`;
  any other is a whole checkpoint. Version 0 is the checkpoint that the engines start with, and is not in the folder.
- A delta has, for each tensor of which a byte changed, one U8 entry: a zstd frame of either all bytes, old xor new
  (`xor`), or of a count, the places of the changed *bytes*, and these bytes (`overwrite`; little-endian 32-bit words).
- The files' metadata has a checksum of each of these tensors as it is afterwards, all bytes: xxh3-128 by default,
  blake3 or adler32.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from weightcast.errors import FormatError, UsageError
from weightcast.interop.step import refuse_link

Encoding = Literal["xor", "overwrite"]
Checksum = Literal["xxh3-128", "blake3", "adler32"]
Octets = npt.NDArray[np.uint8]

_NAME = re.compile(r"weight_v([0-9]{6,12})")
_INSTALL = "Install it with `pip install 'weightcast[slime]'`."
_WORD = np.dtype("<u4")
_WINDOW = 1 << 27
"""The most memory that a zstd frame may ask for: its own high-compression modes ask for no more."""


def steps_in(folder: Path) -> dict[int, Path]:
    """The versions' folders, rising; `UsageError` for a version that is there twice."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        refuse_link(path)
        if int(match[1]) in found:
            raise UsageError(f"version {int(match[1])} is there twice", file=str(path), hint="Move one of them away.")
        found[int(match[1])] = path
    return dict(sorted(found.items()))


# -- deltas of a tensor ------------------------------------------------------------------------------------------------


def packed(old: Octets, new: Octets, encoding: Encoding) -> bytes | None:
    """What leads from the old bytes of a tensor to the new; None if they are the same."""
    changed = old != new
    if not changed.any():
        return None
    delta = old ^ new if encoding == "xor" else _overwrites(new, changed)
    made: bytes = library().ZstdCompressor(level=1).compress(delta.data)
    return made


def patched(old: Octets, delta: Octets, encoding: str) -> Octets:
    """The bytes of a tensor after a delta, in memory of their own; `FormatError` for one that does not fit."""
    new = old.copy()
    if encoding == "xor":
        changed = _unpacked(delta, new.nbytes)
        if changed.size != new.size:
            raise FormatError(f"xor of {changed.size} bytes for a tensor of {new.size}")
        new ^= changed
    else:
        _overwrite(new, _unpacked(delta, _WORD.itemsize * (1 + new.size) + new.size))
    return new


def _unpacked(delta: Octets, most: int) -> Octets:
    """What a zstd frame holds; `FormatError` for one that is damaged, or holds more than ``most`` bytes."""
    zstandard = library()
    out = np.empty(most + 1, np.uint8)
    done = 0
    try:
        with zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(delta.data) as reader:
            while done < out.size:
                got = reader.readinto(out[done:].data)
                if not got:
                    break
                done += got
    except zstandard.ZstdError as error:
        raise FormatError(f"the zstd frame cannot be read: {error}") from error
    if done > most:
        raise FormatError(f"the zstd frame holds more than the {most} bytes that it may")
    return out[:done]


def _overwrite(new: Octets, delta: Octets) -> None:
    size = _WORD.itemsize
    if delta.size < size:
        raise FormatError("an overwrite without a count")
    count = int(delta[:size].view(_WORD)[0])
    if delta.size != size + (size + 1) * count:
        raise FormatError(f"an overwrite of {delta.size} bytes cannot have {count} places")
    places = delta[size : size * (1 + count)].view(_WORD).astype(np.int64)
    if count and (int(places[-1]) >= new.size or not np.all(np.diff(places) > 0)):
        raise FormatError(f"places that are out of order, twice, or outside of {new.size} bytes")
    new[places] = delta[size * (1 + count) :]


def _overwrites(new: Octets, changed: npt.NDArray[np.bool_]) -> Octets:
    places = np.flatnonzero(changed)
    if new.size > np.iinfo(np.uint32).max:
        raise UsageError("slime's places have 32 bits, too few for a tensor", hint="Write xor instead.")
    count = np.array([places.size], _WORD)
    return np.concatenate([count.view(np.uint8), places.astype(_WORD).view(np.uint8), new[changed]])


# -- libraries that are imported where they are used -------------------------------------------------------------------


class Hash(Protocol):
    def update(self, data: Any, /) -> object: ...

    def hexdigest(self) -> str: ...


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any, /) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def new_hash(checksum: str) -> Hash:
    """An empty checksum; `UsageError` if its library is not installed."""
    made: Hash
    try:
        if checksum == "adler32":
            return _Adler32()
        if checksum == "blake3":
            import blake3

            made = blake3.blake3()
        else:
            import xxhash

            made = xxhash.xxh3_128()
    except ImportError as error:
        raise UsageError(f"checksums of {checksum} need a library that is not there", hint=_INSTALL) from error
    return made


def library() -> Any:
    """zstandard; `UsageError` if it is not installed."""
    try:
        import zstandard
    except ImportError as error:
        raise UsageError("slime's deltas need zstandard, which is not there", hint=_INSTALL) from error
    return zstandard
