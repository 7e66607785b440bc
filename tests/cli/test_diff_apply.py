"""`diff`, `apply`, `inspect` and `digest` as people and scripts meet them: real processes and what they print."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes  # noqa: F401 - numpy, and so safetensors, knows bfloat16 by it
import numpy as np
import pytest
from commands import COMMAND, SCRIPT, at_once, weightcast
from offline_pairs import Pair, contents, read, same, states, write_sharded, write_single
from safetensors.numpy import load_file

HEXADECIMAL = re.compile("[0-9a-f]{64}")
USAGE, MISMATCH, FORMAT, CHECKPOINT, INTERRUPTED = 2, 3, 4, 5, 6


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
    assert (before["digest"], after["digest"]) == (pair.made.facts["base"], pair.made.facts["result"])
    arrays = states()[0].values()
    sizes = len(arrays), sum(array.size for array in arrays), sum(array.nbytes for array in arrays)
    assert (before["tensors"], before["elements"], before["bytes"]) == sizes
    assert before.keys() == {"digest", "tensors", "elements", "bytes"}
    assert after["digests"].keys() == states()[0].keys()
    assert all(re.fullmatch("[0-9a-f]{16}", value) for value in after["digests"].values())


def test_apply_to_a_copy(pair: Pair, tmp_path: Path) -> None:
    before, out = contents(pair.old), tmp_path / f"out{pair.old.suffix}"
    facts = weightcast("apply", pair.patch, pair.old, "-o", out, "--json").facts
    assert facts == {"target": str(out), "digest": pair.made.facts["result"], "changed": True}
    assert contents(pair.old) == before
    assert same(read(out), states()[1])
    others = [name for name in before if not name.endswith(".safetensors") and pair.old.is_dir()]
    assert {name: contents(out)[name] for name in others} == {name: before[name] for name in others}
    assert contents(out).keys() == before.keys()
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_apply_in_place_and_again(pair: Pair, tmp_path: Path) -> None:
    copy = tmp_path / pair.old.name
    shutil.copytree(pair.old, copy) if pair.old.is_dir() else shutil.copy(pair.old, copy)
    expected = {"target": str(copy), "digest": pair.made.facts["result"], "changed": True}
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
