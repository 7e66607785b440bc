"""Links in a folder from outside, which would bring files from anywhere into a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign import states, write_history, write_slime, write_trl
from importing import refuses

from weightcast.errors import CheckpointError


def _moved(path: Path, away: Path) -> None:
    """A link where the folder was."""
    path.rename(away)
    path.symlink_to(away)


@pytest.mark.parametrize("layout", ["history", "trl", "slime"])
def test_step_that_is_a_link_is_refused(layout: str, tmp_path: Path) -> None:
    made, base = states(3), None
    if layout == "history":
        folder = write_history(tmp_path / "run", dict(enumerate(made, 1)))
        linked = folder / "checkpoint-2"
    elif layout == "trl":
        folder = write_trl(tmp_path / "run", made)
        linked = folder / "deltas"
    else:
        folder = write_slime(tmp_path / "run", made, "xor", "adler32")
        linked, base = folder / "weight_v000002", folder.with_name(folder.name + "-base")
    _moved(linked, tmp_path / "elsewhere")
    refuses(tmp_path / "channel", CheckpointError, "symbolic link", folder, base)
