"""The phases of a sync, as functions of a model, a fleet, links and rates. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Literal

from weightcast.estimate.bits import FILE_BYTES, TENSOR_BYTES, Training, bits_per_change
from weightcast.estimate.rates import Rates

Method = Literal["full copies", "broadcast", "TRL's encoding", "gap", "banded"]
METHODS: tuple[Method, ...] = ("full copies", "broadcast", "TRL's encoding", "gap", "banded")
"""In the order in which they are shown; the last two are ours."""

UPLOAD_PART, FETCH_PART = 8 << 20, 16 << 20
"""Bytes of a part of an upload, and of a range of a download: larger objects take several requests."""

MEMORY_PER_CHANGE = 40
"""Bytes of host memory for each change, on both sides (benchmarks/RESULTS.md, Memory)."""


@dataclass(frozen=True)
class Model:
    """What is trained, and how much of it changes from one version to the next."""

    parameters: int
    itemsize: int
    """Bytes of an element on the wire."""
    density: float
    """The share of the elements that changes."""
    tensors: int
    training: Training = "fp32"

    @property
    def nbytes(self) -> int:
        return self.parameters * self.itemsize

    @property
    def changes(self) -> float:
        return self.parameters * self.density


@dataclass(frozen=True)
class Fleet:
    """Who sends and who receives."""

    ranks: int = 1
    """Processes of the trainer; each detects, encodes and uploads its part."""
    workers: int = 1
    """Processes of a replica's engine; each decodes and writes its part."""
    replicas: int = 1
    regions: int = 1
    """The first has the trainer's bucket, each other one a copy of it. Replicas are spread evenly."""
    every: float = 1.0
    """Seconds between two questions of a replica for the next version."""

    @property
    def abroad(self) -> float:
        """Replicas outside the first region."""
        return self.replicas * (self.regions - 1) / self.regions


@dataclass(frozen=True)
class Links:
    """Bytes per second, and seconds."""

    up: float
    """From all ranks together to the bucket."""
    down: float
    """From a bucket to one replica."""
    between: float
    """From the bucket to its copy in another region."""
    fabric: float
    """Of a network that trainer and replicas share, for a broadcast."""
    latency: float = 0.02
    """From a small request to its answer: a question, or the first byte of a download."""
    write_latency: float | None = None
    """The same of a small upload, where a bucket takes longer for that."""

    @property
    def writing(self) -> float:
        return self.latency if self.write_latency is None else self.write_latency


@dataclass(frozen=True)
class Prices:
    """In any currency."""

    egress: float = 0.0
    """For 10⁹ bytes that leave a region."""
    requests: float = 0.0
    """For 1,000 requests."""


@dataclass(frozen=True)
class Estimate:
    """What a sync costs with one method."""

    method: Method
    nbytes: int
    """What the trainer sends."""
    phases: Mapping[str, float]
    """Seconds, in their order; each begins when the one before has ended."""
    pause: float
    """Seconds in which a replica generates nothing."""
    egress: float
    """Bytes that leave a region, for all replicas."""
    requests: float
    """To all buckets, for all replicas."""
    trainer_memory: float
    """Bytes of host memory that a rank needs beside its training."""
    replica_memory: float
    """Bytes of host memory that a process of a replica needs beside its engine."""
    busiest: float
    """Bytes that the busiest bucket serves."""

    @property
    def seconds(self) -> float:
        """From the end of a training step until the weights are live."""
        return sum(self.phases.values())

    def money(self, prices: Prices) -> float:
        return self.egress / 1e9 * prices.egress + self.requests / 1000 * prices.requests


def estimate(method: Method, model: Model, fleet: Fleet, links: Links, rates: Rates) -> Estimate:
    """What one sync of all replicas costs."""
    if method == "broadcast":
        return _broadcast(model, fleet, links)
    if method == "full copies":
        return _full_copies(model, fleet, links, rates)
    return _changes(method, model, fleet, links, rates)


def estimates(model: Model, fleet: Fleet, links: Links, rates: Rates) -> dict[Method, Estimate]:
    return {method: estimate(method, model, fleet, links, rates) for method in METHODS}


def nbytes_of(method: Method, model: Model, ranks: int) -> int:
    """The bytes of a version's objects."""
    codec = _codec(method)
    streams = model.changes * bits_per_change(codec, model.density, model.training, model.itemsize) / 8
    return round(streams) + FILE_BYTES * ranks + TENSOR_BYTES * model.tensors


def _codec(method: Method) -> str:
    return "plain" if method == "TRL's encoding" else method


# -- the methods -------------------------------------------------------------------------------------------------------


def _changes(method: Method, model: Model, fleet: Fleet, links: Links, rates: Rates) -> Estimate:
    """What changed, through a bucket; TRL's drafts fetch it while the engine is paused, and ours before."""
    codec, nbytes = _codec(method), nbytes_of(method, model, fleet.ranks)

    def computed(phase: str, processes: int) -> float:
        work = rates.work(codec, phase)
        return work.seconds(model.parameters / processes, model.changes / processes, model.tensors)

    part = nbytes / fleet.ranks
    upload = _moved(part, fleet.ranks, links.up, UPLOAD_PART, links.writing) + part * rates.sha256
    phases = {phase: computed(phase, fleet.ranks) for phase in ("detect", "resolve", "encode")}
    phases |= {"upload": upload, "commit": _commit(links)}
    phases |= _copied(nbytes, fleet, links)
    fetch = max(_moved(nbytes, 1, links.down, FETCH_PART, links.latency), nbytes * rates.sha256)
    phases |= {"wait": fleet.every / 2, "find": 2 * links.latency, "fetch": fetch}
    phases |= {phase: computed(phase, fleet.workers) for phase in ("decode", "verify", "stage", "apply")}
    is_ours = method != "TRL's encoding"
    if is_ours:
        pause = phases["apply"]
    else:
        del phases["verify"], phases["wait"]  # it has no digests, and its trainer calls the engines
        pause = sum(phases[phase] for phase in ("find", "fetch", "decode", "stage", "apply"))
    shadow = model.nbytes if is_ours else 2 * model.nbytes
    return Estimate(
        method,
        nbytes,
        phases,
        pause,
        egress=_egress(nbytes, fleet),
        requests=_requests(nbytes, fleet),
        trainer_memory=(shadow + MEMORY_PER_CHANGE * model.changes) / fleet.ranks,
        replica_memory=(MEMORY_PER_CHANGE * model.changes + (0 if is_ours else model.nbytes)) / fleet.workers,
        busiest=nbytes * max(1.0, fleet.replicas / fleet.regions + fleet.regions - 1),
    )


def _full_copies(model: Model, fleet: Fleet, links: Links, rates: Rates) -> Estimate:
    """A checkpoint through a bucket, loaded while the engine is paused."""
    nbytes = model.nbytes
    part = nbytes / fleet.ranks
    phases = {"copy": part * rates.copy}
    phases["upload"] = _moved(part, fleet.ranks, links.up, UPLOAD_PART, links.writing) + part * rates.sha256
    phases |= {"commit": _commit(links)} | _copied(nbytes, fleet, links) | {"wait": fleet.every / 2}
    phases["find"] = 2 * links.latency
    fetch = _moved(nbytes, 1, links.down, FETCH_PART, links.latency)
    phases["fetch"] = max(fetch, nbytes / fleet.workers * (rates.sha256 + rates.disk))
    phases["load"] = nbytes / fleet.workers * rates.copy
    return Estimate(
        "full copies",
        nbytes,
        phases,
        phases["load"],
        egress=_egress(nbytes, fleet),
        requests=_requests(nbytes, fleet),
        trainer_memory=part,
        replica_memory=0.0,
        busiest=nbytes * max(1.0, fleet.replicas / fleet.regions + fleet.regions - 1),
    )


def _broadcast(model: Model, fleet: Fleet, links: Links) -> Estimate:
    """All weights to all replicas at once, through one network, in a pipeline: its time is that of one copy."""
    rate = links.fabric if fleet.regions == 1 else min(links.fabric, links.between)
    phases = {"broadcast": model.nbytes / rate}
    egress = model.nbytes * (fleet.regions - 1)
    return Estimate("broadcast", model.nbytes, phases, phases["broadcast"], egress, 0.0, 0.0, 0.0, 0.0)


def _moved(nbytes: float, at_once: int, rate: float, part: int, latency: float) -> float:
    """Seconds for an object, of which ``at_once`` share a link. An upload in parts has one to begin and one to end."""
    trips = 1 if nbytes <= part else 3 if part == UPLOAD_PART else 1
    return nbytes * at_once / rate + trips * latency


def _commit(links: Links) -> float:
    """A writer first looks whether it still is the only one: three questions, then the manifest and the hint."""
    return 3 * links.latency + 2 * links.writing


def _copied(nbytes: float, fleet: Fleet, links: Links) -> dict[str, float]:
    """What `weightcast copy` adds for replicas in other regions: it asks every second, fetches, and puts."""
    if fleet.regions == 1:
        return {}
    return {"copy to regions": 0.5 + nbytes / links.between + 2 * links.latency + 3 * links.writing}


def _egress(nbytes: float, fleet: Fleet) -> float:
    return nbytes * (fleet.regions - 1)


def _requests(nbytes: float, fleet: Fleet) -> float:
    """For one version: commit, copies, and a manifest, the objects and the next question of each replica."""
    part = nbytes / fleet.ranks
    up, down = max(1, ceil(part / UPLOAD_PART)), max(1, ceil(part / FETCH_PART))
    publish = fleet.ranks * (up + 2 if up > 1 else 1) + 5
    each = 2 + fleet.ranks * down
    return publish + (fleet.regions - 1) * (each + 3 + fleet.ranks * up) + fleet.replicas * each


def join(model: Model, fleet: Fleet, links: Links, rates: Rates) -> float:
    """Seconds for a replica that begins with nothing: the newest anchor, digested as it arrives."""
    fetch = _moved(model.nbytes, 1, links.down, FETCH_PART, links.latency)
    work = model.nbytes / 2 * rates.sha256 + model.nbytes * rates.disk + model.parameters * rates.digest
    return max(fetch, work / fleet.workers) + 4 * links.latency


# -- what is better ----------------------------------------------------------------------------------------------------


def broadcast_break_even(model: Model, ours: Estimate) -> tuple[float, float]:
    """Bytes per second of a fabric above which a broadcast is live sooner, and above which its pause is shorter."""
    return model.nbytes / ours.seconds, model.nbytes / ours.pause if ours.pause else float("inf")


def sooner(found: Mapping[Method, Estimate]) -> Estimate:
    """Of our codecs, the one with which a version is live sooner."""
    return min((found["gap"], found["banded"]), key=lambda one: one.seconds)


ASSUMPTIONS = (
    "weights are normal and updates uniform; bits per change follow from the density (checked on recorded steps)",
    "ranks and workers share the work evenly, and a phase begins when the one before has ended",
    "the trainer's link is shared by all ranks; a replica's link is its own; a bucket serves all replicas at once",
    "each region but the first has a copy of the bucket; egress is what goes there, whatever the method",
    "a broadcast is one pipeline at the fabric's rate: without start or stragglers; all replicas stop for it",
    "TRL's encoding: 48 bits a change in bf16, at our `plain`'s speed, fetched in the pause, without its anchors",
    "full copies are loaded at the speed of a memory copy",
    "memory: a copy of the shard during the step and 40 bytes a change (measured, see RESULTS)",
)
