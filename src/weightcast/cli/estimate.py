"""`weightcast estimate PARAMETERS`"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from weightcast.cli.console import prepare_kernels, say, tell, writing_to
from weightcast.cli.options import Force, Threads
from weightcast.cli.text import Column, Table
from weightcast.cli.wording import brief, count, rate_of, seconds, size, span
from weightcast.disk.durable import replacing
from weightcast.errors import UsageError
from weightcast.estimate.model import (
    ASSUMPTIONS,
    Estimate,
    Fleet,
    Links,
    Method,
    Model,
    Prices,
    broadcast_break_even,
    estimates,
    join,
    sooner,
)
from weightcast.estimate.rates import MAX_BYTES, Rates, dump, load, to_json

ITEMSIZES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1}


def estimate(
    parameters: Annotated[str, typer.Argument(metavar="PARAMETERS", help="Of the model: 596M, 7.6B, 1T.")],
    density: Annotated[
        float, typer.Option(min=0.0001, max=90, metavar="PERCENT", help="Elements that change from step to step.")
    ] = 1.0,
    dtype: Annotated[
        Literal["BF16", "F16", "F8_E4M3", "F8_E5M2", "F32"] | None, typer.Option(help="On the wire; BF16 by default.")
    ] = None,
    training: Annotated[
        Literal["fp32", "wire"] | None,
        typer.Option(
            help="What the optimizer updates: fp32 masters, as by default, or parameters in the wire's dtype."
        ),
    ] = None,
    tensors: Annotated[int, typer.Option(min=1, max=10_000_000, help="Of the checkpoint.")] = 400,
    ranks: Annotated[int, typer.Option(min=1, max=1_000_000, help="Processes of the trainer.")] = 1,
    workers: Annotated[int, typer.Option(min=1, max=1_000_000, help="Processes of each replica's engine.")] = 1,
    replicas: Annotated[int, typer.Option(min=1, max=10_000_000, help="Engines that follow.")] = 1,
    regions: Annotated[int, typer.Option(min=1, max=10_000, help="Each but the first has a copy of the bucket.")] = 1,
    up: Annotated[str, typer.Option(metavar="RATE", help="Bytes per second from the trainer to the bucket.")] = "1GB/s",
    down: Annotated[str, typer.Option(metavar="RATE", help="From a bucket to one replica.")] = "1GB/s",
    between: Annotated[str, typer.Option(metavar="RATE", help="From region to region.")] = "500MB/s",
    fabric: Annotated[
        str, typer.Option(metavar="RATE", help="Of the network for a broadcast between trainer and engines.")
    ] = "50GB/s",
    latency: Annotated[
        float, typer.Option(min=0, max=3600, metavar="SECONDS", help="Of a small request to a bucket.")
    ] = 0.02,
    every: Annotated[
        float, typer.Option(min=0, max=86400, metavar="SECONDS", help="Between a replica's questions for news.")
    ] = 1.0,
    step_time: Annotated[
        str | None, typer.Option(metavar="TIME", help="Of a training step with a sync: 90s, 2m. Adds costs per hour.")
    ] = None,
    egress_price: Annotated[
        float, typer.Option(min=0, max=1e6, metavar="PRICE", help="For a gigabyte that leaves a region.")
    ] = 0.0,
    request_price: Annotated[
        float, typer.Option(min=0, max=1e6, metavar="PRICE", help="For 1,000 requests to buckets.")
    ] = 0.0,
    rates: Annotated[
        str | None,
        typer.Option("--rates", metavar="FILE", help="Seconds of each phase; by default this machine is measured."),
    ] = None,
    save_rates: Annotated[
        Path | None, typer.Option("--save-rates", metavar="FILE", help="Write the rates to a file, for --rates.")
    ] = None,
    force: Force = False,
    threads: Threads = None,
) -> None:
    """Estimate what a sync costs: full copies, a broadcast, TRL's encoding, and weightcast.

    Nothing is sent. Without --rates this machine's rates are measured first, which takes some seconds.
    """
    model = Model(_parameters(parameters), ITEMSIZES[dtype or "BF16"], density / 100, tensors, training or "fp32")
    fleet = Fleet(ranks, workers, replicas, regions, every)
    links = Links(rate_of(up), rate_of(down), rate_of(between), rate_of(fabric), latency)
    prices = Prices(egress_price, request_price)
    step = _step(step_time) if step_time is not None else None
    if save_rates is not None:
        _check_place(save_rates, force, [Path(rates)] if rates is not None else [])
    used = _read(Path(rates)) if rates is not None else _measured(threads)
    if save_rates is not None:
        with writing_to(save_rates), replacing(save_rates) as file:
            file.write(f"{dump(used)}\n".encode())
    found = estimates(model, fleet, links, used)
    tell(_fields(model, fleet, links, prices, step, used, found))
    say(_costs(found, prices, step))
    say("")
    say(_phases(found))
    say("")
    for line in _conclusions(model, fleet, links, used, found, step):
        say(line)
    say(f"estimates, from rates of {used.hardware}, {count(used.threads, 'thread')}:")
    for assumption in ASSUMPTIONS:
        say(f"- {assumption}")


def _parameters(text: str) -> int:
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?) ?([KMBTkmbt]?)", text, re.ASCII)
    number = round(float(found[1]) * 1000 ** " kmbt".index(found[2].lower() or " ")) if found else 0
    if not 1 <= number <= 10**15:
        hint = "Write 596M, 7.6B or 1T; at most 1000T."
        raise UsageError(f"{text[:100]!r} is not a number of parameters", hint=hint)
    return number


def _step(text: str) -> float:
    step = seconds(text)
    if not step:
        raise UsageError("a training step takes some time", hint="Write 90s or 2m.")
    return step


def _read(path: Path) -> Rates:
    with path.open("rb") as file:
        return load(file.read(MAX_BYTES + 1))


def _check_place(out: Path, force: bool, inputs: list[Path]) -> None:
    from weightcast.cli.outputs import check_folder, check_output  # knows checkpoints, which needs numpy

    check_folder(out)
    check_output(out, force, inputs)


def _measured(threads: int | None) -> Rates:
    from weightcast.estimate.measure import measure  # needs numpy and the kernels, which given rates do not

    prepare_kernels()
    return measure(threads)


# -- what is shown -----------------------------------------------------------------------------------------------------


def _fields(
    model: Model,
    fleet: Fleet,
    links: Links,
    prices: Prices,
    step: float | None,
    rates: Rates,
    found: dict[Method, Estimate],
) -> dict[str, Any]:
    live, pause = broadcast_break_even(model, sooner(found))
    return {
        "model": asdict(model),
        "fleet": asdict(fleet),
        "links": asdict(links),
        "prices": asdict(prices),
        "step_seconds": step,
        "rates": to_json(rates),
        "methods": {method: _method(one, prices) for method, one in found.items()},
        "join_seconds": join(model, fleet, links, rates),
        "broadcast_is_sooner_above": live,
        "broadcast_pauses_less_above": pause if pause != float("inf") else None,
        "assumptions": list(ASSUMPTIONS),
    }


def _method(one: Estimate, prices: Prices) -> dict[str, Any]:
    names = ("egress", "requests", "trainer_memory", "replica_memory", "busiest")
    return {
        "bytes": one.nbytes,
        "seconds": one.seconds,
        "pause": one.pause,
        "phases": dict(one.phases),
        **{name: getattr(one, name) for name in names},
        "money": one.money(prices),
    }


def _costs(found: dict[Method, Estimate], prices: Prices, step: float | None) -> Table:
    priced = bool(prices.egress or prices.requests)
    hourly = "per hour" if step else "money"
    table = Table(
        Column("", left=True),
        "bytes",
        "live after",
        "paused",
        "egress",
        hourly if priced else "",
        "requests",
        "memory: a rank",
        "a worker",
    )
    for method, one in found.items():
        money = one.money(prices) * (3600 / step if step else 1)
        table.add(
            _title(method),
            size(one.nbytes),
            _time(one.seconds),
            _time(one.pause),
            size(one.egress),
            f"{money:,.4g}" if priced else "",
            f"{one.requests:,.0f}",
            size(one.trainer_memory),
            size(one.replica_memory),
        )
    return table


def _title(method: Method) -> str:
    return f"weightcast {method}" if method in ("gap", "banded") else method


def _time(value: float) -> str:
    return brief(value) if value >= 0.0995 else f"{1000 * value:.3g} ms"


def _phases(found: dict[Method, Estimate]) -> Table:
    """Seconds by phase; a column for each method."""
    names = dict.fromkeys(name for one in found.values() for name in one.phases)
    order = ["copy", *found["banded"].phases, *names]
    table = Table(Column("phase", left=True), *map(_title, found))
    for name in sorted(names, key=order.index):
        table.add(name, *(_time(one.phases[name]) if name in one.phases else "" for one in found.values()))
    return table


def _conclusions(
    model: Model, fleet: Fleet, links: Links, rates: Rates, found: dict[Method, Estimate], step: float | None
) -> list[str]:
    best = sooner(found)
    live, pause = broadcast_break_even(model, best)
    lines = [
        f"{_title(best.method)} is live soonest of ours; the busiest bucket serves {size(best.busiest)} a version",
        f"a broadcast is live sooner on a fabric of more than {size(live)}/s, and pauses less above {size(pause)}/s",
        f"a replica that joins fetches {size(model.nbytes)}, in {span(join(model, fleet, links, rates))}",
    ]
    if step:
        lines += [_pace(_title(method), one, step) for method, one in found.items()]
    return lines


def _pace(name: str, one: Estimate, step: float) -> str:
    """What a method does to a training whose steps take so long."""
    share = _plain(100 * one.pause / step)
    paused = f"replicas pause {share} % of the time" if one.pause < step else "replicas only pause"
    return f"{name}: weights are {_plain(one.seconds / step)} steps old when they are live; {paused}"


def _plain(value: float) -> str:
    """Two digits or more, and no exponent."""
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.2g}"
