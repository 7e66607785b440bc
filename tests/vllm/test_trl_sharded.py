"""Real TRL trains a model that accelerate shards with FSDP2 over two processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trl_sharded_runs as runs
from sharded_models import run_together, run_with_a_victim
from trl_deployment import assert_checkpoint_is_pulled, check_rollouts, check_sizes, deployed, step, tell
from waiting import until

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import put_heartbeat
from weightcast.channel.records import Heartbeat
from weightcast.publish.open import channel_in
from weightcast.store.file import FileStore


class Engine(threading.Thread):
    """Stands for an engine with its agent: brings a mirror to each version, then says that it serves it.

    It notes the ranks that had ended the sync of a version before that.
    """

    def __init__(self, run: runs.Run, last: int = runs.STEPS):
        super().__init__(daemon=True)
        self._run, self._last = run, last
        self.early: list[Path] = []
        self.served: list[int] = []
        self.start()

    def run(self) -> None:
        store = FileStore(self._run.channel)
        until(lambda: channel_in(store) is not None and Chain.open(store).head() is not None, runs.PATIENCE)
        chain = Chain.open(store)
        with wc.Subscriber(store, self._run.folder / "mirror", wc.Every()) as subscriber:
            for version in range(self._last + 1):
                until(lambda version=version: chain.head().position.version >= version, runs.PATIENCE)
                subscriber.sync()
                if version != self._run.missed:
                    time.sleep(0.2)  # for ranks that would not wait
                    self.early += self._run.folder.glob(f"sync-{version}-*")
                    put_heartbeat(chain, Heartbeat("engine", subscriber.position, time.time(), None, 0.01))
                    self.served.append(version)


def must_run(run: runs.Run) -> None:
    run.folder.mkdir()
    engine = Engine(run)
    ended = run_together(2, [run], run.folder)[run.__name__]
    assert not ended, ended
    engine.join(60)
    assert engine.served == [version for version in range(runs.STEPS + 1) if version != run.missed]
    assert engine.early == []


@pytest.mark.parametrize("kind", ["qwen3", "moe"])
def test_versions_are_published_shard_by_shard_and_awaited_by_all_ranks(
    kind: str, model: Callable[[str], Path], tmp_path: Path
) -> None:
    must_run(runs.ShardByShard(model(kind), tmp_path / "run"))


def test_ranks_go_on_together_when_patience_ends(model: Callable[[str], Path], tmp_path: Path) -> None:
    must_run(runs.ShardByShard(model("qwen3"), tmp_path / "run", missed=2))


def test_trl_alone_gathers_what_it_streams(model: Callable[[str], Path], tmp_path: Path) -> None:
    must_run(runs.Gathered(model("qwen3"), tmp_path / "run"))


def test_rank_that_is_killed_ends_the_other_and_leaves_whole_versions(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    run = runs.Killed(model("qwen3"), tmp_path / "run")
    run.folder.mkdir()
    engine = Engine(run, last=1)
    assert run_with_a_victim(2, run, run.folder, victim=1) == [""]
    engine.join(60)
    assert engine.served == [0, 1]
    chain = Chain.open(FileStore(run.channel))
    assert [chain.manifest(version).step for version in chain.versions()] == [None, 1]


def test_shards_of_two_ranks_are_live_in_vllm_after_every_step(
    chatting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with deployed("folder", chatting, tmp_path, ranks=2, steps=runs.STEPS) as deployment:
        syncs = [step(deployment) for _ in range(1 + runs.STEPS)]
        deployment.training.wait()
        assert [sync["version"] for sync in syncs] == list(range(1 + runs.STEPS))
        check_rollouts(deployment)
        deployment.must_be_sound()
        assert_checkpoint_is_pulled(deployment)
    check_sizes(syncs[1:])
    with capsys.disabled():
        tell("two ranks", syncs[1:])
