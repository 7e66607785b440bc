"""`weightcast estimate` against syncs that are measured, phase by phase, in one run.

    python tests/support/rgw.py -- python benchmarks/estimate_check.py [--scale 1.0] [--rounds 2] [--full 1000:2]

The model of `speed.py`: 596 M bf16 parameters, of which every version changes 1 %. A publisher and a follower that
holds arrays, in one process.

Phases that compute are measured through memory, in seconds of the processor, all threads of the process together, so
that other work on the machine counts little; each round measures the rates first, as the command does without
`--rates`, by the same clock. Phases of the links are measured in seconds, with an S3 at AWS_ENDPOINT_URL, here a Ceph
RGW, in which a bucket is made, over links of a given rate and delay (`shaped_link.py`); the latency of small requests
is measured right before. Of repeated measurements the shortest counts, on both sides. `--full` also moves a whole
checkpoint over a link. Prints JSON; a table goes to stderr, with the estimate as a multiple of what was measured.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

from links import full_copy, link, link_to, make_bucket
from speed import qwen3_shapes, synthesise

import weightcast as wc
from weightcast.errors import MissingError
from weightcast.estimate.measure import measure
from weightcast.estimate.model import Fleet, Links, Method, Model, estimate, nbytes_of
from weightcast.estimate.rates import CODECS, PHASES, Rates, Work
from weightcast.store.backoff import CLOCK
from weightcast.store.base import Store
from weightcast.store.memory import MemoryStore

COMPUTING, LINKED = PHASES, ("upload", "commit", "find", "fetch")
NAMES: dict[wc.CodecName, Method] = {"plain": "TRL's encoding", "gap": "gap", "banded": "banded"}
SMALL = 9
"""Requests from which the latency is taken."""


@contextmanager
def processor_clock() -> Iterator[None]:
    """Phases are timed in seconds of the processor meanwhile."""
    CLOCK.now = time.process_time  # type: ignore[method-assign]
    try:
        yield
    finally:
        del CLOCK.now


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
    states, held = [after, before], wc.Arrays.copy_of(before)  # the last one is what the channel has
    changed = wc.diff(before, after).changed
    model = Model(before.table.elements, 2, changed / before.table.elements, len(before.table))
    load = [os.getloadavg()[0]]
    computed, rates = computing(model, states, held, options)
    print(table(computed), file=sys.stderr, flush=True)
    results: dict[str, object] = {}
    for mbit, ms in options.links:
        load.append(os.getloadavg()[0])
        rows = over_link(mbit, ms, model, states, held, rates, options, folder)
        results[f"{mbit:g} Mbit/s, {ms:g} ms"] = rows
        print(mbit, ms, table(rows), sep="\n", file=sys.stderr, flush=True)
    return {
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": load,
        "parameters": model.parameters,
        "changed": changed,
        "every_bit_equal": wc.fingerprint(held) == wc.fingerprint(states[1]),
        "processor seconds": computed,
        "links": results,
    }


Rows = dict[str, dict[str, tuple[float, float]]]
"""By codec and phase, measured and estimated."""


def computing(
    model: Model, states: list[wc.Arrays], held: wc.Arrays, options: argparse.Namespace
) -> tuple[Rows, Rates]:
    """What does not depend on a link, in seconds of the processor."""
    store, found, rates = MemoryStore(), defaultdict[str, list[dict[str, float]]](list), []
    wc.init(store, states[1])
    with processor_clock():
        for _ in range(options.rounds):
            rates.append(measure(options.threads))
            for codec in NAMES:
                found[codec] += synced(codec, store, store, held, states, options.threads)
    used = least_rates(rates, model)
    rows: Rows = {}
    for codec in NAMES:
        seconds = least(found[codec])
        rows[codec] = {
            phase: (
                seconds[phase],
                used.work(codec, phase).seconds(model.parameters, model.changes, model.tensors),
            )
            for phase in COMPUTING
        }
        rows[codec]["together"] = (
            sum(a for a, _ in rows[codec].values()),
            sum(b for _, b in rows[codec].values()),
        )
        rows[codec]["bytes"] = seconds["bytes"], nbytes_of(NAMES[codec], model, 1)
    return rows, used


def over_link(
    mbit: float,
    ms: float,
    model: Model,
    states: list[wc.Arrays],
    held: wc.Arrays,
    rates: Rates,
    options: argparse.Namespace,
    folder: Path,
) -> Rows:
    """What depends on a link, in seconds."""
    endpoint, bucket = os.environ["AWS_ENDPOINT_URL"], f"{make_bucket('estimate')}/{mbit:g}-{ms:g}"
    wc.init(bucket, states[1])
    copied: dict[str, object] = {}
    with ExitStack() as opened:
        writer, reader = (opened.enter_context(link_to(endpoint, bucket, mbit, ms)) for _ in range(2))
        asked, every = [latencies(writer, reader)], defaultdict[str, list[dict[str, float]]](list)
        for _ in range(options.rounds):
            for codec in NAMES:
                every[codec] += synced(codec, writer, reader, held, states, options.threads)
                asked.append(latencies(writer, reader))
        found = {codec: least(some) for codec, some in every.items()}
        if (mbit, ms) in options.full:
            copied = full_copy(writer, reader, states[1], folder)
    put, get = (min(one[i] for one in asked) for i in range(2))
    rate = mbit * 1e6 / 8
    links = Links(rate, rate, rate, rate, latency=get, write_latency=put)
    rows: Rows = {}
    for codec in NAMES:
        seconds = found[codec]
        phases = estimate(NAMES[codec], model, Fleet(), links, rates).phases
        rows[codec] = {phase: (seconds[phase], phases[phase]) for phase in LINKED}
    if copied:
        phases = estimate("full copies", model, Fleet(), links, rates).phases
        rows["full copy"] = {"upload and fetch": (float(str(copied["seconds"])), phases["upload"] + phases["fetch"])}
    return rows


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
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--links", type=link, nargs="+", default=[(100.0, 20.0), (1000.0, 2.0)])
    parser.add_argument("--full", type=link, nargs="*", default=[])
    options = parser.parse_args()
    wc.warm_up()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measured(options, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
