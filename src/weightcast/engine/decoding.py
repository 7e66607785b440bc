"""Decoding where the old weights are: a worker decodes coded objects against its own parameters, through its layout.

The codecs see a row's box, so the worker puts together what it holds of that box. `plain` rows and raw blocks need no
old bits. A block of `gap` or `banded` needs those of all its elements: even in `gap`, the codes of far changes depend
on the old bits of changes before them. So a tensor is *undecoded* if a block that changes something is held in part, or
if the parameter is rounded from it; the worker gets it in another way.

What is verified, and where:

- Before this is called: the SHA-256 of each object, when it is fetched; that the engine is at the first version's base.
- Here: that each version begins where the one before ends, that all tensors are the layout's, and all that
  `weightcast.format` refuses. If blocks cannot be decoded, whether the parameters still have the digests that were
  remembered of them: if not, it is a `BaseError`, and nothing is wrong with the object.
- After it, by the agent, before the engine is paused: the digests of all workers' boxes add up to those in the table of
  the last version that changes a tensor, and all tensors' digests to the version's. A box's digest is what was
  remembered of it, or read now, and what the changes add to it by the bits that were really there. So a part that is
  not the writer's base, where decoding depends on it, leads to another digest, as in `weightcast.disk.staged`.
  A bit that neither changes nor was decoded against shows only if the part's digest is read now.

Where all of a row is on a GPU, in the tensor's dtype, its blocks are decoded there; if it is there in another order,
against a copy. On a route of one version what changes stays there (`weightcast.engine.on_device`); else it comes to the
host. All other parameters on a GPU are copied to the host, a few at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from weightcast.engine.held import elements_of
from weightcast.engine.live import LiveParameters
from weightcast.engine.on_device import Kernels, stage_on_device, tensor_on_device
from weightcast.engine.prepared import Prepared
from weightcast.engine.tensor_on_route import HasKernels, Job, Overwrites, TensorOnRoute
from weightcast.errors import FormatError, UsageError
from weightcast.format.codec.blocks import decode_in_windows
from weightcast.format.joined import JoinedPatch, parts_by_tensor
from weightcast.format.patch import TensorPatch, refuse_left_out, refuse_other_tensor
from weightcast.format.patchfile import AT_ONCE, PatchReader
from weightcast.format.workers import ONE, Workers
from weightcast.torch.batch import Slot
from weightcast.torch.decoder import DecodingKernels, decode_in_place
from weightcast.torch.model import kernels_for

_AT_ONCE_ON_DEVICE = 1 << 26
"""Elements that are decoded in one call: later versions need a copy of as many, on a device that an engine fills."""

Version = PatchReader | JoinedPatch


@dataclass(frozen=True, eq=False)
class Decoded:
    """Writes that were decoded, and the tensors that must come in another way."""

    prepared: Prepared
    undecoded: frozenset[str]
    """The worker holds a part of them. Nothing of them is prepared."""


def decoding_kernels(device: torch.device) -> DecodingKernels | None:
    """Those of a GPU, with Triton."""
    if device.type == "cpu":
        return None
    found = kernels_for(device)
    return found if isinstance(found, DecodingKernels) else None


@torch.no_grad()
def prepare_coded(
    live: LiveParameters,
    versions: Sequence[Version],
    names: Container[str] | None = None,
    room: int | None = None,
    between: Callable[[], None] = lambda: None,
    workers: Workers = ONE,
    kernels: Kernels = decoding_kernels,
) -> Decoded:
    """What the versions of a route, in this order, overwrite in the tensors of ``names``, or in all.

    ``versions`` are `weightcast.format.joined.joined` objects, one for each edge. What is prepared takes at most
    ``room`` bytes; tensors for which there is none are undecoded. ``between`` is called between tensors, and may raise.
    Nothing is written to the parameters.
    """
    _refuse_other_route(live, versions)
    prepared, undecoded = Prepared(room), set()
    tensors = _tensors_of(live, versions, names, lambda device: kernels(device) is not None)
    if len(versions) == 1 and versions[0].header.base is not None:
        done = _stage_on_device(live, versions[0], tensors, prepared, between, workers, kernels)
        tensors = [tensor for tensor in tensors if tensor.spec.name not in done]
    left = prepared.left
    each = _AT_ONCE_ON_DEVICE // workers.threads if any(tensor.decodes_in_place for tensor in tensors) else AT_ONCE
    for batch in workers.batches(tensors, lambda tensor: elements_of(tensor.parts), each):
        for version in range(len(versions)):
            between()
            _decode_version([tensor for tensor in batch if not tensor.is_lost], version, kernels, workers)
        for tensor in batch:
            between()
            staged = tensor.stage(left)
            if staged is None:
                undecoded.add(tensor.spec.name)
                continue
            prepared.add(staged)
            left = None if left is None else left - staged.nbytes
    return Decoded(prepared, frozenset(undecoded))


def _stage_on_device(
    live: LiveParameters,
    version: Version,
    tensors: Sequence[TensorOnRoute],
    prepared: Prepared,
    between: Callable[[], None],
    workers: Workers,
    kernels: Kernels,
) -> set[str]:
    """Stage the tensors that can be staged where they are; their names."""
    rows = parts_by_tensor(version)
    found = (
        tensor_on_device(live, tensor.spec, rows[tensor.spec.name]) for tensor in tensors if tensor.decodes_in_place
    )
    done: set[str] = set()
    each = _AT_ONCE_ON_DEVICE // workers.threads
    for batch in workers.batches([one for one in found if one is not None], lambda one: one.elements, each):
        between()
        staged = stage_on_device(live, batch, prepared.left, kernels)
        if staged is not None:
            prepared.add(staged)
            done |= {one.spec.name for one in batch}
    return done


def _refuse_other_route(live: LiveParameters, versions: Sequence[Version]) -> None:
    for first, second in pairwise(versions):
        if first.header.result != second.header.base:
            problem = f"a version ends at {first.header.result[:12]}, the next begins at {str(second.header.base)[:12]}"
            raise UsageError(problem)
    for version in versions:
        for row in version.rows:
            refuse_other_tensor(live.layout.table, row.spec)
        if version.header.base is None:
            refuse_left_out(live.layout.table, {row.spec.name for row in version.rows})


def _tensors_of(
    live: LiveParameters, versions: Sequence[Version], names: Container[str] | None, has_kernels: HasKernels
) -> list[TensorOnRoute]:
    """The tensors that change and of which the worker holds something."""
    rows = [parts_by_tensor(version) for version in versions]
    changed = [name for name in dict.fromkeys(name for one in rows for name in one) if names is None or name in names]
    return [
        TensorOnRoute(live, live.layout.table[name], [one.get(name, ()) for one in rows], has_kernels)
        for name in changed
        if live.layout.locate(name)
    ]


def _decode_version(tensors: Sequence[TensorOnRoute], version: int, kernels: Kernels, workers: Workers) -> None:
    """Decode what one version changes in some tensors: their blocks together, since many have few."""
    jobs: list[Job] = []
    found: dict[str, list[Overwrites]] = defaultdict(list)
    for tensor in tensors:
        for reader, row in tensor.rows[version]:
            with tensor.blaming(reader):
                overwrites, some = tensor.read(reader, row)
            found[tensor.spec.name] += overwrites
            jobs += some
    jobs = [job for job in jobs if not job.tensor.is_lost]
    for job, patch in zip(jobs, _decode(jobs, kernels, workers), strict=True):
        found[job.tensor.spec.name].append(Overwrites(job.row.place.flat(patch.indices), patch.new, patch.old))
    for tensor in tensors:
        tensor.take(found[tensor.spec.name])


def _decode(jobs: Sequence[Job], kernels: Kernels, workers: Workers) -> list[TensorPatch]:
    try:
        patches = _decode_together(jobs, kernels, workers)
    except FormatError:
        for job in jobs:  # raises the same, with the name of the object
            with job.tensor.blaming(job.reader):
                _decode_together([job], kernels, workers)
        raise
    for job, patch in zip(jobs, patches, strict=True):
        with job.tensor.blaming(job.reader):
            job.refuse_other_count(patch)
    return patches


def _decode_together(jobs: Sequence[Job], kernels: Kernels, workers: Workers) -> list[TensorPatch]:
    """Decode blocks where their old bits are."""
    found: dict[int, TensorPatch] = {}
    on_host = {i: (job.coded, job.window) for i, job in enumerate(jobs) if job.window is not None}
    if on_host:
        found |= zip(on_host, decode_in_windows(list(on_host.values()), workers), strict=True)

    def able(device: torch.device) -> DecodingKernels:
        decoding = kernels(device)
        assert decoding is not None  # else there are no words
        return decoding

    for turn in _turns(jobs):
        slots = {name: Slot(jobs[i].coded.row.spec, words) for name, (i, words) in turn.items()}
        patches = decode_in_place(slots, able, [jobs[i].coded for i, _ in turn.values()])
        found |= zip((i for i, _ in turn.values()), patches, strict=True)
    return [found[i] for i in range(len(jobs))]


def _turns(jobs: Sequence[Job]) -> list[dict[str, tuple[int, torch.Tensor]]]:
    """Those on a device, by name: decoders tell tensors by their names, so the boxes of one take turns."""
    turns: list[dict[str, tuple[int, torch.Tensor]]] = []
    seen: dict[str, int] = defaultdict(int)
    for i, job in enumerate(jobs):
        if job.words is None:
            continue
        name = job.tensor.spec.name
        if seen[name] == len(turns):
            turns.append({})
        turns[seen[name]][name] = i, job.words
        seen[name] += 1
    return turns
