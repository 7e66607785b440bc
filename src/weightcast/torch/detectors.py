"""Detectors for models. There are three, which keep the old bits in different places and find the same changes.

`transient` (the default with an optimizer) copies the wire bits right before each optimizer step and drops the copy
right after it, while no activations are held. What flipped goes into a journal: indices, and the bits of the last scan.
`device` keeps a copy beside the model, `host` keeps one in pinned memory of the host.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import Optimizer

from weightcast.errors import UsageError
from weightcast.format.coding import Coding
from weightcast.format.scan import Change, Detect, Detector, Scan
from weightcast.format.spec import TensorTable
from weightcast.format.tensors import Bits
from weightcast.format.workers import Workers
from weightcast.torch.batch import (
    Batch,
    Copied,
    Delivered,
    Kernels,
    Ledger,
    Slot,
    Sums,
    batches_of,
    log_edits,
    replacement,
)
from weightcast.torch.model import LiveModel, marks_of
from weightcast.torch.steps import optimizers_in
from weightcast.torch.transit import PinnedCopy, sums_in_transit

_CHECK_EVERY = 50
"""On a CPU, the live model is digested at every 50th publish; on a device, at each one."""

_OWED = 64
"""Deliveries whose gains may still be in transit; older ones have arrived."""

_HOST_BATCH = 1 << 26
"""Elements of a host copy that are sent to the device at a time."""


def watch(
    model: torch.nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    detect: Detect | None,
    dtype: str | torch.dtype | None,
    check_every: int | None,
    table: TensorTable | None,
    coding: Coding,
    workers: Workers,
) -> Detector:
    """The detector for a model; ``table`` is the channel's, if there is one."""
    return detector_of(LiveModel(model, dtype, table, workers), optimizer, detect, check_every, coding)


def detector_of(
    live: LiveModel,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    detect: Detect | None,
    check_every: int | None,
    coding: Coding,
) -> Transient | Resident:
    """The detector for a model, or for a rank's part of one."""
    optimizers = optimizers_in(optimizer)
    detect = detect or ("transient" if optimizers else "device")
    if detect != "transient":
        return Resident(live, detect == "host", coding)
    if not optimizers:
        raise UsageError("detect='transient' needs the optimizer", hint="Pass optimizer=…, or detect='device'.")
    return Transient(live, optimizers, check_every, coding)


@dataclass
class ModelScan:
    """Implements `Scan`: for each batch a generator of its changes, which waits for them."""

    table: TensorTable
    found: list[Iterator[Change]]

    def changes(self) -> Iterator[Change]:
        found, self.found = self.found, []
        yield from sorted(chain.from_iterable(found), key=lambda change: self.table.ordinal(change.spec.name))


def _copy_of(batch: Batch, live: LiveModel) -> Copied:
    with live.present(batch):
        return live.kernels(batch.device).take(batch)


def _changes_since(shadow: Copied, live: LiveModel, coding: Coding) -> Iterator[Change]:
    """What changed in a batch since the copy, which is updated."""
    batch = shadow.batch
    kernels = live.kernels(batch.device)
    with live.present(batch):
        delivered = kernels.deliver(batch, kernels.differ(batch, shadow), coding, shadow)
    kernels.rest(batch)
    return delivered.changes({})


# -- a copy that is kept -----------------------------------------------------------------------------------------------


class Resident:
    """`device` and `host`: keeps a copy of the wire bits as of the last scan."""

    def __init__(self, live: LiveModel, on_host: bool, coding: Coding):
        self.weights = live
        self._coding = coding
        slots = list(live.slots.values())
        away = on_host and any(slot.source.device.type == "cuda" for slot in slots)
        taken = (_copy_of(batch, live) for batch in live.batches(slots, _HOST_BATCH if away else None))
        self._shadows: list[Copied | PinnedCopy] = [
            PinnedCopy(copied) if away and copied.batch.device.type == "cuda" else copied for copied in taken
        ]

    @torch.no_grad()
    def scan(self) -> Scan:
        self.weights.relocate()
        found = []
        for shadow in self._shadows:
            old = shadow.load() if isinstance(shadow, PinnedCopy) else shadow
            found.append(_changes_since(old, self.weights, self._coding))
            if isinstance(shadow, PinnedCopy):
                shadow.store(old)
        return ModelScan(self.weights.table, found)

    def close(self) -> None:
        self._shadows = []


# -- a copy during a step -------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Journal:
    """A batch as of the last scan: ``flips`` are its differences from now, or ``shadow`` is a copy of all of it."""

    batch: Batch
    owner: Optimizer | None
    kernels: Kernels[Any]
    expected: npt.NDArray[np.uint64]
    """Digests as of the last scan, without the gains that are still owed."""
    ledger: Ledger
    owed: list[Sums] = field(default_factory=list)
    before: Copied | None = None
    """During a step: the bits before it."""
    flips: Any = None
    shadow: Copied | None = None
    marks: list[tuple[int, ...]] = field(default_factory=list)

    def marks_now(self) -> list[tuple[int, ...]]:
        return [marks_of(slot.registered) for slot in self.batch.slots]

    def open(self) -> None:
        """A step begins."""
        if self.before is not None:  # the step before raised
            self.note()
        if self.shadow is None:
            self.before = self.kernels.take(self.batch)

    def note(self) -> None:
        """A step has ended: find what it flipped, and what it flipped back."""
        if self.before is None:
            return
        old, self.before = self.before, None
        if self.flips is not None:
            self.kernels.put(old, self.flips)
        self.flips = self.kernels.differ(self.batch, old)
        if 3 * self.kernels.count(self.flips) > sum(self.batch.sizes):  # an index and a value take three words
            self.flips, self.shadow = None, old
        self.kernels.rest(self.batch)

    def deliver(self, coding: Coding) -> Delivered | None:
        self.note()
        flips, shadow = self.flips, self.shadow
        self.flips = self.shadow = None
        if shadow is not None:
            flips = self.kernels.differ(self.batch, shadow)
        if flips is None:
            return None
        delivered = self.kernels.deliver(self.batch, flips, coding, shadow, self.ledger)
        self.owed.append(delivered.gains)
        if len(self.owed) > _OWED:
            self.add_gains(self.owed.pop(0))
        return delivered

    def add_gains(self, *gains: Sums) -> None:
        for one in gains:
            self.expected = self.expected + one()

    def wrong(self, live: Sums) -> dict[int, int]:
        """The ``live`` digests that differ from those of the last scan plus the changes since."""
        self.add_gains(*self.owed)
        self.owed.clear()
        digests = live()
        differ = np.flatnonzero(digests != self.expected)
        self.expected = digests
        return {int(i): int(digests[i]) for i in differ}


class Transient:
    """`transient`: keeps only a journal. Tensors edited outside the optimizer are found by digest, and sent whole."""

    def __init__(self, live: LiveModel, optimizers: Sequence[Optimizer], check_every: int | None, coding: Coding):
        self.weights = live
        self._coding = coding
        self._check_every = _CHECK_EVERY if check_every is None else check_every
        self._stepping: int | None = None
        """The thread that is inside a step."""
        self._scans = 0
        owners = _owners(live, optimizers)
        kept: list[Slot] = []
        by_owner: dict[Optimizer | None, list[Slot]] = {}
        for name, slot in live.slots.items():
            if name not in live.made and isinstance(slot.registered, torch.nn.Parameter):
                by_owner.setdefault(owners.get(id(slot.registered)), []).append(slot)
            else:
                kept.append(slot)
        self._journals = [
            self._journal(batch, owner) for owner, slots in by_owner.items() for batch in batches_of(slots)
        ]
        # Buffers, and what is computed from parameters: small, and nothing signals when they change.
        self._kept = [_copy_of(batch, live) for batch in live.batches(kept)]
        self._suspicious = False
        self._hooks = [
            hook
            for one in optimizers
            for hook in (one.register_step_pre_hook(self._before), one.register_step_post_hook(self._after))
        ]

    def _journal(self, batch: Batch, owner: Optimizer | None) -> _Journal:
        kernels = self.weights.kernels(batch.device)
        digests = kernels.digests(batch).cpu().numpy().view(np.uint64)
        kernels.rest(batch)
        journal = _Journal(batch, owner, kernels, digests, Ledger(digests))
        journal.marks = journal.marks_now()
        return journal

    # -- hooks -------------------------------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _before(self, optimizer: Optimizer, *_: object) -> None:
        self._stepping = threading.get_ident()
        self._suspect_edits()
        for journal in self._owned(optimizer):
            journal.open()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _after(self, optimizer: Optimizer, *_: object) -> None:
        self._stepping = None
        for journal in self._owned(optimizer):
            journal.note()
            journal.marks = journal.marks_now()  # not those of other optimizers: this step should not have touched them

    def _owned(self, optimizer: Optimizer) -> list[_Journal]:
        return [journal for journal in self._journals if journal.owner is optimizer]

    def _suspect_edits(self) -> None:
        if any(journal.marks_now() != journal.marks for journal in self._journals):
            self.weights.relocate()
            self._suspicious = True

    # -- scan --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def scan(self) -> Scan:
        if self._stepping not in (None, threading.get_ident()):
            raise UsageError("the optimizer is in the middle of a step", hint="Publish between steps.")
        self._stepping = None  # a step on this thread raised
        self._scans += 1
        moved = [self.weights.slots[name].registered for name in self.weights.relocate()]
        self._suspicious = self._suspicious or any(isinstance(tensor, torch.nn.Parameter) for tensor in moved)
        self._suspect_edits()
        due = self._suspicious or (self._check_every > 0 and self._scans % self._check_every == 0)
        found = []
        for journal in self._journals:
            # A device ranks by its current bits: after an unnoticed edit, no follower could decode what it coded.
            checked = due or journal.batch.device.type != "cpu"
            live = sums_in_transit(journal.kernels.digests(journal.batch)) if checked else None
            delivered = journal.deliver(self._coding)
            replaced = self._replaced(journal, live) if live else {}
            journal.marks = journal.marks_now()
            journal.kernels.rest(journal.batch)
            found.append(delivered.changes(replaced) if delivered else _replacements(journal, replaced))
        found += [_changes_since(shadow, self.weights, self._coding) for shadow in self._kept]
        self._suspicious = False
        return ModelScan(self.weights.table, found)

    def _replaced(self, journal: _Journal, live: Sums) -> dict[int, tuple[Bits, int]]:
        """The tensors that were changed by other means than the optimizer, whole."""
        wrong = journal.wrong(live)
        if not wrong:
            return {}
        names = [journal.batch.specs[i].name for i in wrong]
        log_edits(names)
        return {i: (self.weights.read(name).copy(), wrong[i]) for i, name in zip(wrong, names, strict=True)}

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._journals = []
        self._kept = []


def _replacements(journal: _Journal, replaced: Mapping[int, tuple[Bits, int]]) -> Iterator[Change]:
    """The changes of a batch that no step changed."""
    for i, (bits, digest) in replaced.items():
        journal.ledger.replace(i, bits, digest)
        yield replacement(journal.batch.specs[i], bits, digest)


def _owners(live: LiveModel, optimizers: Sequence[Optimizer]) -> dict[int, Optimizer]:
    """The optimizer of each parameter, by the parameter's `id`."""
    owners = {
        id(parameter): optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    sources = {piece.name: piece.source for piece in live.layout.pieces}  # a rank may have none of them
    of_made = (source for made in live.layout.made for source in made.sources)
    if not any(id(source) in owners for source in chain(sources.values(), of_made)):
        hint = "Create it from this model's parameters(), after moving the model to its device."
        raise UsageError("the optimizer owns none of the model's parameters", hint=hint)
    for name, source in sources.items():
        if source.requires_grad and id(source) not in owners:
            hint = "Pass all optimizers as optimizer=[…], freeze it with requires_grad_(False), or use detect='device'."
            raise UsageError("none of the given optimizers owns this parameter", tensor=name, hint=hint)
    return owners
