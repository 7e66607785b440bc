"""Write the golden vectors of docs/SPEC.md version 1 into v1/ beside this file.

    PYTHONPATH=src python tests/vectors/make.py

A case of which any file exists is left as it is. To add a case, add it to good.py, boxes.py, broken.py or
broken_boxes.py and run this again; until the first release (SPEC 9.3, 9.4), delete v1/ and run this to write them all.
`good/NAME.patch` leads from `NAME.old` to `NAME.new`, together with the objects `NAME.beside-I` where there are any;
readers reject what is in `broken/`, and `broken/cases.json` says against which base and under which clause.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from boxes import Cut, box_cases, every_shape, whole_in_boxes
from broken import BASE, WIDE_BASE, base_weights, broken_cases
from broken_boxes import BOX_BASE, box_base, broken_box_cases
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


def add_boxes(name: str, old: Tensors | None, new: Tensors, objects: list[Cut]) -> None:
    """Objects of boxes: the first is the patch, others are beside it; without ``old``, a patch without a base."""
    before, after, path = good_paths(name)
    if after.exists() or path.exists():
        return
    add(after, checkpoint(new))
    with ExitStack() as opened:
        weights = opened.enter_context(wc.Checkpoint(after))
        base = None
        if old is not None:
            add(before, checkpoint(old))
            base = opened.enter_context(wc.Checkpoint(before))
        patch = wc.anchor(weights) if base is None else wc.diff(base, weights)
        for i, cut in enumerate(objects):
            add(beside(path, i) if i else path, cut.encode(patch, base))


def beside(patch: Path, number: int) -> Path:
    return patch.with_name(patch.name.replace(".patch.", f".beside-{number}."))


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


def counting_all(item: Object) -> bytes:
    """A box that is there whole and counts all of its elements, though some are as before."""
    for i, row in enumerate(item.rows()):
        if row.box and f"{row.name.decode()}[{','.join(map(str, row.box[0]))}].indices" not in item.entries:
            elements = math.prod(row.box[1])
            if row.changed < elements:
                return item.row(i, changed=elements).bytes()
    raise AssertionError("no box is there whole")


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
    for base, weights in (
        (BASE, base_weights()[0]),
        (BOX_BASE, box_base()),
        (WIDE_BASE, {"w": vector("U64", [10, 20, 30, 40])}),
    ):
        if not (folder / base).exists():
            add(folder / base, checkpoint(weights))
    index = folder / "cases.json"
    cases = json.loads(index.read_text()) if index.exists() else {}
    for clause, what, base, data in broken_cases(folder):
        path = folder / f"{clause}-{what}.patch.safetensors"
        if not path.exists():
            add(path, data)
            cases[path.name] = {"old": base, "clause": clause}
    with wc.Checkpoint(folder / BOX_BASE) as old:
        for clause, what, data, others in broken_box_cases(old):
            path = folder / f"{clause}-{what}.patch.safetensors"
            if not path.exists():
                add(path, data)
                cases[path.name] = {"old": BOX_BASE, "clause": clause}
                for i, other in enumerate(others, 1):
                    add(beside(path, i), other)
    index.write_text(json.dumps(cases, indent=1, sort_keys=True) + "\n")


def main() -> None:
    for case in good_cases():
        add_good(*case)
    weights = {name: tensors["w"] for name, tensors, _ in every_dtype()}
    add_without_base("plain-without-base", {"scalar": Tensor("F32", (), [7]), **weights})
    for name, old, new, objects in box_cases():
        add_boxes(name, old, new, objects)
    add_boxes("plain-boxes-without-base", None, every_shape()[1], whole_in_boxes(every_shape()[1]))
    add_by_hand("plain-boxes-counting-all", "plain-boxes", counting_all)
    add_by_hand("plain-wide-indices", "plain-bf16", wide_indices)
    add_by_hand("plain-loose-header", "plain-names", loose_header)
    add_by_hand("gap-in-bands", "banded-far-sloped", lambda item: item.stating(codec="gap").bytes())
    add_broken(HERE / "broken")


if __name__ == "__main__":
    main()
