"""`weightcast status URL`, `weightcast status FOLDER`"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import heartbeats
from weightcast.channel.keys import ANCHORS, CHANNEL, DELTAS, DOOMED, MANIFESTS, PINS, REPLICAS, SQUASHES, TAGS
from weightcast.channel.lease import lease
from weightcast.channel.pins import pins
from weightcast.channel.records import Heartbeat, Lease, Manifest
from weightcast.channel.tags import valid_tags
from weightcast.cli.channels import head_of, open_chain
from weightcast.cli.console import facts, report, say, tell
from weightcast.cli.options import Url
from weightcast.cli.text import Column, Table, Text
from weightcast.cli.wording import ago, count, natural, size
from weightcast.store.base import Listed, debris

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


def status(url: Url) -> None:
    """Show a channel's newest version, writer, size and replicas.

    For a mirror's folder: which version its files are, which its log leads to, and for which its command ran.
    """
    mirror = _read_mirror(Path(url)) if "://" not in url else None
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
        "head": {
            "version": head.position.version,
            "digest": head.position.digest,
            "step": head.step,
            "label": head.label,
            "age": round(now - head.time, 3),
        },
        "writer": _writer(lease(chain), now),
        "anchors": anchors,
        "references": references,
        "pins": sorted(pins(chain)),
        "tags": {tag.name: tag.position.version for tag in valid_tags(chain)[0]},
        "stored": {
            kind.rstrip("/"): _weigh(debris(chain.store) if kind == "unfinished" else chain.store.list(kind))
            for kind in _KINDS
        },
        "replicas": [_replica(beat, heard, head, now) for beat, heard in heartbeats(chain)],
    }


def _writer(lease: Lease | None, now: float) -> dict[str, Any] | None:
    if lease is None:
        return None
    return {"name": lease.writer, "host": lease.host, "pid": lease.pid, "age": round(now - lease.time, 3)}


def _weigh(found: Iterable[Listed]) -> dict[str, int]:
    sizes = [listed.size for listed in found]
    return {"objects": len(sizes), "bytes": sum(sizes)}


def _replica(beat: Heartbeat, heard: float, head: Manifest, now: float) -> dict[str, Any]:
    return {
        "name": beat.replica,
        "version": beat.position.version,
        "lag": head.position.version - beat.position.version,
        "age": round(now - heard, 3),
        "pause": beat.pause,
        "ran": beat.ran,
        "error": beat.error,
    }


def _print(found: dict[str, Any]) -> None:
    head, writer, stored = found["head"], found["writer"], found["stored"]
    step = f", step {head['step']}" if head["step"] is not None else ""
    label = f", {head['label']}" if head["label"] else ""
    begins = [str(version) for version in found["anchors"]]
    begins += [f"{version} (elsewhere: {name})" for version, name in found["references"].items()]
    names = sorted(found["tags"], key=natural)
    rows = {
        "channel": f"{found['channel']}, {count(found['tensors'], 'tensor')}, {size(found['model_bytes'])}",
        "head": f"version {head['version']}{step}{label}, {ago(head['age'])}",
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
    error = Column("error", left=True)
    table = Table(Column("replica", left=True), "version", "lag", "command", "paused", "heard", error)
    for row in found["replicas"]:
        paused = "" if row["pause"] is None else f"{1000 * row['pause']:.0f} ms"
        ran = "" if row["ran"] is None else f"at {row['ran']}"
        numbers = str(row["version"]), str(row["lag"]), ran, paused, ago(row["age"])
        table.add(row["name"], *numbers, Text(row["error"] or "", "red"))
    if found["replicas"]:
        say(table)
