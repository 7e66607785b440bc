"""Real processes of a sharded training, killed with SIGKILL at chosen moments of every phase: nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from sharded_kills import OTHER, Again, Moment, UntilKilled, digest_at  # noqa: E402
from sharded_models import FORKED, run_together, run_with_a_victim, start_forking  # noqa: E402
from sharded_runs import followed  # noqa: E402

from weightcast.channel.chain import Chain  # noqa: E402
from weightcast.publish.open import channel_in  # noqa: E402
from weightcast.store.file import FileStore  # noqa: E402
from weightcast.upkeep.verify import verify  # noqa: E402

MOMENTS = [
    # The channel begins, box by box.
    Moment("beginning", "before create channel.json", 0, (None,)),
    Moment("beginning", "before exchange", 2, (None,)),
    Moment("beginning", "sync in put anchors/", 1, (None,)),
    Moment("beginning", "after put anchors/", 2, (None,)),
    Moment("beginning", "before create manifests/", 0, (None,)),
    Moment("beginning", "after create manifests/", 0, (0,)),
    # Version 2: changes are found.
    Moment("publishing", "after step", 0, (1,)),
    Moment("publishing", "before scan", 2, (1,)),
    Moment("publishing", "after resolve", 0, (1,)),
    # The ranks agree, and add up sums.
    Moment("publishing", "before gather", 1, (1,)),
    Moment("publishing", "after exchange", 2, (1,)),
    Moment("publishing", "before exchange", 0, (1,), nth=2),
    # Objects are encoded and uploaded.
    Moment("publishing", "before encode", 0, (1,)),
    Moment("publishing", "after encode", 2, (1,)),
    Moment("publishing", "sync in put deltas/", 1, (1,)),
    Moment("publishing", "after put deltas/", 2, (1,)),
    Moment("publishing", "after put deltas/", 0, (1,)),
    # The commit.
    Moment("publishing", "after gather", 0, (1,), nth=3),
    Moment("publishing", "after gather", 1, (1, 2), nth=4),  # what it said may have been lost with it
    Moment("publishing", "before create manifests/", 0, (1,)),
    Moment("publishing", "sync in create manifests/", 0, (1,)),
    Moment("publishing", "after create manifests/", 0, (2,)),
    Moment("publishing", "after put head.json", 0, (2,)),
    Moment("publishing", "after share", 2, (2,), nth=4),
    # All boxes are uploaded as one more version, since the weights are of none.
    Moment("returning", "after put anchors/", 0, (1,)),
    Moment("returning", "before put anchors/", 1, (1,)),
    Moment("returning", "after create manifests/", 0, (2,)),
]


@pytest.fixture(scope="module", autouse=True)
def _forking() -> None:
    start_forking()


@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_rank_killed_at_a_chosen_moment_loses_nothing(moment: Moment, ram: Path) -> None:
    """SIGKILL of one of three ranks; then two ranks go on, and every version can be followed."""
    killed, again = ram / "killed", ram / "again"
    killed.mkdir()
    again.mkdir()
    assert run_with_a_victim(3, UntilKilled(ram, moment), killed, moment.victim, FORKED) == ["", ""]
    before = steps_of(ram)
    head = len(before) - 1 if before else None
    assert head in moment.heads
    last = before[-1] if before else 0
    found = run_together(2, [Again(ram, last)], again, FORKED)["again"]
    assert not found, found
    assert steps_of(ram) == (before or [0]) + [last + 1, last + 2]
    chain = Chain.open(FileStore(ram / "channel"))
    assert all(chain.manifest(version).base is not None for version in list(chain.versions())[-2:])


def steps_of(folder: Path) -> list[int]:
    """The steps whose weights each version of the channel has, after it was read in all ways; all that was acknowledged
    is there."""
    store = FileStore(folder / "channel")
    chain = channel_in(store)
    versions = list(chain.versions()) if chain is not None else []
    log = folder / "acknowledged"
    acknowledged = {tuple(line.split()) for line in log.read_text().splitlines()} if log.exists() else set()
    if chain is None or not versions:
        assert not acknowledged
        return []
    assert versions == list(range(len(versions)))
    digests = [chain.manifest(version).position.digest for version in versions]
    assert acknowledged <= {(str(version), digest) for version, digest in enumerate(digests)}
    assert list(verify(chain)) == []
    followed(folder / "channel")
    steps = {digest_at(step): step for step in (*range(10), *range(OTHER, OTHER + 10))}
    return [steps[digest] for digest in digests]
