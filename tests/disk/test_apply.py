"""Patches between files and folders; in place, killed at every step, and completed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from cases import Bag, gaussian, moved, random_bits, same_bits, write_file, write_folder

import weightcast as wc
from weightcast.disk.apply import Applied, apply_in_place, apply_to_copy, resume, write_patch
from weightcast.disk.checkpoint import redo_path
from weightcast.errors import BaseError, CheckpointError, InterruptedApplyError, ResultError, UsageError


def model(size: int, seed: int = 0) -> tuple[Bag, Bag]:
    """Two states of a model of several dtypes, with an odd-sized tensor that leaves the next ones unaligned."""
    rng = np.random.default_rng(seed)
    old = {
        wc.TensorSpec("a.bytes", "U8", (7,)): random_bits(rng, wc.TensorSpec("", "U8", (7,))),
        wc.TensorSpec("b.weight", "BF16", (size,)): gaussian(rng, size),
        wc.TensorSpec("c.empty", "F32", (0,)): np.empty(0, np.uint32),
        wc.TensorSpec("d.scalar", "F32", ()): np.array([1], np.uint32),
        wc.TensorSpec("e.weight", "BF16", (2, size)): gaussian(rng, 2 * size),
        wc.TensorSpec("f.master", "F32", (size,)): random_bits(rng, wc.TensorSpec("", "F32", (size,))),
        wc.TensorSpec("g.frozen", "BF16", (50,)): gaussian(rng, 50),
    }
    density = {"b.weight": 0.01, "d.scalar": 1.0, "e.weight": 0.02, "f.master": 0.9}
    new = {spec: moved(rng, bits, density.get(spec.name, 0.0)) for spec, bits in old.items()}
    return Bag(old), Bag(new)


@dataclass(frozen=True)
class Case:
    """A target on disk at the old state, a patch to the new one, and both states."""

    target: Path
    patch: Path
    old: Bag
    new: Bag

    def holds(self, state: Bag) -> bool:
        with wc.Checkpoint(self.target, interrupted=True) as weights:
            return same_bits(weights, state)


def make_case(folder: Path, sharded: bool, size: int = 3000, codec: str = "banded") -> Case:
    old, new = model(size)
    write = write_folder if sharded else write_file
    for name, state in (("target", old), ("new", new)):
        write(folder / name, state)
    with wc.Checkpoint(folder / "target") as before, wc.Checkpoint(folder / "new") as after:
        write_patch(before, after, folder / "patch", codec)
    return Case(folder / "target", folder / "patch", old, new)


shapes = pytest.mark.parametrize("sharded", [False, True], ids=["file", "folder"])


@shapes
@pytest.mark.parametrize("codec", ["plain", "gap", "banded"])
def test_apply_in_place_gives_the_new_bits(tmp_path: Path, sharded: bool, codec: str) -> None:
    case = make_case(tmp_path, sharded, codec=codec)
    done = apply_in_place(case.patch, case.target)
    assert case.holds(case.new)
    assert done == Applied(wc.fingerprint(case.new).digest, changed=True)
    assert not redo_path(case.target).exists()
    assert apply_in_place(case.patch, case.target) == Applied(done.digest, changed=False)


@shapes
def test_apply_to_a_copy_gives_the_new_bits(tmp_path: Path, sharded: bool) -> None:
    case = make_case(tmp_path, sharded)
    apply_to_copy(case.patch, case.target, tmp_path / "out")
    assert case.holds(case.old)
    with wc.Checkpoint(tmp_path / "out") as out:
        assert same_bits(out, case.new)
    if sharded:
        assert (tmp_path / "out" / "config.json").read_text() == '{"model_type": "test"}'
    with pytest.raises(UsageError, match="exists already"):
        apply_to_copy(case.patch, case.target, tmp_path / "out")


@shapes
def test_written_files_are_read_by_safetensors(tmp_path: Path, sharded: bool) -> None:
    from safetensors import safe_open

    case = make_case(tmp_path, sharded)
    apply_in_place(case.patch, case.target)
    files = sorted(case.target.glob("*.safetensors")) if sharded else [case.target]
    names = set()
    for file in files:
        with safe_open(file, "np") as opened:
            names |= set(opened.keys())
    assert names == {spec.name for spec in case.new.table}


@shapes
def test_wrong_base_is_refused_before_a_byte_is_touched(tmp_path: Path, sharded: bool) -> None:
    case = make_case(tmp_path, sharded)
    other = tmp_path / "other"
    (write_folder if sharded else write_file)(other, model(3000, seed=1)[0])
    before = {path: path.read_bytes() for path in sorted(other.rglob("*"))} if sharded else other.read_bytes()
    with pytest.raises(BaseError):
        apply_in_place(case.patch, other)
    assert before == ({path: path.read_bytes() for path in sorted(other.rglob("*"))} if sharded else other.read_bytes())
    with pytest.raises(BaseError):
        apply_to_copy(case.patch, other, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "other", "patch", "target"]


def test_folder_of_one_file_or_of_loose_files_is_patched(tmp_path: Path) -> None:
    old, _ = model(100)
    (tmp_path / "single").mkdir()
    write_file(tmp_path / "single" / "model.safetensors", old)
    (tmp_path / "loose").mkdir()
    names = [spec.name for spec in old.table]
    write_file(tmp_path / "loose" / "one.safetensors", old, names[:3])
    write_file(tmp_path / "loose" / "two.safetensors", old, names[3:])
    for folder in ("single", "loose"):
        with wc.Checkpoint(tmp_path / folder) as weights:
            assert same_bits(weights, old)


# -- killed ----------------------------------------------------------------------------------------------------------


def run_and_die(work: Callable[[], object], before_start: Callable[[], None] = lambda: None) -> int:
    """Run ``work`` in a process of its own; returns the signal that ended it, 0 if none did."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            before_start()
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


class DieAt:
    """SIGKILL the own process in the n-th of the calls that touch the disk; a write is left half done."""

    def __init__(self, n: int):
        self.left = n

    def install(self) -> None:
        pwrite = os.pwrite

        def half_pwrite(fd: int, data: memoryview, at: int) -> int:
            if self.is_last():
                pwrite(fd, data[: len(data) // 2], at)
                os.kill(os.getpid(), signal.SIGKILL)
            return pwrite(fd, data, at)

        os.pwrite = half_pwrite
        for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "unlink")):
            setattr(owner, name, self.deadly(getattr(owner, name)))

    def deadly(self, call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **options: object) -> object:
            if self.is_last():
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return wrapped

    def is_last(self) -> bool:
        self.left -= 1
        return self.left == 0


@shapes
def test_apply_killed_at_every_step_completes_when_repeated(tmp_path: Path, sharded: bool) -> None:
    steps, half_changed, killed = 0, 0, signal.SIGKILL
    while killed:
        steps += 1
        folder = tmp_path / str(steps)
        folder.mkdir()
        case = make_case(folder, sharded)
        killed = run_and_die(lambda c=case: apply_in_place(c.patch, c.target), DieAt(steps).install)
        if redo_path(case.target).exists():
            half_changed += not case.holds(case.old) and not case.holds(case.new)
            with pytest.raises(InterruptedApplyError, match="half changed"):
                wc.Checkpoint(case.target)
        else:
            assert case.holds(case.new) or case.holds(case.old)
        apply_in_place(case.patch, case.target)
        assert case.holds(case.new)
        assert not list(case.target.parent.glob("**/*redo*"))
    assert steps > 10
    assert half_changed > 2


def test_apply_killed_twice_during_recovery_completes(tmp_path: Path) -> None:
    case = make_case(tmp_path, sharded=True)
    for n in (9, 5, 4):
        run_and_die(lambda: apply_in_place(case.patch, case.target), DieAt(n).install)
    apply_in_place(case.patch, case.target)
    assert case.holds(case.new)


def test_apply_killed_at_random_moments_completes_when_repeated(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    begin = time.perf_counter()
    first = make_case(tmp_path, sharded=True, size=400_000)
    apply_in_place(first.patch, first.target)
    longest = time.perf_counter() - begin
    for i in range(20):
        folder = tmp_path / str(i)
        folder.mkdir()
        case = make_case(folder, sharded=True, size=400_000)
        child = os.fork()
        if child == 0:
            try:
                apply_in_place(case.patch, case.target)
            finally:
                os._exit(0)
        time.sleep(rng.uniform(0, longest / 2))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        apply_in_place(case.patch, case.target)
        assert case.holds(case.new)


def test_resume_completes_what_was_interrupted_without_the_patch(tmp_path: Path) -> None:
    case = make_case(tmp_path, sharded=False)
    assert resume(case.target) is None
    n = 1
    while not redo_path(case.target).exists():
        run_and_die(lambda: apply_in_place(case.patch, case.target), DieAt(n).install)
        n += 1
    case.patch.unlink()
    assert resume(case.target) == Applied(wc.fingerprint(case.new).digest, changed=True)
    assert case.holds(case.new)


def test_target_edited_while_interrupted_is_noticed(tmp_path: Path) -> None:
    case = make_case(tmp_path, sharded=False)
    n = 1
    while not redo_path(case.target).exists():
        run_and_die(lambda: apply_in_place(case.patch, case.target), DieAt(n).install)
        n += 1
    with wc.Checkpoint(case.target, writable=True, interrupted=True) as weights:
        weights.write("g.frozen", weights.read("g.frozen") ^ np.uint16(1))
    with pytest.raises(ResultError, match="something else changed the target"):
        resume(case.target)


def test_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(tmp_path, sharded=False)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        apply_in_place(case.patch, case.target)
    assert case.holds(case.old)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "patch", "target"]


def test_second_writer_at_once_is_refused(tmp_path: Path) -> None:
    case = make_case(tmp_path, sharded=True)
    with (
        wc.Checkpoint(case.target, writable=True),
        pytest.raises(CheckpointError, match="another process is writing"),
    ):
        apply_in_place(case.patch, case.target)
    assert case.holds(case.old)
    apply_in_place(case.patch, case.target)
    assert case.holds(case.new)


def test_folder_and_a_file_in_it_are_the_same_weights(tmp_path: Path) -> None:
    """An apply interrupted under one name is found under the other."""
    case = make_case(tmp_path, sharded=False)
    folder = tmp_path / "folder"
    folder.mkdir()
    inside = folder / "model.safetensors"
    case.target.rename(inside)
    for target, other in ((folder, inside), (inside, folder)):
        apply_once = Case(target, case.patch, case.old, case.new)
        n = 1
        while not redo_path(target).exists():
            run_and_die(lambda t=target: apply_in_place(case.patch, t), DieAt(n).install)
            n += 1
        for action in (lambda o=other: wc.Checkpoint(o), lambda o=other: apply_in_place(case.patch, o)):
            with pytest.raises(InterruptedApplyError, match=f"--resume {target}`"):
                action()
        resume(target)
        assert apply_once.holds(case.new)
        with wc.Checkpoint(target, writable=True) as weights:
            for spec in case.old.table:
                weights.write(spec.name, case.old.read(spec.name))


def test_copy_inside_its_original_is_refused(tmp_path: Path) -> None:
    case = make_case(tmp_path, sharded=True)
    with pytest.raises(UsageError, match="inside the target"):
        apply_to_copy(case.patch, case.target, case.target / "copy")
    assert not (case.target / "copy").exists()


def test_copy_keeps_permissions_and_can_be_made_of_what_is_read_only(tmp_path: Path) -> None:
    case = make_case(tmp_path, sharded=False)
    case.target.chmod(0o400)
    apply_to_copy(case.patch, case.target, tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o600


def test_impossible_outputs_are_refused_before_any_work(tmp_path: Path) -> None:
    case = make_case(tmp_path, sharded=False)
    with pytest.raises(UsageError, match="folder does not exist"):
        apply_to_copy(case.patch, case.target, tmp_path / "no" / "out")
    for out in (tmp_path, tmp_path / "no" / "patch"):
        with pytest.raises(UsageError, match="cannot write a patch there"):
            write_patch(case.old, case.new, out)


def test_errors_of_apply_name_the_target(tmp_path: Path) -> None:
    case = make_case(tmp_path, sharded=False)
    write_file(tmp_path / "other", model(3000, seed=1)[0])
    with pytest.raises(BaseError) as error:
        apply_in_place(case.patch, tmp_path / "other")
    assert error.value.file == str(tmp_path / "other")


def test_refused_writer_leaves_the_files_of_the_running_one(tmp_path: Path) -> None:
    case = make_case(tmp_path, sharded=True)
    redo = redo_path(case.target)
    unfinished = redo.with_name(f"{redo.name}.12345.partial")
    unfinished.write_bytes(b"half a redo file")
    with wc.Checkpoint(case.target, writable=True):
        for action in (lambda: apply_in_place(case.patch, case.target), lambda: resume(case.target)):
            with pytest.raises(CheckpointError, match="another process is writing"):
                action()
        assert unfinished.exists()
    apply_in_place(case.patch, case.target)
    assert not unfinished.exists()


def test_files_are_synced_before_what_relies_on_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut keeps only what was synced: the redo file before the target is touched, the target before it goes."""
    case = make_case(tmp_path, sharded=False)
    done: list[str] = []

    def note(owner: object, call: str, describe: Callable[..., str]) -> None:
        real = getattr(owner, call)

        def noted(*args: object, **options: object) -> object:
            done.append(f"{call} {describe(*args)}")
            return real(*args, **options)

        monkeypatch.setattr(owner, call, noted)

    def opened(fd: int, *rest: object) -> str:
        return Path(f"/proc/self/fd/{fd}").readlink().name

    note(os, "fsync", opened)
    note(os, "pwrite", opened)
    note(Path, "replace", lambda path, to: Path(to).name)
    note(Path, "unlink", lambda path: path.name)
    apply_in_place(case.patch, case.target)
    redo, target, folder = redo_path(case.target).name, case.target.name, tmp_path.name
    steps = [
        step for i, step in enumerate(done) if "partial" not in step or step.startswith("fsync") if step not in done[:i]
    ]
    assert steps == [
        f"fsync {redo}.{os.getpid()}.partial",
        f"replace {redo}",
        f"fsync {folder}",
        f"pwrite {target}",
        f"fsync {target}",
        f"unlink {redo}",
    ]
    assert done[-1] == f"fsync {folder}"


# -- files that others share or write ----------------------------------------------------------------------------------


def linked(case: Case, copy: Path) -> Case:
    """The same case with a target made by `cp -al`."""
    if case.target.is_dir():
        copy.mkdir()
        for path in case.target.iterdir():
            os.link(path, copy / path.name)
    else:
        os.link(case.target, copy)
    return Case(copy, case.patch, case.old, case.new)


@shapes
def test_target_made_of_hard_links_leaves_the_original_unchanged(tmp_path: Path, sharded: bool) -> None:
    original = make_case(tmp_path, sharded)
    copy = linked(original, tmp_path / "copy")
    assert apply_in_place(copy.patch, copy.target).changed
    assert copy.holds(copy.new)
    assert original.holds(original.old)
    assert not list(tmp_path.glob("**/.*"))


def test_wrong_base_copies_nothing(tmp_path: Path) -> None:
    case = make_case(tmp_path, sharded=False)
    with wc.Checkpoint(case.target, writable=True) as weights:
        weights.write("b.weight", weights.read("b.weight") ^ np.uint16(1))
    copy = linked(case, tmp_path / "copy")
    with pytest.raises(BaseError):
        apply_in_place(copy.patch, copy.target)
    assert copy.target.samefile(case.target)


def test_apply_killed_while_separating_links_completes_when_repeated(tmp_path: Path) -> None:
    steps, killed = 0, signal.SIGKILL
    while killed:
        steps += 1
        folder = tmp_path / str(steps)
        folder.mkdir()
        original = make_case(folder, sharded=True)
        copy = linked(original, folder / "copy")
        killed = run_and_die(lambda c=copy: apply_in_place(c.patch, c.target), DieAt(steps).install)
        assert original.holds(original.old)
        apply_in_place(copy.patch, copy.target)
        assert copy.holds(copy.new)
        assert original.holds(original.old)
        assert not list(copy.target.glob(".*"))
    assert steps > 15


def test_targets_of_symbolic_links_are_not_written(tmp_path: Path) -> None:
    case = make_case(tmp_path, sharded=False)
    (tmp_path / "link").symlink_to(case.target)
    with pytest.raises(CheckpointError, match="symbolic link"):
        apply_in_place(case.patch, tmp_path / "link")
    assert case.holds(case.old)


@pytest.mark.parametrize("saved", ["target", "new"])
def test_file_saved_again_during_a_diff_makes_no_patch(tmp_path: Path, saved: str) -> None:
    case = make_case(tmp_path, sharded=False)
    out = tmp_path / "out"

    def report(stage: str, done: int, total: int) -> None:
        if done == total:
            write_file(tmp_path / "again", case.new)
            (tmp_path / "again").replace(tmp_path / saved)

    with wc.Checkpoint(case.target) as old, wc.Checkpoint(tmp_path / "new") as new:
        with pytest.raises(CheckpointError, match="changed while it was being read"):
            write_patch(old, new, out, report=report)
        assert not out.exists()


def test_target_saved_again_during_a_copy_makes_no_copy(tmp_path: Path) -> None:
    case = make_case(tmp_path, sharded=False)

    def report(stage: str, done: int, total: int) -> None:
        if stage == "decode" and done == total:
            write_file(tmp_path / "again", case.old)
            (tmp_path / "again").replace(case.target)

    with pytest.raises(CheckpointError, match="changed while it was being read"):
        apply_to_copy(case.patch, case.target, tmp_path / "out", report=report)
    assert not (tmp_path / "out").exists()
