"""Open a channel for writing: begin it with its first weights, or take it up where its head is."""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from weightcast.channel.chain import Chain
from weightcast.channel.index import write_index
from weightcast.channel.keys import Position, check_name, check_step, is_plain_file
from weightcast.channel.lease import take_lease
from weightcast.channel.policy import Pinned
from weightcast.channel.records import Lease, Manifest, Reference
from weightcast.channel.reference import bring, pins_of, resolved
from weightcast.channel.trust import NO_SIGNING, Seen, Signing, signing_of
from weightcast.disk.checkpoint import SINGLE, Checkpoint, save
from weightcast.disk.companions import ADAPTER, is_weights, wanted
from weightcast.disk.durable import Report, scratch, silent
from weightcast.disk.staged import fingerprint_of
from weightcast.errors import ChannelError, NoRouteError, ResultError, UnreachableError, UsageError
from weightcast.follow.staging import staged_weights
from weightcast.follow.subscriber import Subscriber
from weightcast.format.coding import Coding
from weightcast.format.diff import refuse_other_table
from weightcast.format.digest import Fingerprint, fingerprint
from weightcast.format.scan import Detector, Shadowed, compare, resolve
from weightcast.format.spec import TensorTable
from weightcast.format.tensors import Bits, Copies, Weights, refuse_no_weights
from weightcast.format.workers import ONE, Workers
from weightcast.publish.pipeline import Resolved
from weightcast.store import open_store
from weightcast.store.base import Store
from weightcast.store.probe import honours_create


@runtime_checkable
class Accompanied(Protocol):
    """Weights that need other files beside them to be loaded, such as a model's configuration."""

    is_adapter: bool
    """Whether the weights are an adapter, which loaders look for under a name of its own."""

    def save_beside(self, folder: Path) -> None: ...


Content = Mapping[str, Path] | Reference
"""What an anchor holds: files by name, or a reference to a checkpoint elsewhere in place of them."""

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
    sign: str | Path | None = None,
) -> Manifest:
    """Begin a channel with ``weights`` as version 0: arrays, or a checkpoint folder with its configuration files.

    With a ``reference`` nothing but digests is uploaded: replicas download that public checkpoint themselves. A
    `Reference` in place of weights is a model of the Hugging Face Hub: it is read through the Hub's cache, and recorded
    by its commit. An interrupted `init` is completed by another with the same weights.

    ``sign`` names the root's private key, a file or `env:NAME`: the channel is then signed, and readers that trust the
    root's public key accept nothing else in it. `weightcast key add` allows other keys to sign versions.

    >>> wc.init("channel", wc.Arrays({"w": np.zeros(4, np.float32)}), step=0).position.version
    0
    """
    signing = signing_of(None, sign, begins=True)
    return init_signed(
        signing, channel, weights, reference=reference, step=step, writer=writer, workers=workers, report=report
    )


def init_signed(
    signing: Signing,
    channel: str | Path | Store,
    weights: Weights | Path | str | Reference,
    *,
    reference: Reference | None = None,
    step: int | None = None,
    writer: str | None = None,
    workers: Workers = ONE,
    report: Report = silent,
) -> Manifest:
    """`init`, for one who knows already what is trusted and signed with."""
    check_step(step)
    writer = check_name(writer, "writer") if writer else new_writer()
    store = open_store(channel)
    if not isinstance(weights, (str, Path, Reference)):
        refuse_no_weights(weights)
    with _whole(weights, reference, report) as (first, content):
        chain = Chain.create(store, first.table, signing)
        return commit_anchor(chain, 0, first, content, writer, step, None, workers, report)


@contextmanager
def _whole(
    weights: Weights | Path | str | Reference, reference: Reference | None = None, report: Report = silent
) -> Iterator[tuple[Weights, Content]]:
    """Weights that can be digested, and what an anchor of them holds."""
    if isinstance(weights, Reference):
        reference = resolved(weights)
        with scratch() as folder:
            model = folder / "model"
            model.mkdir()
            bring(reference, model, report, linked=True)
            with Checkpoint(model) as checkpoint:
                yield checkpoint, reference
    elif isinstance(weights, (str, Path)):
        with Checkpoint(weights) as checkpoint:
            yield checkpoint, reference or files_of(checkpoint)
    elif reference is not None:
        yield weights, reference
    else:
        with scratch() as folder:
            accompanied = weights if isinstance(weights, Accompanied) else None
            save(weights, folder, ADAPTER if accompanied is not None and accompanied.is_adapter else SINGLE)
            if accompanied is not None:
                accompanied.save_beside(folder)
            with Checkpoint(folder, aliases=dict(weights.table.aliases)) as checkpoint:
                yield checkpoint, files_of(checkpoint)


def commit_anchor(
    chain: Chain,
    version: int,
    weights: Weights,
    content: Content,
    writer: str,
    step: int | None = None,
    label: str | None = None,
    workers: Workers = ONE,
    report: Report = silent,
) -> Manifest:
    """Upload whole weights, unless ``content`` is a reference, and commit them as a version without a base.

    `CheckpointError` if files change meanwhile. Weights in memory belong to the caller: no other process writes them.
    """
    unchanged = weights.refuse_changed if isinstance(weights, Checkpoint) else lambda: None
    position = Position(version, fingerprint_of(weights, workers, report).digest)
    if isinstance(content, Reference):
        if chain.signing.signer is not None:  # the commit and all files of it are signed
            content = resolved(content)
        pins = pins_of(content, report) if chain.signing.signer is not None else ()
        ref = chain.refer_anchor(position, content, pins)
    else:
        ref = chain.put_anchor(position, content, report, unchanged)
    manifest = chain.draft(position, None, ref, None, chain.channel.table.elements, step, writer, label)
    unchanged()
    manifest = chain.commit(manifest)
    write_index(chain)
    return manifest


def files_of(checkpoint: Checkpoint) -> dict[str, Path]:
    """What goes into an anchor: the weights, and the small files beside them that loading needs.

    The checkpoint watches all of them from now on (`Checkpoint.refuse_changed`).
    """
    if not checkpoint.path.is_dir():
        return {ADAPTER if checkpoint.path.name == ADAPTER else SINGLE: checkpoint.path}
    files = {path.name: path for path in checkpoint.files}
    beside = {
        path.name: path
        for path in sorted(checkpoint.path.iterdir())
        if is_plain_file(path.name) and path.is_file() and not path.is_symlink() and not is_weights(path.name)
    }
    for name in sorted(wanted([*files, *beside]) & beside.keys()):
        checkpoint.watch(beside[name])
        files[name] = beside[name]
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


def channel_in(store: Store, signing: Signing = NO_SIGNING, seen: Seen | None = None) -> Chain | None:
    """The channel in a store, if there is one; ``seen`` is what a mirror has seen of it."""
    try:
        return Chain.open(store, signing, seen)
    except ChannelError:
        return None


def open_for_writing(channel: str | Path | Store, table: TensorTable, signing: Signing = NO_SIGNING) -> Chain:
    """The channel, once its store is known to keep two writers apart and the table is known to be the channel's."""
    chain = Chain.open(open_store(channel), signing)
    chain.refuse_without_signer()
    hint = "A channel's table never changes: publish to another place, or start over with `weightcast reset`."
    refuse_other_table(chain.channel.table, table, hint=hint)
    if chain.channel.fence == "create" and not honours_create(chain.store):
        hint = "Two writers could overwrite each other here. Use the store that the channel was made on."
        raise ChannelError("this store does not honour create-if-absent", file=chain.store.url, hint=hint)
    return chain


def announce(chain: Chain, writer: str) -> None:
    """Record who writes."""
    take_lease(chain, Lease(writer, socket.gethostname() or "host", os.getpid(), time.time()))


def take_up(
    chain: Chain, detector: Detector, writer: str, coding: Coding, workers: Workers
) -> tuple[Manifest, Fingerprint, Resolved | None]:
    """The head, the fingerprint that the detector's next scan begins at, and the patch from the head to there, if any.

    Where the head's own weights cannot be fetched any more, the detector's are committed as an anchor, which is the
    head.
    """
    head = chain.head()
    assert head is not None
    shadow = detector.shadow if isinstance(detector, Shadowed) else None
    weights = shadow or detector.weights
    now = fingerprint(weights, workers)
    if head.position.digest == now.digest:
        return head, now, None
    version = head.position.version
    try:
        if shadow is not None:  # the detector's own copy becomes the head's weights: its next scan finds the rest
            return head, _brought(shadow, chain, version), None
        with version_beside(weights, chain, version) as (old, start):
            found = resolve(start, compare(old, weights, coding, workers))
    except NoRouteError as error:
        if isinstance(error.reason, UnreachableError):  # it may be reachable in a minute
            raise
        with _whole(weights) as (saved, content):
            return commit_anchor(chain, version + 1, saved, content, writer), now, None
    if found.reached.digest != now.digest:
        hint = "Open the publisher while nothing trains."
        problem = "the weights changed while the publisher opened"
        raise ResultError(problem, expected=now.digest, found=found.reached.digest, hint=hint)
    return head, now, Resolved(found.patch, found.prepared)


def _brought(shadow: Copies, chain: Chain, version: int) -> Fingerprint:
    """Bring a copy of some weights to a version; returns its fingerprint."""
    with Subscriber(chain.store, shadow, Pinned(version), trust=chain.signing.trust) as subscriber:
        staged = subscriber.poll()
        assert staged is not None  # its digest is another
        subscriber.apply(staged)
    return staged.fingerprint


@contextmanager
def version_beside(weights: Weights, chain: Chain, version: int) -> Iterator[tuple[Weights, Fingerprint]]:
    """A version's weights and fingerprint, for as long as the block lasts, staged beside other ``weights``.

    A model takes gigabytes of memory, so it is not copied: what differs is on disk, and read tensor by tensor.
    """
    with Subscriber(chain.store, _Unwritten(weights), Pinned(version), trust=chain.signing.trust) as subscriber:
        staged = subscriber.poll()
        if staged is None:
            yield weights, fingerprint(weights)
            return
        with staged_weights(weights, staged) as reached:
            yield reached, staged.fingerprint


class _Unwritten:
    """Weights that a route is staged for, and which nothing is written to."""

    def __init__(self, weights: Weights):
        self.table, self.read = weights.table, weights.read

    def overwrite(self, name: str, indices: npt.NDArray[np.int64], new: Bits) -> None:
        raise UsageError("these weights are only read", tensor=name)

    def write(self, name: str, bits: Bits) -> None:
        raise UsageError("these weights are only read", tensor=name)
