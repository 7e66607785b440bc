"""`weightcast estimate` against syncs that are measured, phase by phase, in one run.

    python tests/support/rgw.py -- python benchmarks/estimate_check.py [--scale 1.0] [--rounds 4] [--full 1000:2]

The model of `speed.py`: 596 M bf16 parameters, of which every version changes 1 %. A publisher and a follower that
holds arrays, in one process; an S3 at AWS_ENDPOINT_URL, here a Ceph RGW, in which a bucket is made; links of a given
rate and delay to it and from it (`shaped_link.py`). Each round measures this machine's rates, as the command does
without `--rates`, then small requests through the links, and then publishes two versions with each codec: so both sides
are measured under the same load. Of both the shortest counts, phase by phase: the one least disturbed. `--full` also
moves a whole checkpoint over a link. Prints JSON; a table goes to stderr, with the
estimate as a multiple of what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from links import full_copy, link, link_to, make_bucket
from speed import qwen3_shapes, synthesise

import weightcast as wc
from weightcast.errors import MissingError
from weightcast.estimate.measure import measure
from weightcast.estimate.model import Fleet, Links, Method, Model, estimate
from weightcast.estimate.rates import CODECS, PHASES, Rates, Work
from weightcast.store.base import Store

POLL = 0.02
NAMES: dict[str, Method] = {"plain": "TRL's encoding", "gap": "gap", "banded": "banded"}
SMALL = 9
"""Requests from which the latency is taken."""


def latencies(writer: Store, reader: Store) -> tuple[float, float]:
    """Seconds of a small upload, and of a question for what is not there; medians."""
    puts, gets = [], []
    for _ in range(SMALL):
        began = time.perf_counter()
        writer.put("latency", b"x" * 300)
        puts.append(time.perf_counter() - began)
        began = time.perf_counter()
        try:
            reader.get("nothing", 0, 1)
        except MissingError:
            gets.append(time.perf_counter() - began)
    writer.delete("latency")
    return median(puts), median(gets)


def synced(
    codec: wc.CodecName, writer: Store, reader: Store, held: wc.Arrays, states: list[wc.Arrays], threads: int | None
) -> list[dict[str, float]]:
    """The phases of two versions; the states follow each other in turn. The version before them does not count."""
    events: list[wc.Event] = []
    totals: dict[int, dict[str, float]] = {}
    publisher = wc.Publisher(writer, states[1], codec=codec, threads=threads, on_event=events.append)
    with publisher, wc.Subscriber(reader, held, threads=threads, on_event=events.append) as subscriber:
        subscriber.sync()
        for number in range(3):
            states.reverse()
            began = time.perf_counter()
            manifest = publisher.publish(weights=states[1]).result()
            committed = time.perf_counter()
            subscriber.sync()
            if number:
                live = time.perf_counter() - began
                totals[manifest.position.version] = {"all": live, "until committed": committed - began}
                totals[manifest.position.version]["bytes"] = manifest.nbytes
    for event in events:
        if event.version in totals:
            totals[event.version][event.phase] = event.seconds
    return list(totals.values())


def least(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The shortest of each phase."""
    return {name: min(one[name] for one in found) for name in found[0]}


def least_rates(found: Sequence[Rates], model: Model) -> Rates:
    """Of each phase the rates of the round in which it would take this model least."""

    def best(codec: str, phase: str) -> Work:
        works = [one.work(codec, phase) for one in found]
        return min(works, key=lambda work: work.seconds(model.parameters, model.changes, model.tensors))

    codecs = {codec: {phase: best(codec, phase) for phase in PHASES} for codec in CODECS}
    simple = {name: min(getattr(one, name) for one in found) for name in ("copy", "digest", "sha256", "disk")}
    return replace(found[0], codecs=codecs, **simple)


def measured(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    before, after = synthesise(qwen3_shapes(options.scale))
    states = [after, before]  # the last one is what the channel has
    changed = wc.diff(before, after).changed
    model = Model(before.table.elements, 2, changed / before.table.elements, len(before.table))
    bucket, endpoint = make_bucket("estimate"), os.environ["AWS_ENDPOINT_URL"]
    wc.init(bucket + "/channel", before)
    held, results = wc.Arrays.copy_of(before), dict[str, object]()
    for mbit, ms in options.links:
        found: dict[str, list[dict[str, float]]] = defaultdict(list)
        rates, asked, load = [], [], []
        copied: dict[str, object] = {}
        with ExitStack() as opened:
            writer, reader = (opened.enter_context(link_to(endpoint, bucket + "/channel", mbit, ms)) for _ in range(2))
            for _ in range(options.rounds):
                load.append(os.getloadavg()[0])
                rates.append(measure(options.threads))
                asked.append(latencies(writer, reader))
                for codec in ("plain", "gap", "banded"):
                    found[codec] += synced(codec, writer, reader, held, states, options.threads)
                print(mbit, ms, {codec: least(rows) for codec, rows in found.items()}, file=sys.stderr, flush=True)
            if (mbit, ms) in options.full:
                copied = full_copy(writer, reader, before, folder)
                writer.delete("full")
        assert wc.fingerprint(held) == wc.fingerprint(states[1])
        put, get = (min(one[i] for one in asked) for i in range(2))
        rate = mbit * 1e6 / 8
        links = Links(rate, rate, rate, rate, latency=get, write_latency=put)
        used = least_rates(rates, model)
        rows = {
            codec: compared(least(found[codec]), NAMES[codec], model, links, used)
            for codec in ("plain", "gap", "banded")
        }
        if copied:
            phases = estimate("full copies", model, Fleet(every=0), links, used).phases
            there = sum(phases[name] for name in ("upload", "fetch"))
            rows["full copies"] = {"upload and fetch": [copied["seconds"], round(there, 3)]}  # type: ignore[dict-item]
        results[f"{mbit:g} Mbit/s, {ms:g} ms"] = {"load": load, "put": put, "get": get, "rows": rows}
        print(table(rows), file=sys.stderr, flush=True)
    return {
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "parameters": model.parameters,
        "changed": changed,
        "every_bit_equal": True,
        "links": results,
    }


def compared(
    found: dict[str, float], method: Method, model: Model, links: Links, rates: Rates
) -> dict[str, tuple[float, float]]:
    """Measured and estimated, by phase; `all` is without the pause between two questions."""
    made = estimate(method, model, Fleet(every=0), links, rates)
    phases = dict(made.phases)
    phases.setdefault("verify", rates.work("plain", "verify").seconds(model.parameters, model.changes, model.tensors))
    rows = {name: (found[name], phases[name]) for name in phases if name in found}
    rows["all"] = found["all"], sum(phases[name] for name in rows)
    rows["bytes"] = found["bytes"], made.nbytes
    return {name: (round(a, 5), round(b, 5)) for name, (a, b) in rows.items()}


def table(rows: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Measured, estimated and their ratio; a column for each codec."""
    names = dict.fromkeys(name for found in rows.values() for name in found)
    lines = [f"| | {' | '.join(rows)} |", "|---" * (len(rows) + 1) + "|"]
    for name in names:
        cells = [_cell(*found[name]) if name in found else "" for found in rows.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(found: float, estimated: float) -> str:
    if found > 1000:
        return f"{found:,.0f}, {estimated:,.0f}: {estimated / found:.2f}"
    return f"{1000 * found:,.1f} ms, {1000 * estimated:,.1f}: {estimated / max(found, 1e-9):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--links", type=link, nargs="+", default=[(100.0, 20.0), (1000.0, 2.0)])
    parser.add_argument("--full", type=link, nargs="*", default=[])
    options = parser.parse_args()
    wc.warm_up()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measured(options, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
