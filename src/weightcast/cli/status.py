"""`weightcast status URL`, `weightcast status FOLDER`"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import heartbeats
from weightcast.channel.keys import ANCHORS, CHANNEL, DELTAS, DOOMED, KEYRING, MANIFESTS, PINS, REPLICAS, SQUASHES, TAGS
from weightcast.channel.lease import lease
from weightcast.channel.pins import pins
from weightcast.channel.records import Heartbeat, Lease, Manifest
from weightcast.channel.tags import valid_tags
from weightcast.cli.channels import head_of, open_chain
from weightcast.cli.console import facts, report, say, tell
from weightcast.cli.options import Url
from weightcast.cli.text import Column, Table, Text
from weightcast.cli.wording import ago, brief, count, natural, size
from weightcast.errors import UsageError
from weightcast.events.event import PHASES
from weightcast.store.base import Listed, Store, debris

if TYPE_CHECKING:
    from weightcast.follow.mirror_reader import MirrorStatus

_KINDS = {
    ANCHORS: "anchor file",
    DELTAS: "delta",
    SQUASHES: "squash",
    MANIFESTS: "manifest",
    REPLICAS: "heartbeat",
    PINS: "pin",
    TAGS: "tag",
    DOOMED: "deletion list",
    "unfinished": "unfinished upload",
}
"""Kinds of objects by prefix, and what people call one of each."""


def status(
    url: Url,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on until SIGINT or SIGTERM: a view, or a line for each change.")
    ] = False,
    every: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="--watch: seconds between two looks.")] = 2.0,
) -> None:
    """Show a channel's newest version, writer, size and replicas.

    For a mirror's folder: which version its files are, which its log leads to, and for which its command ran.

    --watch shows the newest version, the writer, and of each replica its lag, its last pause and what the phases of its
    last update took. In a terminal that is redrawn; elsewhere each change is a line.
    """
    mirror = _read_mirror(Path(url)) if "://" not in url else None
    if watch:
        if mirror is not None:
            raise UsageError("--watch is for channels, and this is a mirror", hint="Name the channel's URL.")
        from weightcast.cli.watch import watch as watch_channel

        watch_channel(open_chain(url), every)
        return
    if mirror is not None:
        report(_mirror(Path(url), mirror))
        return
    chain = open_chain(url)
    found = _status(chain, head_of(chain), time.time())
    tell(found)
    _print(found)


def _read_mirror(folder: Path) -> MirrorStatus | None:
    if (folder / CHANNEL).exists():
        return None
    from weightcast.follow.mirror_reader import mirror_status  # needs numpy, and a channel's status does not

    return mirror_status(folder)


def _mirror(folder: Path, mirror: MirrorStatus) -> dict[str, Any]:
    from weightcast.follow.command_record import read_ran

    ran = read_ran(folder)
    return {
        "channel": mirror.url or None,
        "files_at": mirror.files_at.version,
        "log_leads_to": mirror.log_at,
        "changing": mirror.is_changing,
        "command_ran_at": ran.position.version if ran else None,
    }


def _status(chain: Chain, head: Manifest, now: float) -> dict[str, Any]:
    anchors = sorted({edge.result for edge in chain.anchor_edges()})
    references = {
        anchor.position.version: f"{anchor.reference.repository}@{anchor.reference.revision}"
        for anchor in chain.references()
        if anchor.reference
    }
    return {
        "channel": chain.store.url,
        "id": chain.channel.id,
        "tensors": len(chain.channel.table),
        "model_bytes": chain.channel.table.nbytes,
        "head": head_fields(head, now),
        "writer": writer_fields(lease(chain), now),
        "anchors": anchors,
        "references": references,
        "pins": sorted(pins(chain)),
        "tags": {tag.name: tag.position.version for tag in valid_tags(chain)[0]},
        "stored": {kind.rstrip("/"): _weigh(_listed(chain.store, kind)) for kind in _KINDS},
        "replicas": [replica_fields(beat, heard, head, now) for beat, heard in heartbeats(chain)],
    }


def head_fields(head: Manifest, now: float) -> dict[str, Any]:
    return {
        "version": head.position.version,
        "digest": head.position.digest,
        "step": head.step,
        "label": head.label,
        "age": round(now - head.time, 3),
    }


def writer_fields(lease: Lease | None, now: float) -> dict[str, Any] | None:
    if lease is None:
        return None
    return {"name": lease.writer, "host": lease.host, "pid": lease.pid, "age": round(now - lease.time, 3)}


def _listed(store: Store, kind: str) -> Iterator[Listed]:
    found = debris(store) if kind == "unfinished" else store.list(kind)
    return (listed for listed in found if not listed.key.startswith(KEYRING))


def _weigh(found: Iterable[Listed]) -> dict[str, int]:
    sizes = [listed.size for listed in found]
    return {"objects": len(sizes), "bytes": sum(sizes)}


def replica_fields(beat: Heartbeat, heard: float, head: Manifest, now: float) -> dict[str, Any]:
    return {
        "name": beat.replica,
        "version": beat.position.version,
        "lag": head.position.version - beat.position.version,
        "age": round(now - heard, 3),
        "pause": beat.pause,
        "seconds": dict(beat.seconds),
        "ran": beat.ran,
        "error": beat.error,
    }


def _print(found: dict[str, Any]) -> None:
    writer, stored = found["writer"], found["stored"]
    begins = [str(version) for version in found["anchors"]]
    begins += [f"{version} (elsewhere: {name})" for version, name in found["references"].items()]
    names = sorted(found["tags"], key=natural)
    rows = {
        "channel": f"{found['channel']}, {count(found['tensors'], 'tensor')}, {size(found['model_bytes'])}",
        "head": head_line(found["head"]),
        "writer": f"{writer['name']}, began {ago(writer['age'])}" if writer else "none yet",
        "anchors": ", ".join(begins) or "none",
        "pins": ", ".join(map(str, found["pins"])) or "none",
        "tags": ", ".join(f"{name} (version {found['tags'][name]})" for name in names) or "none",
        "stored": ", ".join(
            f"{size(weight['bytes'])} in {count(weight['objects'], name)}"
            for name, weight in zip(_KINDS.values(), stored.values(), strict=True)
            if weight["objects"]
        ),
        "replicas": f"{len(found['replicas']):,} reported",
    }
    facts(rows)
    if found["replicas"]:
        say(replica_table(found["replicas"]))


def head_line(head: dict[str, Any]) -> str:
    step = f", step {head['step']}" if head["step"] is not None else ""
    label = f", {head['label']}" if head["label"] else ""
    return f"version {head['version']}{step}{label}, {ago(head['age'])}"


def replica_table(replicas: list[dict[str, Any]]) -> Table:
    error = Column("error", left=True, rank=1, shortest=12)
    phases = Column("last update", left=True, style="dim", rank=2, shortest=12)
    table = Table(Column("replica", left=True), "version", "lag", "command", "paused", "heard", phases, error)
    for row in replicas:
        paused = "" if row["pause"] is None else f"{1000 * row['pause']:.0f} ms"
        ran = "" if row["ran"] is None else f"at {row['ran']}"
        numbers = str(row["version"]), str(row["lag"]), ran, paused, ago(row["age"])
        table.add(row["name"], *numbers, phases_line(row["seconds"]), Text(row["error"] or "", "red"))
    return table


def phases_line(seconds: dict[str, float]) -> str:
    """What an update took, by phase; what took no time is left out."""
    known = {phase: place for place, phase in enumerate(PHASES)}
    order = sorted(seconds, key=lambda phase: known.get(phase, len(known)))
    return ", ".join(f"{phase} {brief(seconds[phase])}" for phase in order if seconds[phase] >= 0.0005)
