"""TRL's drafts: anchors and deltas in, anchors and deltas out, and each lie that a file can tell."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from foreign import State, content, read_trl, states, write_history, write_trl
from importing import Header, bring, holds, operate, refuses, span, write_out

from weightcast.errors import FormatError, UsageError, VersionError, WeightcastError

DRAFTS = [("first", "raw"), ("last", "raw"), ("last", "gap_delta")]
EMBED = "model.embed.weight"


def steps(made: list[State]) -> dict[int, State]:
    return dict(enumerate(made, 1))


@pytest.mark.parametrize(("draft", "encoding"), DRAFTS)
def test_every_step_of_a_draft_becomes_a_version_with_its_digest(draft: str, encoding: str, tmp_path: Path) -> None:
    made = states(6)
    made.insert(3, made[2])  # a step in which nothing changed
    folder = write_trl(tmp_path / "run", made, draft=draft, encoding=encoding)
    done = bring(tmp_path / "channel", folder)
    assert [one.step for one in done] == [1, 2, 3, 4, 5, 6, 7]
    assert holds(tmp_path / "channel", steps(made))


def test_gaps_that_need_32_bits_are_read_and_written(tmp_path: Path) -> None:
    old = {"w": np.zeros(200_000, states(1)[0][EMBED].dtype), "v": np.zeros(3, states(1)[0][EMBED].dtype)}
    new = {name: array.copy() for name, array in old.items()}
    new["w"].view("<u2")[[3, 150_000]] = 7
    new["v"].view("<u2")[1] = 7
    bring(tmp_path / "channel", write_trl(tmp_path / "run", [old, new]))
    assert holds(tmp_path / "channel", steps([old, new]))
    write_out(tmp_path / "channel", tmp_path / "out", "trl")
    assert read_trl(tmp_path / "out") == {step: content(state) for step, state in steps([old, new]).items()}


def test_export_is_read_by_an_independent_reader_and_imported_to_the_same_weights(tmp_path: Path) -> None:
    made = states(5)
    made.insert(2, made[1])
    bring(tmp_path / "channel", write_trl(tmp_path / "run", made))
    write_out(tmp_path / "channel", tmp_path / "out", "trl")
    assert read_trl(tmp_path / "out") == {step: content(state) for step, state in steps(made).items()}
    bring(tmp_path / "again", tmp_path / "out")
    assert holds(tmp_path / "again", steps(made))


def test_steps_that_are_not_consecutive_are_exported_by_their_versions(tmp_path: Path) -> None:
    made = states(3)
    bring(tmp_path / "channel", write_history(tmp_path / "run", dict(zip((10, 20, 30), made, strict=True))))
    write_out(tmp_path / "channel", tmp_path / "out", "trl")
    assert read_trl(tmp_path / "out") == {version: content(state) for version, state in enumerate(made)}


def test_weights_of_another_dtype_than_bf16_are_not_exported(tmp_path: Path) -> None:
    made = states(2, dtype=np.float32)
    bring(tmp_path / "channel", write_history(tmp_path / "run", steps(made)))
    with pytest.raises(UsageError, match=r"bf16 alone, and the tensor is F32.*model\.embed"):
        write_out(tmp_path / "channel", tmp_path / "out", "trl")
    assert not (tmp_path / "out").exists()


def test_second_import_adds_what_is_new(tmp_path: Path) -> None:
    made = states(7)
    bring(tmp_path / "channel", write_trl(tmp_path / "run", made[:5]))
    done = bring(tmp_path / "channel", write_trl(tmp_path / "longer", made))
    assert [one.step for one in done if one.new] == [6, 7]
    assert holds(tmp_path / "channel", steps(made))


def test_configuration_comes_from_the_base(tmp_path: Path) -> None:
    made = states(3)
    base = write_history(tmp_path / "base", {0: made[0]}) / "checkpoint-0"
    bring(tmp_path / "channel", write_trl(tmp_path / "run", made), base)
    names = {path.name for path in (tmp_path / "channel/anchors").rglob("*") if path.is_file()}
    assert names == {"anchor.json", "channel.json", "config.json", "model.safetensors"}


def test_step_that_is_there_with_other_bits_is_refused_by_name(tmp_path: Path) -> None:
    made = states(4)
    bring(tmp_path / "channel", write_trl(tmp_path / "run", made))
    other = write_trl(tmp_path / "other", [made[0], made[2], made[1], made[3]])
    refuses(tmp_path / "channel", WeightcastError, "step 2 is in the channel with other weights", other)


def test_missing_step_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = write_trl(tmp_path / "run", states(6), every=100)
    (folder / "deltas/step_000004.safetensors").unlink()
    refuses(tmp_path / "channel", FormatError, "there is no step 4.*step_000005", folder)


def test_chain_goes_on_at_the_anchor_after_a_gap(tmp_path: Path) -> None:
    made = states(6)
    folder = write_trl(tmp_path / "run", made)
    (folder / "deltas/step_000003.safetensors").unlink()
    bring(tmp_path / "channel", folder)
    assert holds(tmp_path / "channel", {step: state for step, state in steps(made).items() if step != 3})


def test_delta_without_an_anchor_is_refused(tmp_path: Path) -> None:
    folder = write_trl(tmp_path / "run", states(3))
    (folder / "anchors/step_000001.safetensors").unlink()
    refuses(tmp_path / "channel", FormatError, "there is no anchor before it.*step_000002", folder)


def test_step_with_anchor_and_delta_is_refused(tmp_path: Path) -> None:
    folder = write_trl(tmp_path / "run", states(3))
    shutil.copy(folder / "anchors/step_000001.safetensors", folder / "anchors/step_000002.safetensors")
    refuses(tmp_path / "channel", UsageError, "step 2 is there twice", folder)


# -- lies in a header, found before anything is written ----------------------------------------------------------------


def _unknown_tensor(header: Header, data: bytearray) -> None:
    for suffix in (".idx", ".val"):
        header["other" + suffix] = header.pop(EMBED + suffix)


def _values_alone(header: Header, data: bytearray) -> None:
    header["stray"] = header.pop(EMBED + ".idx")


def _other_dtype(header: Header, data: bytearray) -> None:
    header[EMBED + ".val"]["dtype"] = "F16"


def _other_index_dtype(header: Header, data: bytearray) -> None:
    header[EMBED + ".idx"]["dtype"] = "I16"


def _fewer_indices(header: Header, data: bytearray) -> None:
    entry = header[EMBED + ".idx"]
    count = entry["shape"][0]
    entry["shape"] = [1, count]


def _nvcomp(header: Header, data: bytearray) -> None:
    header["__metadata__"]["encoding"] = "nvcomp_cascaded"


def _other_step(header: Header, data: bytearray) -> None:
    header["__metadata__"]["model_version"] = "9"


HEADERS: list[tuple[Callable[[Header, bytearray], None], type[WeightcastError], str]] = [
    (_unknown_tensor, FormatError, "the anchor has no such tensor.*tensor other"),
    (_values_alone, FormatError, "indices without values"),
    (_other_dtype, FormatError, "values of F16 for a tensor of BF16"),
    (_other_index_dtype, FormatError, "indices of I16, expected U16 or U32"),
    (_fewer_indices, FormatError, "indices of shape"),
    (_nvcomp, VersionError, "the encoding 'nvcomp_cascaded'.*reads raw and gap_delta"),
    (_other_step, FormatError, "says that it is step '9'"),
]


@pytest.mark.parametrize(("lie", "kind", "match"), HEADERS, ids=[case[0].__name__[1:] for case in HEADERS])
def test_lie_in_a_header_is_refused_before_anything_is_written(
    lie: Callable[[Header, bytearray], None], kind: type[WeightcastError], match: str, tmp_path: Path
) -> None:
    folder = write_trl(tmp_path / "run", states(3))
    operate(folder / "deltas/step_000003.safetensors", lie)
    refuses(tmp_path / "channel", kind, match, folder)


def test_anchor_of_another_table_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = write_trl(tmp_path / "run", states(4))

    def reshape(header: Header, data: bytearray) -> None:
        header[EMBED]["shape"] = header[EMBED]["shape"][::-1]

    operate(folder / "anchors/step_000004.safetensors", reshape)
    refuses(tmp_path / "channel", UsageError, "on one side.*step_000004", folder)


# -- lies in the data, found at the step: it changes nothing -----------------------------------------------------------


def _out_of_range(indices: np.ndarray) -> None:
    indices[-1] = 40 * 16


def _negative(indices: np.ndarray) -> None:
    indices[0] = -1


def _twice(indices: np.ndarray) -> None:
    indices[1] = indices[0]


def _out_of_order(indices: np.ndarray) -> None:
    indices[[0, 1]] = indices[[1, 0]]


@pytest.mark.parametrize(
    ("lie", "match"),
    [
        (_out_of_range, "outside of its 640 elements"),
        (_negative, "outside of its 640 elements"),
        (_twice, "out of order, or twice"),
        (_out_of_order, "out of order, or twice"),
    ],
)
def test_lie_in_indices_is_refused_and_leaves_the_steps_before(
    lie: Callable[[np.ndarray], None], match: str, tmp_path: Path
) -> None:
    made = states(3)
    folder = write_trl(tmp_path / "run", made, encoding="raw")
    bring(tmp_path / "channel", write_trl(tmp_path / "honest", made[:2], encoding="raw"))

    def spoil(header: Header, data: bytearray) -> None:
        where = span(header, EMBED + ".idx")
        indices = np.frombuffer(bytes(data[where]), "<i4").copy()
        lie(indices)
        data[where] = indices.tobytes()

    operate(folder / "deltas/step_000003.safetensors", spoil)
    refuses(tmp_path / "channel", FormatError, match + ".*step_000003.*tensor model.embed", folder)
    assert holds(tmp_path / "channel", steps(made[:2]))


def test_gaps_that_add_up_beyond_the_tensor_are_refused(tmp_path: Path) -> None:
    made = states(2)
    folder = write_trl(tmp_path / "run", made)
    bring(tmp_path / "channel", write_trl(tmp_path / "honest", made[:1]))

    def spoil(header: Header, data: bytearray) -> None:
        where = span(header, EMBED + ".idx")
        data[where] = b"\xff" * (where.stop - where.start)

    operate(folder / "deltas/step_000002.safetensors", spoil)
    refuses(tmp_path / "channel", FormatError, "outside of its 640 elements", folder)


def test_values_that_miss_the_checksum_of_the_first_draft_are_refused(tmp_path: Path) -> None:
    """As its trainer writes them where a zero changed its sign: floats compare equal."""
    made = states(3)
    folder = write_trl(tmp_path / "run", made, draft="first")
    bring(tmp_path / "channel", write_trl(tmp_path / "honest", made[:2], draft="first"))

    def spoil(header: Header, data: bytearray) -> None:
        data[span(header, EMBED + ".values").start] ^= 1

    operate(folder / "deltas/step_000003.safetensors", spoil)
    refuses(tmp_path / "channel", FormatError, "do not have the checksum that the file states", folder)
