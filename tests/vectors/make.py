"""Write the golden vectors of docs/SPEC.md version 1 into v1/ beside this file.

    PYTHONPATH=src python tests/vectors/make.py

Vectors are only ever added (SPEC 9.4): a case of which any file exists is left as it is. To add a case, add it to
good.py or broken.py and run this again. `good/NAME.patch` leads from `NAME.old` to `NAME.new`; readers reject what is
in `broken/`, and `broken/cases.json` says against which base and under which clause.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from broken import BASE, WIDE_BASE, base_weights, broken_cases
from checkpoints import Tensor, Tensors, checkpoint, vector, with_text
from good import every_dtype, good_cases
from objects import Object

import weightcast as wc

HERE = Path(__file__).parent / "v1"


def good_paths(name: str) -> list[Path]:
    return [HERE / "good" / f"{name}.{part}.safetensors" for part in ("old", "new", "patch")]


def add_good(name: str, codec: str, old: Tensors, new: Tensors) -> None:
    paths = good_paths(name)
    if any(path.exists() for path in paths):
        return
    add(paths[0], checkpoint(old))
    add(paths[1], checkpoint(new))
    add(paths[2], patch_between(paths[0], paths[1], codec))


def patch_between(old: Path, new: Path, codec: str) -> bytes:
    with wc.Checkpoint(old) as before, wc.Checkpoint(new) as after:
        return wc.encode(wc.diff(before, after), codec, old=before)


def add_without_base(name: str, new: Tensors) -> None:
    _, path, patch = good_paths(name)
    if path.exists() or patch.exists():
        return
    add(path, checkpoint(new))
    with wc.Checkpoint(path) as weights:
        add(patch, wc.encode(wc.anchor(weights), "plain"))


def add_by_hand(name: str, like: str, edit: Callable[[Object], bytes]) -> None:
    """A patch that weightcast would not write so, but has to read."""
    sources, paths = good_paths(like), good_paths(name)
    if any(path.exists() for path in paths):
        return
    add(paths[0], sources[0].read_bytes())
    add(paths[1], sources[1].read_bytes())
    add(paths[2], edit(Object.parse(sources[2].read_bytes())))


def wide_indices(item: Object) -> bytes:
    indices = np.frombuffer(item.entries["w.indices"][2], "<i4")
    return item.listing("w.indices", "I64", indices.astype("<i8").tobytes()).bytes()


def loose_header(item: Object) -> bytes:
    """Keys in another order, and white space wherever JSON has room for it."""
    header, body = item.header()
    header["__metadata__"] = {"weightcast": json.dumps(dict(reversed(item.meta.items())), indent=1)}
    return with_text(json.dumps(dict(reversed(header.items())), indent=3).encode(), body)


def add(path: Path, data: bytes) -> None:
    """Create a file; one that exists is an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(data)


def add_broken(folder: Path) -> None:
    for base, weights in ((BASE, base_weights()[0]), (WIDE_BASE, {"w": vector("U64", [10, 20, 30, 40])})):
        if not (folder / base).exists():
            add(folder / base, checkpoint(weights))
    index = folder / "cases.json"
    cases = json.loads(index.read_text()) if index.exists() else {}
    for clause, what, base, data in broken_cases(folder):
        path = folder / f"{clause}-{what}.patch.safetensors"
        if not path.exists():
            add(path, data)
            cases[path.name] = {"old": base, "clause": clause}
    index.write_text(json.dumps(cases, indent=1, sort_keys=True) + "\n")


def main() -> None:
    for case in good_cases():
        add_good(*case)
    weights = {name: tensors["w"] for name, tensors, _ in every_dtype()}
    add_without_base("plain-without-base", {"scalar": Tensor("F32", (), [7]), **weights})
    add_by_hand("plain-wide-indices", "plain-bf16", wide_indices)
    add_by_hand("plain-loose-header", "plain-names", loose_header)
    add_by_hand("gap-in-bands", "banded-far-sloped", lambda item: item.stating(codec="gap").bytes())
    add_broken(HERE / "broken")


if __name__ == "__main__":
    main()
