"""The command line as people and scripts meet it: real processes, their exit codes, and what they say where."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from commands import COMMAND, SCRIPT, Done, at_once, weightcast
from safetensors.numpy import load_file, save_file

from weightcast.disk.checkpoint import INDEX, redo_path

TRACES = sorted(path for path in (Path(__file__).parents[2] / "benchmarks" / "data").iterdir() if path.is_dir())
HEXADECIMAL = re.compile("[0-9a-f]{64}")
USAGE, MISMATCH, FORMAT, CHECKPOINT, INTERRUPTED = 2, 3, 4, 5, 6
Weights = dict[str, np.ndarray]


# -- checkpoints -------------------------------------------------------------------------------------------------------


def states() -> tuple[Weights, Weights]:
    """A small model before and after a step."""
    rng = np.random.default_rng(3)
    old: Weights = {
        "lm_head.weight": rng.normal(0, 0.02, (64, 32)).astype(ml_dtypes.bfloat16),
        "model.embed_tokens.weight": rng.normal(0, 0.02, (64, 32)).astype(ml_dtypes.bfloat16),
        "model.layers.0.mlp.up_proj.weight": rng.normal(0, 0.02, (96, 32)).astype(ml_dtypes.bfloat16),
        "model.norm.weight": np.ones(32, np.float32),
    }
    new = {name: array.copy() for name, array in old.items()}
    for name in ("lm_head.weight", "model.layers.0.mlp.up_proj.weight"):
        flat = new[name].reshape(-1)
        at = rng.choice(flat.size, 40, replace=False)
        flat[at] = (flat[at].astype(np.float32) * 1.02).astype(ml_dtypes.bfloat16)
    new["model.norm.weight"][3] = 1.5
    return old, new


def write_single(path: Path, weights: Weights) -> None:
    save_file(weights, path, {"format": "pt"})


def write_sharded(folder: Path, weights: Weights) -> None:
    """As Hugging Face lays it out, with the files that are not weights."""
    folder.mkdir()
    names = sorted(weights)
    weight_map = {}
    for i, mine in enumerate((names[:2], names[2:]), 1):
        file = f"model-{i:05d}-of-00002.safetensors"
        write_single(folder / file, {name: weights[name] for name in mine})
        weight_map |= dict.fromkeys(mine, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.txt").write_text("a\nb\n")


def read(path: Path) -> Weights:
    """By the safetensors library, which knows nothing of weightcast."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {name: array for file in files for name, array in load_file(file).items()}


def same(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def contents(path: Path) -> dict[str, bytes]:
    """All bytes of a file, or of a folder and everything in it."""
    files = [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else [path]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@dataclass(frozen=True)
class Pair:
    """A checkpoint before and after, a patch from one to the other, and what making it printed."""

    old: Path
    new: Path
    patch: Path
    made: Done


def make_pair(folder: Path, sharded: bool) -> Pair:
    suffix, write = ("", write_sharded) if sharded else (".safetensors", write_single)
    old, new, patch = folder / f"old{suffix}", folder / f"new{suffix}", folder / "step.patch"
    for path, weights in zip((old, new), states(), strict=True):
        write(path, weights)
    return Pair(old, new, patch, weightcast("diff", old, new, "-o", patch, "--json"))


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Made once, and only read by the tests."""
    return make_pair(tmp_path_factory.mktemp("single"), sharded=False)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("sharded"), sharded=True)


@pytest.fixture(params=["single", "sharded"])
def pair(request: pytest.FixtureRequest) -> Pair:
    """Either of the two."""
    made: Pair = request.getfixturevalue(request.param)
    return made


@pytest.fixture
def target(single: Pair, tmp_path: Path) -> Path:
    """A copy of the old weights, alone in its folder."""
    (tmp_path / "target").mkdir()
    return Path(shutil.copy(single.old, tmp_path / "target" / "weights.safetensors"))


# -- from diff to apply ------------------------------------------------------------------------------------------------


def changed_elements() -> int:
    old, new = states()
    words = {2: np.uint16, 4: np.uint32}
    return sum(int((old[n].view(words[old[n].itemsize]) != new[n].view(words[old[n].itemsize])).sum()) for n in old)


def test_diff_says_what_it_wrote(pair: Pair) -> None:
    facts = pair.made.facts
    assert facts.keys() == {
        *("patch", "codec", "base", "result", "changed", "density", "bytes", "bits_per_change", "ratio_to_full")
    }
    assert (facts["patch"], facts["codec"]) == (str(pair.patch), "banded")
    assert facts["bytes"] == pair.patch.stat().st_size
    assert facts["changed"] == changed_elements()
    assert facts["bits_per_change"] == 8 * facts["bytes"] / facts["changed"]
    elements = sum(array.size for array in states()[0].values())
    nbytes = sum(array.nbytes for array in states()[0].values())
    assert (facts["density"], facts["ratio_to_full"]) == (facts["changed"] / elements, nbytes / facts["bytes"])
    assert HEXADECIMAL.fullmatch(facts["base"])
    assert HEXADECIMAL.fullmatch(facts["result"])


def test_inspect_says_the_same(pair: Pair) -> None:
    facts, made = weightcast("inspect", pair.patch, "--json").facts, pair.made.facts
    shared = ("base", "result", "codec", "bytes", "changed", "density", "bits_per_change", "ratio_to_full")
    assert {key: facts[key] for key in shared} == {key: made[key] for key in shared}
    assert (facts["changed_tensors"], facts["model_tensors"]) == (3, 4)
    rows = {row["name"]: row for row in facts["tensors"]}
    assert rows.keys() == {"lm_head.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"}
    assert sum(row["bytes"] for row in rows.values()) + facts["overhead_bytes"] == facts["bytes"]
    norm = rows["model.norm.weight"]
    assert (norm["dtype"], norm["shape"], norm["changed"], norm["density"]) == ("F32", [32], 1, 1 / 32)
    assert norm["bits_per_change"] == 8 * norm["bytes"]


def test_digest_is_where_the_patch_leads_from_and_to(pair: Pair) -> None:
    digests = at_once(("digest", pair.old, "--json"), ("digest", pair.new, "--json", "--tensors", "--threads", "1"))
    before, after = (done.facts for done in digests)
    assert (before["position"], after["position"]) == (pair.made.facts["base"], pair.made.facts["result"])
    arrays = states()[0].values()
    sizes = len(arrays), sum(array.size for array in arrays), sum(array.nbytes for array in arrays)
    assert (before["tensors"], before["elements"], before["bytes"]) == sizes
    assert before.keys() == {"position", "tensors", "elements", "bytes"}
    assert after["digests"].keys() == states()[0].keys()
    assert all(re.fullmatch("[0-9a-f]{16}", value) for value in after["digests"].values())


def test_apply_to_a_copy(pair: Pair, tmp_path: Path) -> None:
    before, out = contents(pair.old), tmp_path / f"out{pair.old.suffix}"
    facts = weightcast("apply", pair.patch, pair.old, "-o", out, "--json").facts
    assert facts == {"target": str(out), "position": pair.made.facts["result"], "changed": True}
    assert contents(pair.old) == before
    assert same(read(out), states()[1])
    others = [name for name in before if not name.endswith(".safetensors") and pair.old.is_dir()]
    assert {name: contents(out)[name] for name in others} == {name: before[name] for name in others}
    assert contents(out).keys() == before.keys()
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_apply_in_place_and_again(pair: Pair, tmp_path: Path) -> None:
    copy = tmp_path / pair.old.name
    shutil.copytree(pair.old, copy) if pair.old.is_dir() else shutil.copy(pair.old, copy)
    expected = {"target": str(copy), "position": pair.made.facts["result"], "changed": True}
    assert weightcast("apply", pair.patch, copy, "--json").facts == expected
    assert same(read(copy), states()[1])
    after = contents(tmp_path)
    assert contents(copy).keys() == contents(pair.old).keys()
    assert weightcast("apply", pair.patch, copy, "--json").facts == expected | {"changed": False}
    assert contents(tmp_path) == after


@pytest.mark.parametrize("codec", ["plain", "gap", "banded"])
def test_every_codec(single: Pair, tmp_path: Path, codec: str) -> None:
    patch, out = tmp_path / "patch", tmp_path / "out.safetensors"
    assert weightcast("diff", single.old, single.new, "-o", patch, "--codec", codec, "--json").facts["codec"] == codec
    inspect, apply = at_once(("inspect", patch, "--json"), ("apply", patch, single.old, "-o", out, "--threads", "1"))
    assert (inspect.facts["codec"], apply.code) == (codec, 0)
    assert same(read(out), states()[1])


def test_plain_patch_is_read_by_any_safetensors_reader(single: Pair, tmp_path: Path) -> None:
    weightcast("diff", single.old, single.new, "-o", tmp_path / "patch.safetensors", "--codec", "plain")
    entries = load_file(tmp_path / "patch.safetensors")
    weights = states()[0]["lm_head.weight"].reshape(-1)
    weights[entries["lm_head.weight.indices"]] = entries["lm_head.weight.values"]
    assert weights.tobytes() == states()[1]["lm_head.weight"].tobytes()


def test_between_a_file_and_a_folder(single: Pair, tmp_path: Path) -> None:
    """A patch belongs to weights, however they are cut into files."""
    write_sharded(tmp_path / "folder", states()[0])
    assert weightcast("apply", single.patch, tmp_path / "folder").code == 0
    assert same(read(tmp_path / "folder"), states()[1])


def test_nothing_changed(single: Pair, tmp_path: Path, target: Path) -> None:
    facts = weightcast("diff", single.old, single.old, "-o", tmp_path / "patch", "--json").facts
    assert (facts["changed"], facts["bits_per_change"]) == (0, None)
    assert facts["base"] == facts["result"]
    before = contents(target.parent)
    inspect, apply = at_once(("inspect", tmp_path / "patch", "--json"), ("apply", tmp_path / "patch", target))
    assert inspect.facts["tensors"] == []
    assert apply.code == 0
    assert contents(target.parent) == before


# -- for people --------------------------------------------------------------------------------------------------------


def test_text_holds_the_facts(single: Pair, target: Path, tmp_path: Path) -> None:
    made = single.made.facts
    runs = at_once(
        ("diff", single.old, single.new, "-o", tmp_path / "again.patch"),
        ("inspect", single.patch),
        ("apply", single.patch, target),
        ("digest", single.new),
    )
    assert [(done.code, done.err) for done in runs] == [(0, "")] * 4
    assert all(made["result"] in done.out for done in runs)
    assert all(made["base"] in done.out for done in runs[:2])


def test_tensor_names_are_shown_as_they_are(tmp_path: Path) -> None:
    """Whole, with their underscores, and never as markup; in a pipe too, where nobody knows how wide the page is."""
    names = ["model.language_model.layers.0.self_attn.q_proj.weight", "[bold]w[/bold]", "[/]", "\\[/]", "w\\"]
    write_single(tmp_path / "old", {name: np.zeros(4, np.float32) for name in names})
    write_single(tmp_path / "new", {name: np.ones(4, np.float32) for name in names})
    assert weightcast("diff", tmp_path / "old", tmp_path / "new", "-o", tmp_path / "patch").code == 0
    for shown in at_once(("inspect", tmp_path / "patch"), ("digest", tmp_path / "old", "--tensors")):
        assert shown.code == 0
        assert [name for name in names if name not in shown.out] == []


def test_names_in_errors_are_not_markup(single: Pair, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("[bold]x", "[/]", "\\[/]")]
    for file, done in zip(files, at_once(*(("digest", file) for file in files)), strict=True):
        assert done.code == CHECKPOINT
        assert str(file) in done.complaint


def test_help() -> None:
    verbs = [(), ("diff",), ("apply",), ("inspect",), ("digest",), ("warm-up",)]
    for verb, done in zip(verbs, at_once(*((*verb, "--help") for verb in verbs)), strict=True):
        assert (done.code, done.err) == (0, "")
        assert f"weightcast {' '.join(verb)}".strip() in done.out.partition("Usage: ")[2].splitlines()[0]


def test_version_and_warm_up() -> None:
    version, warm_up = at_once(("--version",), ("warm-up",))
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", version.out)
    assert (version.code, warm_up.code) == (0, 0)
    assert subprocess.run([SCRIPT, "--version"], capture_output=True, text=True, check=True).stdout == version.out


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_wrong_base(single: Pair, target: Path) -> None:
    weights = states()[0]
    weights["model.norm.weight"][0] = 2
    write_single(target, weights)
    before = contents(target.parent)
    apply = ("apply", single.patch, target)
    done, copied, stands = at_once(apply, (*apply, "-o", target.parent / "out"), ("digest", target, "--json"))
    told = weightcast(*apply, "--json")
    assert (done.code, told.code, copied.code) == (MISMATCH, MISMATCH, MISMATCH)
    assert "the patch begins at" in done.complaint
    assert "take a patch made from these weights" in done.complaint
    assert copied.complaint == done.complaint
    assert told.error["kind"] == "BaseError"
    assert (told.error["expected"], told.error["found"]) == (single.made.facts["base"], stands.facts["position"])
    assert told.error["hint"] in told.error["text"]
    assert contents(target.parent) == before


def test_truncated_patch(single: Pair, target: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.patch"
    cut.write_bytes(single.patch.read_bytes()[:-1])
    before = contents(target.parent)
    told = weightcast("apply", cut, target, "--json")
    runs = at_once(("apply", cut, target), ("apply", cut, target, "-o", target.parent / "out"), ("inspect", cut))
    assert [done.code for done in (told, *runs)] == [FORMAT] * 4
    assert all(str(cut) in done.complaint for done in runs)
    assert (told.error["kind"], told.error["file"]) == ("FormatError", str(cut))
    assert contents(target.parent) == before


def test_patch_of_a_later_format(single: Pair, target: Path, tmp_path: Path) -> None:
    later = tmp_path / "later.patch"
    later.write_bytes(single.patch.read_bytes().replace(b'\\"format\\":1', b'\\"format\\":2'))
    told = weightcast("apply", later, target, "--json")
    assert (told.code, told.error["kind"]) == (FORMAT, "VersionError")
    assert "newer" in told.error["hint"]


def test_missing_file(single: Pair, target: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    told, *runs = at_once(
        ("digest", gone, "--json"),
        ("diff", gone, single.new, "-o", tmp_path / "x"),
        ("diff", single.old, gone, "-o", tmp_path / "x"),
        ("apply", gone, target),
        ("apply", single.patch, gone),
        ("inspect", gone),
    )
    assert [done.code for done in (told, *runs)] == [CHECKPOINT] * 6
    assert all(str(gone) in done.complaint for done in runs)
    assert (told.error["kind"], told.error["file"]) == ("CheckpointError", str(gone))
    assert not (tmp_path / "x").exists()


def test_existing_output(single: Pair, sharded: Pair, tmp_path: Path) -> None:
    """A file or a folder that is there stays what it is."""
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    before = contents(tmp_path)
    outs = tmp_path / "file", tmp_path / "folder"
    commands = [("apply", pair.patch, pair.old, "-o", out) for pair in (single, sharded) for out in outs]
    for command, done in zip(commands, at_once(*commands), strict=True):
        assert done.code == USAGE
        assert "exists already" in done.complaint
        assert str(command[-1]) in done.complaint
    assert contents(tmp_path) == before


def test_diff_does_not_write_over_what_it_reads(single: Pair, tmp_path: Path) -> None:
    old, new = (Path(shutil.copy(path, tmp_path)) for path in (single.old, single.new))
    before = contents(tmp_path)
    assert [weightcast("diff", old, new, "-o", out).code for out in (old, new)] == [USAGE, USAGE]
    assert contents(tmp_path) == before


def test_output_in_a_folder_that_is_not_there(single: Pair, tmp_path: Path) -> None:
    done = weightcast("diff", single.old, single.new, "-o", tmp_path / "gone" / "patch")
    assert done.code != 0
    assert "gone" in done.complaint


UNWRITABLE = Path("/sys")
"""Where not even root may make files."""


@pytest.mark.skipif(not UNWRITABLE.is_dir(), reason="no such folder on this system")
def test_a_place_that_cannot_be_written_to(single: Pair) -> None:
    """People are told of the place they named, not of a temporary file, and what to do."""
    out = UNWRITABLE / "weightcast-out"
    commands = (("diff", single.old, single.new, "-o", out), ("apply", single.patch, single.old, "-o", out))
    for done in at_once(*commands):
        assert done.code == USAGE
        assert "nothing can be written there: " in done.complaint
        assert f"(file {out})" in done.complaint
        assert "name another place" in done.complaint or "Name a place" in done.complaint
    (told,) = at_once((*commands[0], "--json"))
    assert (told.code, told.error["file"]) == (USAGE, str(out))
    assert told.error["hint"] in told.error["text"]


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    done = weightcast("inspect", tmp_path / "config.json")
    assert done.code == FORMAT
    assert "this is no safetensors file" in done.complaint


def test_unknown_codec(single: Pair, tmp_path: Path) -> None:
    done = weightcast("diff", single.old, single.new, "-o", tmp_path / "patch", "--codec", "zstd")
    assert (done.code, done.out) == (USAGE, "")
    assert all(codec in done.err for codec in ("zstd", "plain", "gap", "banded"))
    assert not (tmp_path / "patch").exists()


def test_checkpoint_where_a_patch_should_be(single: Pair, target: Path) -> None:
    before = contents(target.parent)
    for done in at_once(("apply", single.new, target), ("inspect", single.new)):
        assert done.code == FORMAT
        assert "not a weightcast patch" in done.complaint
        assert "checkpoint" in done.complaint
    assert contents(target.parent) == before


def test_patch_where_a_checkpoint_should_be(single: Pair, tmp_path: Path) -> None:
    done = weightcast("diff", single.old, single.patch, "-o", tmp_path / "x")
    assert done.code == USAGE
    assert "on one side only" in done.complaint


def test_tables_that_differ(single: Pair, tmp_path: Path) -> None:
    missing, reshaped = states()[1], states()[1]
    del missing["model.norm.weight"]
    reshaped["lm_head.weight"] = reshaped["lm_head.weight"].reshape(32, 64)
    cases = {"model.norm.weight": missing, "lm_head.weight": reshaped}
    for tensor, weights in cases.items():
        write_single(tmp_path / tensor, weights)
    commands = [("diff", single.old, tmp_path / tensor, "-o", tmp_path / "x", "--json") for tensor in cases]
    for tensor, told in zip(cases, at_once(*commands), strict=True):
        assert (told.code, told.error["kind"], told.error["tensor"]) == (USAGE, "UsageError", tensor)
        assert told.error["hint"] in told.error["text"]
    assert not (tmp_path / "x").exists()


def test_broken_checkpoint_folder(single: Pair, tmp_path: Path) -> None:
    write_sharded(tmp_path / "folder", states()[0])
    index = json.loads((tmp_path / "folder" / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "../x.safetensors"
    (tmp_path / "folder" / INDEX).write_text(json.dumps(index))
    told = weightcast("apply", single.patch, tmp_path / "folder", "--json")
    assert told.code == CHECKPOINT
    assert told.error["tensor"] == "lm_head.weight"
    assert told.error["file"] == str(tmp_path / "folder" / INDEX)


def test_wrong_arguments() -> None:
    for done in at_once(("nonsense",), ("diff",), ("diff", "a", "b"), ("apply", "a"), ("digest", "--frob", "a")):
        assert (done.code, done.out) == (USAGE, "")
        assert done.err


def test_interrupted_apply(single: Pair, target: Path) -> None:
    """What a kill leaves behind is a plain patch beside the weights."""
    weightcast("diff", single.old, single.new, "-o", redo_path(target), "--codec", "plain")
    done = weightcast("digest", target)
    assert done.code == INTERRUPTED
    assert f"weightcast apply --resume {target}" in done.complaint
    facts = weightcast("apply", "--resume", target, "--json").facts
    assert facts["position"] == single.made.facts["result"]
    assert same(read(target), states()[1])
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    assert weightcast("apply", "--resume", target, "--json").facts == {
        "target": str(target),
        "position": None,
        "changed": False,
    }


# -- measuring ---------------------------------------------------------------------------------------------------------


MEGABYTE = 1 << 20
PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def peak_memory(*arguments: str | Path) -> int:
    """The most bytes a weightcast process had in memory; a small process starts it, whose own memory it inherits."""
    command = [sys.executable, "-c", PEAK, *COMMAND, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return 1024 * int(done.stdout)


def write_large(path: Path, tensors: int, nbytes: int, value: int) -> None:
    """Zeros that take no disk, but for one byte in each tensor."""
    header = {
        f"layers.{i}": {"dtype": "BF16", "shape": [nbytes // 2], "data_offsets": [i * nbytes, (i + 1) * nbytes]}
        for i in range(tensors)
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + tensors * nbytes)
        for i in range(tensors):
            file.seek(8 + len(text) + i * nbytes + 1000 * i)
            file.write(bytes([value]))


def test_diff_and_apply_hold_a_few_tensors_in_memory(tmp_path: Path) -> None:
    size, many = 16 * MEGABYTE, 24
    peaks: dict[str, list[int]] = {"diff": [], "apply": []}
    for tensors in (1, many):
        old, new, patch = (tmp_path / f"{name}-{tensors}" for name in ("old", "new", "patch"))
        write_large(old, tensors, size, 1)
        write_large(new, tensors, size, 2)
        peaks["diff"].append(peak_memory("diff", old, new, "-o", patch, "--threads", "1"))
        peaks["apply"].append(peak_memory("apply", patch, old, "--threads", "1"))
        assert contents(old) == contents(new)
    for one, all_ in peaks.values():
        assert one > size
        assert all_ - one < 4 * size
