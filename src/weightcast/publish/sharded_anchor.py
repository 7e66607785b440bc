"""Whole weights of a sharded training, box by box: each rank uploads a file of its own, rank 0 commits the anchor."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from weightcast.channel.chain import Chain
from weightcast.channel.index import write_index
from weightcast.channel.keys import Position
from weightcast.channel.records import Manifest, ObjectRef, dump_record, load_record
from weightcast.channel.trust import NO_SIGNING, Signing
from weightcast.disk.companions import wanted
from weightcast.disk.durable import scratch
from weightcast.format.boxes import Box, Place
from weightcast.format.codec.coded import Coded
from weightcast.format.digest import Fingerprint
from weightcast.format.patch import ModelSize
from weightcast.format.patchfile import PatchWriter
from weightcast.format.spec import TensorTable
from weightcast.format.table import Row, order_of
from weightcast.format.tensors import Weights
from weightcast.publish.open import Accompanied
from weightcast.publish.peers import Message
from weightcast.publish.rounds import LEADER, Rounds
from weightcast.store.base import Store


class LocalBoxes(Weights, Protocol):
    """What one rank publishes: its boxes as tensors of their own, by the names that its table has for them."""

    @property
    def places(self) -> Mapping[str, Place]: ...

    @property
    def whole(self) -> TensorTable:
        """All tensors of all ranks together."""
        ...

    def declare(self) -> tuple[Sequence[tuple[str, str, Box]], TensorTable | None]:
        """What this rank has, and the whole table if it knows it."""
        ...

    def place(self, whole: TensorTable) -> None:
        """Take up the whole table that was agreed on."""
        ...


def begin_channel(
    store: Store,
    local: LocalBoxes,
    now: Fingerprint,
    rounds: Rounds,
    writer: str,
    refuse_changed: Callable[[], None],
    signing: Signing = NO_SIGNING,
) -> Manifest:
    """Create a channel, or complete one without versions, with the boxes of all ranks as version 0."""

    def create(_: Sequence[Message]) -> Message:
        Chain.create(store, local.whole, signing)
        return Message()

    rounds.meet(Message(), create)
    return commit_boxes(Chain.open(store, signing), 0, local, now, rounds, writer, refuse_changed)


def commit_boxes(
    chain: Chain,
    version: int,
    local: LocalBoxes,
    now: Fingerprint,
    rounds: Rounds,
    writer: str,
    refuse_changed: Callable[[], None],
) -> Manifest:
    """Upload every rank's boxes, and commit them as a version without a base.

    ``refuse_changed`` raises if this rank's weights are no longer those that were digested.
    """
    position = Position(version, now.digest)
    mark = rounds.meet(Message(), lambda _: Message({"mark": secrets.token_hex(8)})).facts["mark"]
    made: Message | Exception
    try:
        refs = _upload(chain, position, mark, local, now, rounds.rank)
        refuse_changed()
        made = Message({"files": [[ref.key, ref.size, ref.sha256] for ref in refs]})
    except Exception as error:  # noqa: BLE001 - the other ranks wait for it
        made = error
    answer = rounds.meet(made, partial(_commit, chain, position, mark, writer))
    return load_record(Manifest, answer.facts["manifest"].encode())


def _commit(chain: Chain, position: Position, mark: str, writer: str, found: Sequence[Message]) -> Message:
    files = [ObjectRef(*ref) for message in found for ref in message.facts["files"]]
    record = chain.complete_anchor(position, mark, files)
    manifest = chain.draft(position, None, record, None, chain.channel.table.elements, None, writer)
    manifest = chain.commit(manifest)
    write_index(chain)
    return Message({"manifest": dump_record(manifest).decode()})


def _upload(
    chain: Chain, position: Position, mark: str, local: LocalBoxes, now: Fingerprint, rank: int
) -> list[ObjectRef]:
    """Upload this rank's boxes as one file, and the files beside the weights from rank 0."""
    refs = []
    with scratch() as folder:
        if local.places:
            path = folder / f"boxes-{rank:05d}.safetensors"
            _write(local, now, position, path)
            refs.append(chain.put_anchor_file(position, mark, path.name, path))
            path.unlink()
        if rank == LEADER and isinstance(local, Accompanied):
            local.save_beside(folder)
            beside = sorted(wanted(path.name for path in folder.iterdir()))
            refs += [chain.put_anchor_file(position, mark, name, folder / name) for name in beside]
    return refs


def _write(local: LocalBoxes, now: Fingerprint, position: Position, path: Path) -> None:
    """This rank's boxes as a patch without a base; one box is in memory at a time."""
    with PatchWriter("plain", path.parent) as writer, path.open("xb") as file:
        for name, place in sorted(local.places.items(), key=lambda item: order_of(item[1])):
            if not place.box.elements:
                continue
            bits = np.ascontiguousarray(local.read(name))
            part = Row(place.part, bits.size, now[place.spec.name])
            writer.add(Coded(part, {"values": bits}), place)
        writer.finish(file, None, position.digest, ModelSize.of(local.whole))
