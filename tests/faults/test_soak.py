"""Part of a minute in the life of a channel: real processes, upkeep meanwhile, and nothing that is left behind."""

import json
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import soak

FOLLOWERS = ("newest", "mirror", "every")


def test_writer_three_followers_and_upkeep_end_at_the_head(tmp_path: Path) -> None:
    # Growth is for the long run: in seconds of start-up it says nothing.
    small = ["--versions", "60", "--minutes", "0.25", "--params", "60000", "--slack", "500"]
    command = [sys.executable, soak.__file__, "--url", str(tmp_path / "bucket"), *small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(done.stdout)
    assert facts["faults"] == []
    roles = {process["role"]: process for process in facts["processes"]}
    assert {roles[name]["result"]["version"] for name in ("publisher", *FOLLOWERS)} == {60}
    assert len({roles[name]["result"]["digest"] for name in ("publisher", *FOLLOWERS)}) == 1
    assert roles["every"]["result"]["gaps"] == 0
    assert roles["squash"]["runs"] >= 1
    assert roles["gc"]["runs"] >= 1


def judged(folder: Path, megabytes: list[float], result: dict[str, object]) -> list[str]:
    """What is wrong with a follower that was seen with so much memory, half a second apart, and ended like this."""
    samples = [soak.Sample(i / 2, rss, rss, 5, 3, 2) for i, rss in enumerate(megabytes)]
    folder.mkdir()
    (folder / "out").write_text(json.dumps(result))
    return soak.judge("every", soak.Watched(folder, samples), 8.0, (3, "d")).faults


def test_growth_counts_after_the_warm_up(tmp_path: Path) -> None:
    ended = {"version": 3, "digest": "d"}
    assert judged(tmp_path / "grew-at-first", [50.0 + min(i, 20) for i in range(100)], ended) == []
    assert judged(tmp_path / "grows", [50.0 + i for i in range(100)], ended) == ["memory grew by 66.0 MB"]


def test_end_that_is_not_the_head_is_reported(tmp_path: Path) -> None:
    steady = [50.0] * 100
    assert "not at the head" in judged(tmp_path / "behind", steady, {"version": 2, "digest": "c"})[0]
    assert "not at the head" in judged(tmp_path / "other-bits", steady, {"version": 3, "digest": "c"})[0]
    skipped = {"version": 3, "digest": "d", "gaps": 2, "errors": ["the store is gone"]}
    assert judged(tmp_path / "skipped", steady, skipped) == [
        "error: the store is gone",
        "2 times it skipped versions",
    ]


def test_leftovers_are_reported(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "tmp").mkdir()
    (tmp_path / "x" / "tmp" / "stray").touch()
    watched = soak.Watched(tmp_path / "x", [soak.Sample(0.0, 1.0, 1.0, 1, 1, 1)])
    assert soak.judge("gc", watched, 8.0, None).faults == ["1 temporary files are left"]
