"""Open a channel for writing: begin it with its first weights, or take it up where its head is."""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from weightcast.channel.chain import Chain
from weightcast.channel.index import write_index
from weightcast.channel.keys import Position, check_name, check_step, is_plain_file
from weightcast.channel.lease import take_lease
from weightcast.channel.policy import Pinned
from weightcast.channel.records import Lease, Manifest, ObjectRef, Reference
from weightcast.channel.reference import bring, resolved
from weightcast.disk.checkpoint import SINGLE, Checkpoint, save
from weightcast.disk.companions import is_companion
from weightcast.disk.durable import Report, scratch, silent
from weightcast.disk.staged import fingerprint_of
from weightcast.errors import ChannelError, NoRouteError, ResultError, UnreachableError, UsageError
from weightcast.follow.subscriber import Subscriber
from weightcast.format.diff import refuse_other_table
from weightcast.format.digest import Fingerprint
from weightcast.format.scan import compare, resolve
from weightcast.format.spec import TensorTable
from weightcast.format.tensors import Copies, Weights, refuse_no_weights
from weightcast.format.workers import ONE, Workers
from weightcast.publish.pipeline import Resolved
from weightcast.store import open_store
from weightcast.store.base import Store
from weightcast.store.probe import honours_create


@runtime_checkable
class Accompanied(Protocol):
    """Weights that need other files beside them to be loaded, such as a model's configuration."""

    def save_beside(self, folder: Path) -> None: ...


# -- begin a channel ---------------------------------------------------------------------------------------------------


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

    With a ``reference`` nothing but digests is uploaded: replicas download that public checkpoint themselves. A
    `Reference` in place of weights is a model of the Hugging Face Hub: it is read through the Hub's cache, and recorded
    by its commit. An interrupted `init` is completed by another with the same weights.

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
    if reference is None:
        return commit_anchor(chain, position, files, step, writer, report, unchanged)
    return _commit_whole(chain, position, chain.refer_anchor(position, reference), step, writer, unchanged)


def _nothing_to_watch() -> None:
    """Weights in memory belong to the caller: no other process writes to them."""


def commit_anchor(
    chain: Chain,
    position: Position,
    files: Mapping[str, Path],
    step: int | None,
    writer: str,
    report: Report = silent,
    unchanged: Callable[[], None] = _nothing_to_watch,
    label: str | None = None,
) -> Manifest:
    """Upload whole weights and commit them as a version without a base.

    ``unchanged`` raises if the files are not what they were when they were digested.
    """
    ref = chain.put_anchor(position, files, report, unchanged)
    return _commit_whole(chain, position, ref, step, writer, unchanged, label)


def _commit_whole(
    chain: Chain,
    position: Position,
    ref: ObjectRef,
    step: int | None,
    writer: str,
    unchanged: Callable[[], None],
    label: str | None = None,
) -> Manifest:
    manifest = chain.draft(position, None, ref, None, chain.channel.table.elements, step, writer, label)
    unchanged()
    chain.commit(manifest)
    write_index(chain)
    return manifest


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


# -- open a channel ----------------------------------------------------------------------------------------------------


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
    """The channel, once its store is known to keep two writers apart and the table is known to be the channel's."""
    chain = Chain.open(open_store(channel))
    try:
        refuse_other_table(chain.channel.table, table)
    except UsageError as error:
        hint = "A channel's table never changes: publish to another place, or start over with `weightcast reset`."
        raise UsageError(error.problem, tensor=error.tensor, hint=hint) from None
    if chain.channel.fence == "create" and not honours_create(chain.store):
        hint = "Two writers could overwrite each other here. Use the store that the channel was made on."
        raise ChannelError("this store does not honour create-if-absent", file=chain.store.url, hint=hint)
    return chain


def announce(chain: Chain, writer: str) -> None:
    """Record who writes."""
    take_lease(chain, Lease(writer, socket.gethostname() or "host", os.getpid(), time.time()))


def take_up(
    chain: Chain, weights: Weights, fingerprint: Fingerprint, writer: str, ranked: bool, workers: Workers
) -> tuple[Manifest, Resolved | None]:
    """The head, and the patch from there to ``weights`` where they differ.

    Where the head's own weights cannot be fetched any more, ``weights`` are committed as an anchor, which is the head.
    """
    head = chain.head()
    assert head is not None
    if head.position.digest == fingerprint.digest:
        return head, None
    # The one copy of the model that is made here; it becomes the head's weights and is compared with the caller's in
    # place. A detector may hold a second one.
    state = Copies.of(weights)
    try:
        with Subscriber(chain.store, state, Pinned(head.position.version)) as subscriber:
            staged = subscriber.poll()
            if staged is not None:
                subscriber.apply(staged)
    except NoRouteError as error:
        if isinstance(error.reason, UnreachableError):  # it may be reachable in a minute
            raise
        return _commit_as_anchor(chain, weights, Position(head.position.version + 1, fingerprint.digest), writer), None
    held = Fingerprint(state.table, staged.fingerprint.digests) if staged else fingerprint
    found = resolve(held, compare(state, weights, ranked, workers))
    if found.reached.digest != fingerprint.digest:
        hint = "Open the publisher while nothing trains."
        raise ResultError(
            "the weights changed while the publisher opened",
            expected=fingerprint.digest,
            found=found.reached.digest,
            hint=hint,
        )
    return head, Resolved(found.patch, found.ranks)


def _commit_as_anchor(chain: Chain, weights: Weights, position: Position, writer: str) -> Manifest:
    with scratch() as folder:
        save(weights, folder)
        return commit_anchor(chain, position, {SINGLE: folder / SINGLE}, None, writer)
