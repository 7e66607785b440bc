"""slime's folders: xor and overwrite in and out, and each lie that a version can tell."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from foreign import (
    State,
    content,
    read_slime,
    states,
    write_history,
    write_slime,
    write_slime_version,
)
from importing import bring, holds, manifests, refuses, write_out
from safetensors.numpy import save_file

from weightcast.errors import CheckpointError, FormatError, UsageError, VersionError, WeightcastError

ENCODINGS = ("xor", "overwrite")
EMBED = "model.embed.weight"
FILE, INDEX = "model-00000-of-00001.safetensors", "model.safetensors.index.json"


def steps(made: list[State]) -> dict[int, State]:
    return dict(enumerate(made))


def run(root: Path, made: list[State], encoding: str = "xor", checksum: str = "adler32") -> tuple[Path, Path]:
    """A folder of slime's, and the checkpoint that its engines start with."""
    folder = write_slime(root, made, encoding, checksum)
    return folder, folder.with_name(folder.name + "-base")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_version_becomes_one_with_its_digest(encoding: str, tmp_path: Path) -> None:
    made = states(5)
    made.insert(3, made[2])  # a version in which nothing changed
    bring(tmp_path / "channel", *run(tmp_path / "run", made, encoding))
    assert holds(tmp_path / "channel", steps(made))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_export_is_read_by_an_independent_reader_and_imported_to_the_same_weights(
    encoding: str, tmp_path: Path
) -> None:
    made = states(4, dtype=np.float32)
    made.insert(2, made[1])
    bring(tmp_path / "channel", write_history(tmp_path / "run", steps(made)))
    write_out(tmp_path / "channel", tmp_path / "out", "slime", encoding=encoding, checksum="adler32")
    assert read_slime(tmp_path / "out") == {version: content(state) for version, state in enumerate(made)}
    bring(tmp_path / "again", tmp_path / "out")
    assert holds(tmp_path / "again", steps(made))


def test_slimes_own_checksum_is_verified_and_written(tmp_path: Path) -> None:
    pytest.importorskip("xxhash")
    made = states(3)
    folder, base = run(tmp_path / "run", made, checksum="xxh3-128")
    bring(tmp_path / "channel", folder, base)
    assert holds(tmp_path / "channel", steps(made))
    write_out(tmp_path / "channel", tmp_path / "out", "slime")
    assert read_slime(tmp_path / "out") == {version: content(state) for version, state in enumerate(made)}


def test_scalars_and_empty_tensors_survive(tmp_path: Path) -> None:
    made = [{"a": np.float32(value), "b": np.zeros((0, 3), np.float32)} for value in (1, 2)]
    arrays = [{name: np.asarray(value) for name, value in state.items()} for state in made]
    bring(tmp_path / "channel", *run(tmp_path / "run", arrays))
    assert holds(tmp_path / "channel", steps(arrays))


def test_whole_checkpoint_in_the_chain_is_a_version_like_any_other(tmp_path: Path) -> None:
    made = states(5)
    folder, base = run(tmp_path / "run", made[:3])
    (folder / "weight_v000003").mkdir()
    save_file(made[3], folder / "weight_v000003/model.safetensors")
    write_slime_version(folder, 4, made[3], made[4])
    bring(tmp_path / "channel", folder, base)
    assert holds(tmp_path / "channel", steps(made))
    manifest = manifests(tmp_path / "channel")[3]
    assert manifest.base is not None  # deduplicated: a patch, though slime wrote all of it


def test_second_import_adds_what_is_new(tmp_path: Path) -> None:
    made = states(5)
    folder, base = run(tmp_path / "run", made[:3])
    bring(tmp_path / "channel", folder, base)
    for version in (3, 4):
        write_slime_version(folder, version, made[version - 1], made[version])
    assert [one.step for one in bring(tmp_path / "channel", folder, base) if one.new] == [3, 4]
    assert holds(tmp_path / "channel", steps(made))


# -- a base that is not there, or another ------------------------------------------------------------------------------


def test_delta_without_its_base_is_refused(tmp_path: Path) -> None:
    folder, base = run(tmp_path / "run", states(4))
    refuses(tmp_path / "channel", FormatError, "without its base.*weight_v000001.*--base CHECKPOINT", folder)
    shutil.rmtree(folder / "weight_v000002")
    refuses(tmp_path / "channel", FormatError, "no version 2.*weight_v000003", folder, base)
    shutil.rmtree(folder / "weight_v000001")
    refuses(tmp_path / "channel", FormatError, "no version 2.*weight_v000003", folder, base)


def test_base_that_is_not_the_one_is_refused_by_the_checksum(tmp_path: Path) -> None:
    made = states(3)
    folder, _ = run(tmp_path / "run", made)
    other = write_history(tmp_path / "other", {0: states(1, seed=5)[0]}) / "checkpoint-0"
    with pytest.raises(FormatError, match=r"do not have the checksum.*weight_v000001.*tensor model\.embed"):
        bring(tmp_path / "channel", folder, other)
    assert list(manifests(tmp_path / "channel")) == [0]


def test_base_beside_a_whole_first_version_is_refused(tmp_path: Path) -> None:
    made = states(2)
    folder, base = run(tmp_path / "run", made)
    shutil.copytree(base, folder / "weight_v000000")
    refuses(tmp_path / "channel", UsageError, "begins with a whole checkpoint.*Leave --base out", folder, base)
    bring(tmp_path / "channel", folder)
    assert holds(tmp_path / "channel", steps(made))


# -- lies in an index or a header, found before anything is written ----------------------------------------------------


def _index(key: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["metadata"][key] = value
        (folder / INDEX).write_text(json.dumps(index))

    return change


def _map(value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] = value
        (folder / INDEX).write_text(json.dumps(index))

    return change


def _rewritten(tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        save_file(tensors, folder / FILE, metadata)
        _map(dict.fromkeys(tensors, FILE))(folder)

    return change


BYTES = np.zeros(4, np.uint8)

LIES: dict[str, tuple[Callable[[Path], None], type[WeightcastError], str]] = {
    "version": (_index("version", "000009"), FormatError, "version is '000009' in the index, expected 000002"),
    "base": (_index("base_version", "000000"), FormatError, "base_version is '000000' in the index"),
    "no version": (_index("version", None), FormatError, "version is 'None'"),
    "encoding": (_index("delta_encoding", "add"), VersionError, "delta_encoding is 'add'.*reads xor, overwrite"),
    "compression": (_index("compression_format", "lz4"), VersionError, "compression_format is 'lz4'"),
    "checksum": (_index("checksum_format", "crc32"), VersionError, "checksum_format is 'crc32'"),
    "no map": (_map([]), FormatError, "no weight_map"),
    "map that leads out": (_map({EMBED: "../base/model.safetensors"}), CheckpointError, "points outside its folder"),
    "map of too little": (_map({EMBED: FILE}), FormatError, "the index and the file disagree"),
    "missing file": (lambda folder: (folder / FILE).unlink(), CheckpointError, "cannot open"),
    "unknown tensor": (_rewritten({"w": BYTES}, {"w": "0"}), FormatError, "no such tensor.*tensor w"),
    "dtype": (_rewritten({EMBED: np.zeros(2, "<u2")}, {EMBED: "0"}), FormatError, "a delta of U16, expected U8"),
    "no checksum": (_rewritten({EMBED: BYTES}, {"x": "0"}), FormatError, "a delta without a checksum"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lie_in_an_index_or_a_header_is_refused_before_anything_is_written(lie: str, tmp_path: Path) -> None:
    change, kind, match = LIES[lie]
    folder, base = run(tmp_path / "run", states(3))
    change(folder / "weight_v000002")
    refuses(tmp_path / "channel", kind, match, folder, base)


def test_version_of_another_model_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder, base = run(tmp_path / "run", states(2))
    (folder / "weight_v000002").mkdir()
    save_file({"w": np.zeros(3, np.float32)}, folder / "weight_v000002/model.safetensors")
    refuses(tmp_path / "channel", UsageError, "on one side only.*weight_v000002", folder, base)


# -- lies in the data, found at the version: it changes nothing --------------------------------------------------------


def frame(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


def places(*at: int, values: bytes = b"", count: int | None = None) -> bytes:
    head = np.uint32(len(at) if count is None else count).tobytes()
    return head + np.array(at, "<u4").tobytes() + values


SIZE = 40 * 16 * 2
DELTAS: dict[str, tuple[str, bytes, str]] = {
    "short xor": ("xor", frame(bytes(SIZE - 1)), f"xor of {SIZE - 1} bytes for a tensor of {SIZE}"),
    "long xor": ("xor", frame(bytes(SIZE + 1)), f"more than the {SIZE} bytes"),
    "a bomb": ("xor", frame(bytes(1 << 24)), f"more than the {SIZE} bytes"),
    "a window": ("xor", frame(bytes(9), compression_params=zstandard.ZstdCompressionParameters(window_log=30)), ""),
    "not zstd": ("xor", b"not a frame", "the zstd frame cannot be read"),
    "cut frame": ("xor", frame(np.random.default_rng(0).bytes(SIZE))[:-9], ""),
    "other bits": ("xor", frame(b"\1" + bytes(SIZE - 1)), "do not have the checksum"),
    "out of range": ("overwrite", frame(places(SIZE, values=b"x")), "outside of"),
    "twice": ("overwrite", frame(places(3, 3, values=b"xy")), "twice"),
    "out of order": ("overwrite", frame(places(5, 3, values=b"xy")), "out of order"),
    "too few values": ("overwrite", frame(places(3, 5, values=b"x")), "cannot have 2 places"),
    "a false count": ("overwrite", frame(places(3, values=b"x", count=1 << 31)), "cannot have 2147483648 places"),
    "no count": ("overwrite", frame(b"\1"), "without a count"),
}


@pytest.mark.parametrize("lie", DELTAS)
def test_lie_in_a_delta_is_refused_and_leaves_the_versions_before(lie: str, tmp_path: Path) -> None:
    encoding, data, match = DELTAS[lie]
    made = states(3)
    folder, base = run(tmp_path / "run", made[:2], encoding)
    bring(tmp_path / "channel", folder, base)
    version = write_slime_version(folder, 2, made[1], made[2], encoding)
    _rewritten({EMBED: np.frombuffer(data, np.uint8)}, {EMBED: "00000001"})(version)
    refuses(tmp_path / "channel", FormatError, match + ".*weight_v000002.*tensor model.embed", folder, base)
    assert holds(tmp_path / "channel", steps(made[:2]))


def test_library_that_is_not_there_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, base = run(tmp_path / "run", states(2))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    refuses(tmp_path / "channel", UsageError, r"zstandard, which is not there.*weightcast\[slime\]", folder, base)
