"""What publishing costs the ranks of a sharded training: time, memory, bytes in the bucket and between the ranks.

    python benchmarks/sharded.py [--parameters 40e6] [--ranks 1 2 4] [--steps 5] [--threads 1] [--held]

A bf16 model of square matrices of 2048 rows, cut by FSDP2, of which 1 % of the elements change per step, the same ones
for every number of ranks; gloo on this machine's CPU, channel in /dev/shm. First one process publishes the model whole.
Every number of ranks must reach the same head, digest for digest, and a mirror follows it. Of the seconds, those of the
slowest rank, the median over the steps; all ranks call `publish` together. `hooks` is what the publisher does around
`optimizer.step()`, `commit` is counted from the call of `publish`. Bytes between the ranks are those given to and
taken from `wc.Peers`, requests those below the retries. Memory is a rank's resident peak over that of the same steps
without a publisher; with ``--held``, without what glibc keeps of what was freed. Prints JSON with estimates for large
models, on paper from these rates, and a table to stderr.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from catchup import Counted, table
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

import weightcast as wc
from weightcast.publish.rounds import DIRECT
from weightcast.store import open_store
from weightcast.torch.peers import GroupPeers

WIDTH, DENSITY = 2048, 0.01


class Model(nn.Module):
    def __init__(self, layers: int):
        super().__init__()
        torch.manual_seed(0)
        self.matrices = nn.ParameterList((torch.randn(WIDTH, WIDTH) * 0.02).bfloat16() for _ in range(layers))
        self.norms = nn.ParameterList(torch.ones(WIDTH).bfloat16() for _ in range(layers))


class Steps(torch.optim.Optimizer):
    """An optimizer without states: 1 % of the elements move by a bf16 step, some by three."""

    def __init__(self, model: nn.Module, rank: int, ranks: int):
        super().__init__(model.parameters(), {})
        self._model, self._rank, self._ranks = model, rank, ranks
        self._draws = torch.Generator().manual_seed(1)
        self.seconds = 0.0
        """Of the last step, without the hooks around it."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        began = time.perf_counter()
        for parameter in self._model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            changes = torch.zeros(parameter.numel(), dtype=torch.int16)
            number = max(1, int(parameter.numel() * DENSITY))
            at = torch.randint(0, parameter.numel(), (number,), generator=self._draws)
            changes[at] = torch.where(torch.rand(number, generator=self._draws) < 0.85, 1, 3).to(torch.int16)
            own = changes.view(parameter.shape).chunk(self._ranks)[self._rank]  # as FSDP2 cuts
            local.detach().view(torch.int16).add_(own)
        self.seconds = time.perf_counter() - began


class CountedPeers:
    """`wc.Peers` that counts the bytes of messages."""

    def __init__(self) -> None:
        self._peers = GroupPeers()
        self.ranks, self.rank, self.size = self._peers.ranks, self._peers.rank, self._peers.size
        self.sent = self.received = 0

    def gather(self, mine: bytes) -> list[bytes] | None:
        found = self._peers.gather(mine)
        if found is None:
            self.sent += len(mine)
        else:
            self.received += sum(map(len, found[1:]))
        return found

    def share(self, data: bytes | None) -> bytes:
        shared = self._peers.share(data)
        if data is None:
            self.received += len(shared)
        else:
            self.sent += len(shared) * (self.size - 1)
        return shared

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        found = self._peers.exchange(parts)
        self.sent += sum(map(len, parts)) - len(parts[self.rank])
        self.received += sum(map(len, found)) - len(found[self.rank])
        return found

    def close(self) -> None:
        self._peers.close()


def resident_peak() -> int:
    """The most memory since the last call, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(found[1])


@dataclass(frozen=True)
class Run:
    layers: int
    ranks: int
    """0: one process that publishes the model whole."""
    steps: int
    threads: int


def measure(run: Run, folder: Path, rank: int) -> dict[str, Any]:
    """What one rank sees."""
    model = Model(run.layers)
    if run.ranks:
        fully_shard(model)
    optimizer = Steps(model, rank, max(1, run.ranks))
    store = Counted(open_store(folder / "channel"))
    peers = CountedPeers() if run.ranks else None
    optimizer.step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed of the whole model would count as used
    resident_peak()
    optimizer.step()
    base = resident_peak()
    rows: list[dict[str, float]] = []
    with wc.Publisher(store, model, optimizer=optimizer, threads=run.threads, group=peers) as publisher:
        opening = resident_peak() - base
        for step in range(1, run.steps + 1):
            began = time.perf_counter()
            optimizer.step()
            hooks = time.perf_counter() - began - optimizer.seconds
            before = (peers.sent, peers.received) if peers else (0, 0)
            asked = len(store.requests)
            if run.ranks:
                distributed.barrier()
            began = time.perf_counter()
            receipt = publisher.publish(step=step)
            returned = time.perf_counter()
            manifest = receipt.result()
            rows.append({"hooks": hooks, "publish": returned - began, "commit": time.perf_counter() - began})
            if run.ranks:
                distributed.barrier()  # all that this version says between the ranks was said
            after = (peers.sent, peers.received) if peers else (0, 0)
            rows[-1] |= {"sent": after[0] - before[0], "received": after[1] - before[1]}
            rows[-1] |= {"requests": len(store.requests) - asked, "changed": manifest.changed}
            rows[-1]["bytes"] = sum(one.size for one in manifest.objects)
        publishing = resident_peak() - base
    return {"rows": rows, "opening": opening, "publishing": publishing, "head": manifest.position.digest}


def process(rank: int, run: Run, folder: Path) -> None:
    torch.set_num_threads(1)
    wc.warm_up()
    if run.ranks:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=run.ranks)
    (folder / f"{rank}.json").write_text(json.dumps(measure(run, folder, rank)))
    if run.ranks:
        distributed.destroy_process_group()


def result_of(run: Run) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        folder = Path(path)
        spawn(process, (run, folder), nprocs=max(1, run.ranks))  # type: ignore[no-untyped-call]
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(max(1, run.ranks))]
        with wc.Subscriber(folder / "channel", folder / "mirror") as subscriber:
            subscriber.sync()
            assert subscriber.position is not None
            assert subscriber.position.digest == found[0]["head"]
    elements = run.layers * (WIDTH + 1) * WIDTH
    shard = 2 * elements / len(found)
    turns = [[one["rows"][turn] for one in found] for turn in range(run.steps)]
    slowest = {
        what: median(max(row[what] for row in turn) for turn in turns) for what in ("hooks", "publish", "commit")
    }
    per_rank = partial(_per_rank, [one["rows"] for one in found])
    return {
        "ranks": run.ranks,
        "hooks, s": round(slowest["hooks"], 3),
        "publish, s": round(slowest["publish"], 3),
        "commit, s": round(slowest["commit"], 3),
        "bytes": int(median(turn[0]["bytes"] for turn in turns)),
        "bits a change": round(8 * sum(t[0]["bytes"] for t in turns) / sum(t[0]["changed"] for t in turns), 3),
        "rank 0 sent": per_rank("sent")[0],
        "rank 0 received": per_rank("received")[0],
        "others sent": max(per_rank("sent")[1:], default=0),
        "others received": max(per_rank("received")[1:], default=0),
        "rank 0 requests": per_rank("requests")[0],
        "others requests": max(per_rank("requests")[1:], default=0),
        "shard, MB": round(shard / 1e6, 1),
        "peak opening, MB": round(max(one["opening"] for one in found) / 1e6, 1),
        "peak publishing, MB": round(max(one["publishing"] for one in found) / 1e6, 1),
        "head": found[0]["head"],
    }


def _per_rank(ranks: Sequence[Sequence[dict[str, float]]], what: str) -> list[int]:
    return [int(median(row[what] for row in rows)) for rows in ranks]


LARGE = (("8B", 8.0e9, 8, 291), ("405B", 405e9, 64, 1137), ("1T, mixture", 1e12, 256, 70_000))
"""Name, parameters, GPUs, tensors of the checkpoint: Llama 3's two sizes, and a mixture whose experts are apart."""


def estimates(rows: Sequence[dict[str, Any]], tensors: int) -> list[dict[str, object]]:
    """On paper. The sums take 16 bytes a tensor of each rank, less its own part; the rest is names and small facts."""

    def sums(its: int, ranks: int) -> float:
        return 16 * its * (ranks - 1) / ranks

    few, many = rows[-2], rows[-1]
    said = many["others sent"] - sums(tensors, many["ranks"])
    small = [row["others received"] - sums(tensors, row["ranks"]) for row in (few, many)]
    name = (small[1] - small[0]) / (many["ranks"] - few["ranks"])
    rest = small[1] - name * many["ranks"]
    found = []
    for model, parameters, ranks, its in LARGE:
        changed = 0.01 * parameters / ranks
        # The manifest goes to all by itself, or in parts: then every rank passes on a part of it to all.
        manifest, in_parts = name * ranks, name * ranks * (ranks - 1) > DIRECT
        passed = manifest if in_parts else 0
        answers = (rest if in_parts else rest + manifest) * (ranks - 1)
        found.append(
            {
                "model": model,
                "ranks": ranks,
                "object of a rank, MB": round(changed * many["bits a change"] / 8e6, 1),
                "a rank sends, kB": round((sums(its, ranks) + said + passed) / 1e3, 1),
                "a rank receives, kB": round((sums(its, ranks) + rest + manifest) / 1e3, 1),
                "rank 0 receives, kB": round((sums(its, ranks) + said * (ranks - 1) + passed) / 1e3, 1),
                "rank 0 sends, kB": round((sums(its, ranks) + answers + 2 * passed) / 1e3, 1),
                "requests": ranks * many["others requests"] + many["rank 0 requests"] - many["others requests"],
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=40e6)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each rank's publisher")
    parser.add_argument("--held", action="store_true", help="give freed memory back at once; slower")
    given = parser.parse_args()
    if given.held:  # else glibc raises this to the largest that was freed, up to 32 MB, and keeps twice as much
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "262144"
    layers = max(1, round(given.parameters / (WIDTH * (WIDTH + 1))))
    runs = [Run(layers, ranks, given.steps, given.threads) for ranks in (0, *sorted(given.ranks))]
    rows = []
    for run in runs:
        rows.append(result_of(run))
        print(rows[-1], file=sys.stderr, flush=True)
    assert len({row.pop("head") for row in rows}) == 1
    for row in rows:
        row["to unsharded"] = round(row["bytes"] / rows[0]["bytes"], 5)
    print(table(rows), file=sys.stderr)
    print(
        json.dumps(
            {
                "parameters": layers * (WIDTH + 1) * WIDTH,
                "threads": given.threads,
                "rows": rows,
                "estimates": estimates(rows, 2 * layers) if max(given.ranks) > 2 else [],
            },
            indent=1,
        )
    )
    if max(row["to unsharded"] for row in rows) > 1.02:
        sys.exit("the objects take over 2 % more than the unsharded one")


if __name__ == "__main__":
    main()
