"""Take up writing to a channel: begin one with its first weights, or open it as its one writer."""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

from weightcast.channel.chain import Chain
from weightcast.channel.index import write_index
from weightcast.channel.keys import Position, check_name, check_step, is_plain_file
from weightcast.channel.lease import take_lease
from weightcast.channel.records import Lease, Manifest, Reference
from weightcast.channel.reference import bring, resolved
from weightcast.disk.checkpoint import SINGLE, Checkpoint, save
from weightcast.disk.companions import is_companion
from weightcast.disk.durable import Report, scratch, silent
from weightcast.disk.staged import fingerprint_of
from weightcast.errors import ChannelError, UsageError
from weightcast.format.diff import refuse_other_table
from weightcast.format.spec import TensorTable
from weightcast.format.tensors import Weights, refuse_no_weights
from weightcast.format.workers import ONE, Workers
from weightcast.store import open_store
from weightcast.store.base import Store
from weightcast.store.probe import honours_create


@runtime_checkable
class Accompanied(Protocol):
    """Weights that need more than themselves to be loaded: a model's configuration."""

    def save_beside(self, folder: Path) -> None: ...


def init(
    channel: str | Path | Store,
    weights: Weights | Path | str | Reference,
    *,
    reference: Reference | None = None,
    step: int | None = None,
    writer: str | None = None,
    workers: Workers = ONE,
    report: Report = silent,
) -> Manifest:
    """Begin a channel with ``weights`` as version 0: arrays, or a checkpoint folder with its configuration files.

    With a ``reference`` nothing but digests is uploaded: replicas get that public checkpoint themselves. A `Reference`
    in place of weights is a model of the Hugging Face Hub: it is read through the Hub's cache, and referred to by its
    commit. An interrupted `init` is completed by another with the same weights.

    >>> wc.init("channel", wc.Arrays({"w": np.zeros(4, np.float32)}), step=0).position.version
    0
    """
    check_step(step)
    writer = check_name(writer, "writer") if writer else new_writer()
    store = open_store(channel)
    if isinstance(weights, Reference):
        found = resolved(weights)
        with scratch() as folder:
            model = folder / "model"
            model.mkdir()
            bring(found, model, report, linked=True)
            with Checkpoint(model) as checkpoint:
                return _init(store, checkpoint, {}, found, step, writer, workers, report)
    if isinstance(weights, (str, Path)):
        with Checkpoint(weights) as checkpoint:
            return _init(store, checkpoint, files_of(checkpoint), reference, step, writer, workers, report)
    refuse_no_weights(weights)
    if reference is not None:
        return _init(store, weights, {}, reference, step, writer, workers, report)
    with scratch() as folder:
        save(weights, folder)
        if isinstance(weights, Accompanied):
            weights.save_beside(folder)
        with Checkpoint(folder, aliases=dict(weights.table.aliases)) as checkpoint:
            return _init(store, checkpoint, files_of(checkpoint), None, step, writer, workers, report)


def _init(
    store: Store,
    weights: Weights,
    files: dict[str, Path],
    reference: Reference | None,
    step: int | None,
    writer: str,
    workers: Workers,
    report: Report,
) -> Manifest:
    chain = Chain.create(store, weights.table)
    position = Position(0, fingerprint_of(weights, workers, report).digest)
    unchanged = weights.refuse_changed if isinstance(weights, Checkpoint) else _nothing_to_watch
    put = partial(chain.put_anchor, position, files, report, unchanged)
    ref = chain.refer_anchor(position, reference) if reference else put()
    manifest = chain.draft(position, None, ref, None, weights.table.elements, step, writer)
    unchanged()
    chain.commit(manifest)
    write_index(chain)
    return manifest


def _nothing_to_watch() -> None:
    """Weights in memory are the caller's own: nobody else writes to them."""


def files_of(checkpoint: Checkpoint) -> dict[str, Path]:
    """What goes into an anchor: the weights, and the small files beside them that loading needs.

    The checkpoint watches all of them from now on (`Checkpoint.refuse_changed`).
    """
    if not checkpoint.path.is_dir():
        return {SINGLE: checkpoint.path}
    files = {path.name: path for path in checkpoint.files}
    for path in sorted(checkpoint.path.iterdir()):
        if is_companion(path.name) and is_plain_file(path.name) and path.is_file() and not path.is_symlink():
            checkpoint.watch(path)
            files[path.name] = path
    return files


def left_out(folder: Path) -> list[str]:
    """Files of a checkpoint's folder that an anchor does not take: code, pickles, other formats of the weights."""
    if not folder.is_dir():
        return []
    with Checkpoint(folder) as checkpoint:
        taken = files_of(checkpoint)
    others = (path.name for path in folder.iterdir() if path.is_file() and path.name not in taken)
    return sorted(name for name in others if not name.startswith("."))


def new_writer() -> str:
    """A name that no other writer has."""
    host = re.sub(r"[^0-9A-Za-z._-]", "-", socket.gethostname())[:60].strip("-.") or "host"
    return f"{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def channel_in(store: Store) -> Chain | None:
    """The channel in a store, if there is one."""
    try:
        return Chain.open(store)
    except ChannelError:
        return None


def open_for_writing(channel: str | Path | Store, table: TensorTable) -> Chain:
    """The channel, once it is sure that its store can fence writers off as it should, and that the table is its own."""
    chain = Chain.open(open_store(channel))
    try:
        refuse_other_table(chain.channel.table, table)
    except UsageError as error:
        hint = "A channel has one table for ever: publish to another place, or start over with `weightcast reset`."
        raise UsageError(error.problem, tensor=error.tensor, hint=hint) from None
    if chain.channel.fence == "create" and not honours_create(chain.store):
        hint = "Two writers could overwrite each other here. Use the store that the channel was made on."
        raise ChannelError("this store does not honour create-if-absent", file=chain.store.url, hint=hint)
    return chain


def announce(chain: Chain, writer: str) -> None:
    """Say who writes."""
    take_lease(chain, Lease(writer, socket.gethostname() or "host", os.getpid(), time.time()))
