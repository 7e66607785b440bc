"""One test per lie that files and folders of weights can tell, and redo files beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from cases import write_file, write_folder
from liars import World, bounded, sample, tree
from surgery import (
    Parts,
    Stream,
    opened,
    sealed,
    with_column,
)

from weightcast import Checkpoint
from weightcast.disk.apply import apply_in_place, resume
from weightcast.disk.checkpoint import INDEX, SINGLE, redo_path
from weightcast.errors import (
    CheckpointError,
    FormatError,
    WeightcastError,
)

E = TypeVar("E", bound=WeightcastError)


@dataclass
class Shards:
    """A checkpoint folder of two files, and a patch that leads on from it."""

    folder: Path
    patch: Path

    def file(self, i: int) -> Path:
        return sorted(self.folder.glob("*.safetensors"))[i]

    def edit_index(self, change: Callable[[dict[str, Any]], Any]) -> None:
        index = json.loads((self.folder / INDEX).read_text())
        change(index["weight_map"])
        (self.folder / INDEX).write_text(json.dumps(index))

    def refuses(self, kind: type[E], says: str) -> E:
        """Neither reading nor applying takes it, and nothing in it or beside it is touched."""
        before = tree(self.folder.parent)
        for action in (lambda: Checkpoint(self.folder).close(), lambda: apply_in_place(self.patch, self.folder)):
            with pytest.raises(kind, match=says) as caught:
                action()
            assert type(caught.value) is kind
            assert tree(self.folder.parent) == before
        return caught.value


@pytest.fixture
def shards(world: World, tmp_path: Path) -> Shards:
    write_folder(tmp_path / "shards", world.old)
    world.file.write_bytes(world.patch())
    return Shards(tmp_path / "shards", world.file)


def test_honest_folder_is_accepted(shards: Shards, world: World) -> None:
    assert apply_in_place(shards.patch, shards.folder).digest == world.reached.digest


@pytest.mark.parametrize("place", ["../x.safetensors", "/tmp/x.safetensors", "sub/x.safetensors", "..", ".", "./x"])
def test_index_points_outside_its_folder(shards: Shards, place: str) -> None:
    """A readable file waits there, so that nothing but the rule keeps it from being read."""
    (shards.folder / "sub").mkdir()
    for waiting in (shards.folder.parent / "x.safetensors", shards.folder / "sub" / "x.safetensors"):
        waiting.write_bytes(shards.file(0).read_bytes())
    shards.edit_index(lambda weight_map: weight_map.update(a=place))
    error = shards.refuses(CheckpointError, "the index points outside its folder")
    assert (error.tensor, error.file) == ("a", str(shards.folder / INDEX))


@pytest.mark.parametrize("place", [7, None, ["x"], {"file": "x"}])
def test_index_points_to_an_impossible_file_name(shards: Shards, place: Any) -> None:
    shards.edit_index(lambda weight_map: weight_map.update(a=place))
    assert shards.refuses(CheckpointError, "the index points").tensor == "a"


UNUSABLE = {"empty": "", "nul": "x\0y", "long": "x" * 300}


@pytest.mark.parametrize("place", UNUSABLE.values(), ids=UNUSABLE)
def test_index_names_a_file_that_cannot_be(shards: Shards, place: str) -> None:
    shards.edit_index(lambda weight_map: weight_map.update(a=place))
    shards.refuses(CheckpointError, "the index points|cannot open|not a regular file")


def test_index_with_half_a_character(shards: Shards) -> None:
    for change in ({"a": "\ud800"}, {"\ud800": "x"}):
        shards.edit_index(lambda weight_map, change=change: weight_map.update(change))
        assert shards.refuses(FormatError, "half a surrogate pair").file == str(shards.folder / INDEX)


def test_index_names_a_missing_file(shards: Shards) -> None:
    gone = shards.file(1)
    gone.unlink()
    assert shards.refuses(CheckpointError, "cannot open: No such file").file == str(gone)


def test_symlink_where_a_tensor_file_should_be(shards: Shards) -> None:
    file = shards.file(0)
    moved_to = file.rename(shards.folder.parent / "elsewhere")
    file.symlink_to(moved_to)
    error = shards.refuses(CheckpointError, "expected a file, found a symbolic link")
    assert error.file == str(file)
    assert error.hint


def test_symlink_to_nowhere(shards: Shards) -> None:
    file = shards.file(0)
    file.unlink()
    file.symlink_to("nowhere")
    assert shards.refuses(CheckpointError, "a symbolic link").file == str(file)


@pytest.mark.timeout(60)
def test_fifo_where_a_tensor_file_should_be(shards: Shards) -> None:
    file = shards.file(0)
    file.unlink()
    os.mkfifo(file)
    assert shards.refuses(CheckpointError, "not a regular file").file == str(file)


@pytest.mark.timeout(60)
def test_fifo_where_the_index_should_be(shards: Shards) -> None:
    (shards.folder / INDEX).unlink()
    os.mkfifo(shards.folder / INDEX)
    assert shards.refuses(CheckpointError, "not a regular file").file == str(shards.folder / INDEX)


@pytest.mark.timeout(60)
def test_fifo_where_a_patch_should_be(world: World) -> None:
    before = tree(world.home)
    os.mkfifo(world.file)
    with pytest.raises(CheckpointError, match="not a regular file") as caught:
        apply_in_place(world.file, world.target)
    assert caught.value.file == str(world.file)
    assert tree(world.home) == before


def test_device_where_a_patch_should_be(world: World) -> None:
    with pytest.raises(CheckpointError, match="not a regular file"):
        apply_in_place(Path("/dev/zero"), world.target)


def test_directory_where_a_tensor_file_should_be(shards: Shards) -> None:
    file = shards.file(0)
    file.unlink()
    file.mkdir()
    assert shards.refuses(CheckpointError, "not a regular file|Is a directory").file == str(file)


def test_index_and_file_disagree(shards: Shards) -> None:
    shards.edit_index(lambda weight_map: weight_map.update(c=weight_map["a"]))
    error = shards.refuses(CheckpointError, "the index and the file disagree")
    assert (error.tensor, error.file) == ("c", str(shards.file(0)))


def test_file_holds_a_tensor_missing_from_the_index(shards: Shards) -> None:
    rest = [spec for spec in sample()[0].table if spec.name == "b"]
    write_file(shards.file(0), sample()[0])
    error = shards.refuses(CheckpointError, "the index and the file disagree")
    assert (error.tensor, error.file) == (rest[0].name, str(shards.file(0)))


def test_tensor_in_two_files(shards: Shards) -> None:
    (shards.folder / INDEX).unlink()
    write_file(shards.file(1), sample()[0])
    error = shards.refuses(CheckpointError, "a tensor is in .* too")
    assert (error.tensor, error.file) == ("a", str(shards.file(1)))


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b'{"weight_map": {"a": "x", "a": "y"}}', b"[" * 200_000])
def test_index_not_json(shards: Shards, text: bytes) -> None:
    (shards.folder / INDEX).write_bytes(text)
    error = shards.refuses(FormatError, "the index is not JSON|the index has a duplicate key")
    assert error.file == str(shards.folder / INDEX)


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"weight_map": null}', '{"weight_map": ["a"]}'])
def test_no_weight_map(shards: Shards, text: str) -> None:
    (shards.folder / INDEX).write_text(text)
    assert shards.refuses(FormatError, "the index has no weight_map").file == str(shards.folder / INDEX)


def test_oversized_index(shards: Shards) -> None:
    with (shards.folder / INDEX).open("r+b") as index:
        index.truncate(100_000_001)
    with pytest.raises(FormatError, match="over the limit") as caught:
        Checkpoint(shards.folder)
    assert caught.value.file == str(shards.folder / INDEX)


def test_empty_folder(shards: Shards) -> None:
    for path in shards.folder.iterdir():
        path.unlink()
    error = shards.refuses(CheckpointError, "the folder has no safetensors files")
    assert error.file == str(shards.folder)
    assert SINGLE in (error.hint or "")


def test_no_such_folder(shards: Shards) -> None:
    gone = Shards(shards.folder / "gone", shards.patch)
    assert gone.refuses(CheckpointError, "no such file or folder").file == str(gone.folder)


@pytest.mark.parametrize("cut", [0, 7, 8, 50, -1])
def test_truncated_tensor_file(shards: Shards, cut: int) -> None:
    file = shards.file(1)
    file.write_bytes(file.read_bytes()[:cut])
    error = shards.refuses(FormatError, "too short|ends within its header|its header describes")
    assert error.file == str(file)


def test_tensor_name_with_half_a_character(world: World) -> None:
    header, data = opened(world.target.read_bytes())
    header["\ud800"] = header.pop("b")
    world.target.write_bytes(sealed(header, data))
    with pytest.raises(WeightcastError):
        Checkpoint(world.target)


# -- redo files: they lie beside the weights, and may have come with them ----------------------------------------------


@pytest.mark.parametrize(
    ("column", "row", "value"),
    [("names", 1, (0, b"c")), ("dtypes", 1, 16), ("sizes", 2, 1 << 40)],
    ids=["name", "dtype", "shape"],
)
def test_redo_file_of_another_model(world: World, column: str, row: int, value: Any) -> None:
    """The last index is at home in the tensor that the redo file speaks of, and far outside the one that is there."""
    lie = with_column(world.patch("plain"), column, row, value)
    name, dtype = ("c" if column == "names" else "b"), ("U32" if column == "dtypes" else "F32")
    parts = Parts.of(lie)
    values, indices = parts.entries.pop("b.values"), parts.entries.pop("b.indices")
    wide = np.frombuffer(indices.data, np.int32).astype(np.int64)
    if column == "sizes":
        wide[-1] = value - 1
    parts.entries[f"{name}.values"] = values._replace(dtype=dtype)
    parts.entries[f"{name}.indices"] = Stream("I64", indices.shape, wide.tobytes())
    redo_path(world.target).write_bytes(parts.joined())
    before = tree(world.home)
    ((kind, _text),) = bounded(world.target)
    assert tree(world.home) == before
    assert kind in ("FormatError", "CheckpointError", "UsageError", "ResultError")


def test_redo_file_cut_off(world: World) -> None:
    honest = world.patch("plain")
    redo_path(world.target).write_bytes(honest[:-1])
    before = tree(world.home)
    with pytest.raises(FormatError, match="bytes of data, its header describes"):
        resume(world.target)
    assert tree(world.home) == before
