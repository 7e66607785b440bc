"""A simulated fleet of a trillion-parameter model: what buckets see, how far behind replicas are, what a join costs.

    python benchmarks/fleet_sim.py [--hours 4] [--anchors 2] [--seed 1] [--svg FILE]
    python benchmarks/fleet_sim.py --check [--followers 30] [--versions 25] [--away 60]

Discrete events (`sim_core.py`), on channels whose objects have sizes and no bytes (`sim_bucket.py`). Where a replica
goes, by which route, what a copy lacks, which squashes are due and what is deleted is decided by the project's own
functions: `channel/policy.py`, `follow/planner.py` and `channel/route.py`, `upkeep/copy_plan.py`,
`channel/retention.py`. When a reader leaves a copy and comes back follows the rules of `channel/nearest.py`, written
again, since that reads from real stores. Sizes and seconds are those of `weightcast estimate` with the rates of
`docs/guides/rates/h200.json`; a run depends on its seed alone.

`--check` runs `fleet.py --unsigned` (two copies, 30 followers in processes of their own), takes from that run the times
of its start, commits and outage and the sizes of its objects, simulates it, and prints requests and bytes of each
bucket beside those that were counted. Both print JSON, and a table to stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from catchup import table
from sim_fleet import Fleet, Group, Scenario
from sim_svg import plot

from weightcast.channel.edge import Edge
from weightcast.channel.retention import Retention
from weightcast.estimate import model as costs
from weightcast.estimate.bits import bits_per_change
from weightcast.estimate.rates import load

RATES = Path(__file__).parents[1] / "docs" / "guides" / "rates" / "h200.json"
MODEL = costs.Model(10**12, 2, 0.01, 70_000)
RANKS, WORKERS = 256, 16
REGIONS = ("us", "eu", "ap", "sa", "af")
"""The first has the home; the third one's bucket goes away."""
STEP = 120.0
"""Seconds between versions."""
MINUTE, HOUR, GB = 60.0, 3600.0, 1e9
JOIN_AT, AWAY_AT, AWAY = HOUR, 1.5 * HOUR, 10 * MINUTE

UNION = ((1, 1.10), (8, 5.90), (24, 12.63), (512, 45.0))
"""Per cent of the weights that differ over so many steps: RESULTS, Catching up."""


def density_over(steps: int) -> float:
    """The share of the weights that differ over so many steps, between the measured ones on straight lines of logs."""
    known = [(math.log(many), math.log(share / UNION[0][1] * MODEL.density)) for many, share in UNION]
    at = math.log(steps)
    pairs = list(pairwise(known))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if at <= pair[1][0]), pairs[-1])
    return min(0.9, math.exp(y0 + (y1 - y0) * (at - x0) / (x1 - x0)))


def squash_bytes(steps: int) -> int:
    """A merged patch is coded with `gap`."""
    density = density_over(steps)
    return round(MODEL.parameters * density * bits_per_change("gap", density) / 8)


class Compute:
    """Seconds of a replica for an edge, by the estimate's rates."""

    def __init__(self) -> None:
        self._rates = load(RATES.read_bytes())

    def __call__(self, edge: Edge) -> float:
        if edge.base is None:
            return MODEL.parameters * self._rates.digest / WORKERS + MODEL.nbytes * self._rates.copy / WORKERS
        steps = edge.result - edge.base
        codec = "banded" if edge.kind == "delta" else "gap"
        changes = MODEL.parameters * (MODEL.density if edge.kind == "delta" else density_over(steps)) / WORKERS
        phases = ("decode", "verify", "stage", "apply")
        elements = MODEL.parameters / WORKERS
        return sum(self._rates.work(codec, phase).seconds(elements, changes, MODEL.tensors) for phase in phases)


def trillion(hours: float, seed: int, anchors: float = 2.0) -> Scenario:
    """A trainer of 256 ranks, a thousand replicas of 16 processes in five regions; an anchor every so many hours."""
    delta = costs.nbytes_of("banded", MODEL, RANKS)
    horizon = hours * HOUR
    others = REGIONS[1:]
    return Scenario(
        commits=tuple((STEP * number, delta) for number in range(1, int(horizon / STEP))),
        model_bytes=MODEL.nbytes,
        squash_bytes=squash_bytes,
        compute=Compute(),
        groups=(Group("us", 200, ("home",)), *(Group(name, 200, (name, "home")) for name in others)),
        capacities={"home": 125 * GB, **dict.fromkeys(others, 125 * GB)},
        up=20 * GB,
        upkeep=2.5 * GB,
        between=2.5 * GB,
        links=((0.05, 0.125 * GB), (0.15, 0.625 * GB), (0.8, 3.125 * GB)),
        horizon=horizon,
        objects=RANKS,
        squash_every=MINUTE,
        anchor_every=anchors * HOUR or None,
        collect_every=0.5 * HOUR,
        retention=Retention(window=1.5 * HOUR, grace=15 * MINUTE, patience=12 * HOUR),
        joins=((JOIN_AT, 50),),
        mean_life=24 * HOUR,
        outages=((REGIONS[2], AWAY_AT, AWAY),),
        seed=seed,
    )


# -- what is reported --------------------------------------------------------------------------------------------------


def report(fleet: Fleet) -> dict[str, Any]:
    return {
        "buckets": buckets(fleet),
        "behind": lag(fleet),
        "delays": quantiles(fleet.delays),
        "joins": joins(fleet),
        "versions": max(fleet.committed),
        "home_peak_TB": round(max(nbytes for _, nbytes in fleet.stored) / 1e12, 1),
        "home_end_TB": round(fleet.stored[-1][1] / 1e12, 1),
    }


def buckets(fleet: Fleet) -> list[dict[str, object]]:
    """What each bucket has seen; peaks are means over ten seconds."""
    rows = []
    for bucket in fleet.buckets.values():
        rates, asked = (bins.rates(fleet.scenario.horizon) for bins in (bucket.server.bins, bucket.requests))
        rows.append(
            {
                "bucket": bucket.name,
                "TB": round(bucket.server.bins.total / 1e12, 1),
                "GB/s, mean": round(sum(rates) / len(rates) / GB, 1),
                "GB/s, peak": round(max(rates) / GB, 1),
                "requests": sum(bucket.asked.values()),
                "a second, mean": round(sum(asked) / len(asked)),
                "a second, peak": round(max(asked)),
            }
        )
    return rows


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Seconds: the middle, of a hundred the last but one, and the last."""
    found = sorted(values)
    picked = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "most": 1.0}
    return {name: round(found[min(len(found) - 1, int(part * len(found)))], 1) for name, part in picked.items()}


def lag(fleet: Fleet) -> list[dict[str, object]]:
    """How old the oldest version is that replicas lack, by part of the run."""
    horizon = fleet.scenario.horizon
    parts = (
        ("before", 0.0, JOIN_AT),
        ("50 join", JOIN_AT, AWAY_AT),
        ("a bucket is away", AWAY_AT, AWAY_AT + AWAY),
        ("after it", AWAY_AT + AWAY, 2 * HOUR),
        ("an anchor is copied", 2 * HOUR, 3 * HOUR),
        ("rest", 3 * HOUR, horizon),
    )
    rows: list[dict[str, object]] = []
    for name, begin, end in parts:
        ages = [one for when, some in fleet.behind for one in some if begin <= when < end]
        if ages:
            seconds = {f"{key}, s": value for key, value in quantiles(ages).items()}
            rows.append({"": name, "minutes": f"{begin / 60:.0f} – {end / 60:.0f}", **seconds})
    return rows


def joins(fleet: Fleet) -> dict[str, object]:
    found = fleet.joined
    return {
        "number": len(found),
        "not at an end": sum(replica.is_up and replica.at is None for replica in fleet.replicas),
        "seconds": quantiles([one.seconds for one in found]),
        "TB": quantiles([one.nbytes / 1e12 for one in found]),
        "requests": quantiles([one.requests for one in found]),
        "versions meanwhile": quantiles([float(one.versions) for one in found]),
    }


def save_plot(fleet: Fleet, path: Path) -> None:
    """Two panels: what buckets serve, as means over two steps; and how far behind replicas are, most in a minute."""
    width = fleet.scenario.bin
    served, ages = round(2 * STEP / width), round(MINUTE / width)
    rates = {
        bucket.name: _chunks([rate / GB for rate in bucket.server.bins.rates(fleet.scenario.horizon)], served)
        for bucket in fleet.buckets.values()
    }
    behind = {
        name: _chunks([some[min(len(some) - 1, int(part * len(some)))] / 60 for _, some in fleet.behind], ages)
        for name, part in (("half of the replicas", 0.5), ("99 of 100", 0.99), ("the slowest", 1.0))
    }
    means = {name: [sum(some) / len(some) for some in found] for name, found in rates.items()}
    most = {name: [max(some) for some in found] for name, found in behind.items()}
    path.write_text(plot([("Bytes served, GB/s", 2 * STEP / 60, means), ("Behind, minutes", 1.0, most)]))


def _chunks(line: Sequence[float], every: int) -> list[Sequence[float]]:
    return [line[i : i + every] for i in range(0, len(line), every)]


# -- the check ---------------------------------------------------------------------------------------------------------


def same_fleet(found: dict[str, Any], followers: int) -> Scenario:
    """The scenario of a run of `fleet.py`: its times, and the sizes of its objects."""
    times = found["times"]
    half = followers // 2
    away, begun = times["away"], times["followers start"]
    return Scenario(
        commits=tuple(zip(found["commits"], found["delta_bytes"], strict=True)),
        model_bytes=found["anchor_bytes"],
        squash_bytes=lambda steps: 0,
        compute=lambda edge: 0.1,
        groups=(
            Group("near east", half, ("east", "west", "home")),
            Group("near west", followers - half, ("west", "east", "home")),
        ),
        capacities=dict.fromkeys(("home", "east", "west"), 1e9),
        up=1e9,
        upkeep=1e9,
        between=1e9,
        links=((1.0, 1e8),),
        horizon=times["end"],
        every=2.0,
        joins=((begun, followers),),
        join_spread=times["followers begun"] - begun,
        copies_are_begun=False,
        outages=(("east", away, times["back"] - away),),
    )


def check(options: argparse.Namespace) -> dict[str, Any]:
    """A real run beside a simulated one."""
    import fleet as real

    import weightcast as wc

    wc.warm_up()
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = real.measure(options, Path(folder))
    simulated = Fleet(same_fleet(found, options.followers))
    simulated.run()
    rows = []
    for name, bucket in simulated.buckets.items():
        counted = found["served"][name]
        objects = sum(counted[kind][1] for kind in ("deltas", "anchors"))
        row: dict[str, object] = {"bucket": name, "bytes": objects, "simulated": sum(bucket.served.values())}
        for kind in ("deltas", "anchors", "manifests", "other"):
            row |= {kind: counted[kind][0], f"{kind}, simulated": bucket.asked[kind]}
        rows.append(row)
    return {"rows": rows, "run": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=4.0)
    parser.add_argument("--anchors", type=float, default=2.0, help="hours between two anchors; 0 for none")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--svg", type=Path, default=None, help="where to draw the run")
    parser.add_argument("--check", action="store_true", help="simulate a real run of the small fleet")
    parser.add_argument("--followers", type=int, default=30)
    parser.add_argument("--versions", type=int, default=25)
    parser.add_argument("--every", type=float, default=6.0)
    parser.add_argument("--away", type=float, default=60.0)
    parser.add_argument("--elements", type=int, default=1 << 21)
    parser.set_defaults(unsigned=True)
    options = parser.parse_args()
    if options.check:
        checked = check(options)
        print(table(checked["rows"]), file=sys.stderr)
        print(json.dumps(checked, indent=1))
        return
    began = time.process_time()
    fleet = Fleet(trillion(options.hours, options.seed, options.anchors))
    fleet.run()
    found = report(fleet)
    found["cpu_seconds"] = round(time.process_time() - began, 1)
    found["memory_MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000
    print(table(found["buckets"]), table(found["behind"]), sep="\n", file=sys.stderr)
    print(json.dumps(found, indent=1))
    if options.svg is not None:
        save_plot(fleet, options.svg)


if __name__ == "__main__":
    main()
