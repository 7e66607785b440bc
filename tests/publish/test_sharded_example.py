"""The example of sharded training runs as its manual says, and a second run goes on with the channel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.store.file import FileStore

EXAMPLE = Path(__file__).parents[2] / "examples/sharded/train.py"


def trained(channel: Path, *options: str, processes: int = 2) -> list[str]:
    """What rank 0 prints."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLE), str(channel), *options],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [line.partition(",")[0] for line in done.stdout.splitlines()]


def test_second_run_continues_the_channel(tmp_path: Path) -> None:
    channel, saved = tmp_path / "channel", ("--checkpoint", str(tmp_path / "saved"))
    assert trained(channel, "--steps", "2", *saved) == ["version 1", "version 2"]
    assert trained(channel, "--steps", "2", *saved) == ["version 3", "version 4"]
    chain = Chain.open(FileStore(channel))
    manifests = [chain.manifest(version) for version in range(5)]
    assert [manifest.step for manifest in manifests] == [None, 1, 2, 3, 4]
    assert [manifest.codec for manifest in manifests] == [None, *["banded"] * 4]  # no second anchor
    assert {len(manifest.objects) for manifest in manifests[1:]} == {2}
    with wc.Subscriber(channel, tmp_path / "replica") as subscriber:
        subscriber.sync()
    with wc.Checkpoint(tmp_path / "replica") as replica:
        assert wc.fingerprint(replica).digest == manifests[4].position.digest
