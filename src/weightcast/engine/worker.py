"""The worker's side of an engine: answers an agent's requests about its parameters, and writes what was prepared.

What takes long runs as a job, in a thread, while the engine serves. Only `EngineWorker.apply` writes to parameters, and
only a paused engine calls it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from weightcast.disk.checkpoint import Checkpoint
from weightcast.engine import messages as msg
from weightcast.engine.background import Job, Jobs
from weightcast.engine.box_digests import BoxDigest
from weightcast.engine.layout import Layout
from weightcast.engine.learn import TORCH_DTYPES, Load
from weightcast.engine.live import LiveParameters
from weightcast.engine.prepared import Prepared
from weightcast.engine.protocol import decode_request, encode
from weightcast.engine.state import table_digest
from weightcast.errors import CheckpointError, FormatError, UsageError, WeightcastError
from weightcast.follow.mirror_reader import reading_held
from weightcast.follow.replica import opened_patches
from weightcast.format.spec import TensorSpec, TensorTable
from weightcast.format.tensors import Weights

_log = logging.getLogger("weightcast")


class EngineWorker:
    """One worker's parameters.

    ``learn`` finds the layout of a table, ``reload`` loads weights through the engine's own loader while it runs,
    ``folder`` is the checkpoint that the engine loaded when it started. ``cannot_reload`` returns the reason if
    ``reload`` would break the engine, ``available`` the bytes of free host memory.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        learn: Callable[[TensorTable], Layout],
        reload: Load,
        folder: str,
        rank: int,
        world: int,
        cannot_reload: Callable[[], str | None] = lambda: None,
        available: Callable[[], int] | None = None,
    ):
        self._model, self._learn, self._reload = model, learn, reload
        self._cannot_reload, self._available = cannot_reload, available or _available
        self._folder = Path(folder)
        self._state = msg.WorkerState(uuid.uuid4().hex, rank, world)
        self._live: LiveParameters | None = None
        self._surveyed: Layout | None = None
        """What `Survey` found, until `Learn` takes it."""
        self._trusted: set[str] = set()
        self._jobs = Jobs()
        self._loaded = _signature(self._folder)

    # -- requests ----------------------------------------------------------------------------------------------------

    def answer(self, text: str) -> str:
        """Answer a request. Never raises: an error in a worker takes the whole engine down."""
        handlers: dict[type, Callable[[Any], object]] = {
            msg.Hello: lambda _: self._state,
            msg.ReadFit: self._read_fit,
            msg.Survey: self._survey,
            msg.Learn: self._learn_channel,
            msg.Trust: self._trust,
            msg.Distrust: self._distrust,
            msg.SetPosition: self._set_position,
            msg.SetPausedByAgent: self._set_paused_by_agent,
            msg.ReadJob: lambda request: self._jobs.report(request.job),
            msg.Digest: self._digest,
            msg.StagePatches: self._stage_patches,
            msg.StageWeights: self._stage_weights,
            msg.CompareFiles: self._compare_files,
        }
        try:
            request = decode_request(text)
            if type(request) not in handlers:
                raise FormatError(f"{type(request).__name__} is sent through the engine's update route")
            answer = handlers[type(request)](request) or msg.Done()
        except FormatError as error:
            answer = msg.Failed(f"malformed request: {error}")
        except WeightcastError as error:
            answer = msg.Failed(str(error))
        except Exception as error:  # noqa: BLE001 -- the agent gets it instead
            _log.exception("a request failed")
            answer = msg.Failed(f"{type(error).__name__}: {error}")
        return encode(answer)

    def _set(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)

    def _fit_changed(self) -> None:
        self._set(fit_revision=self._state.fit_revision + 1)

    # -- the layout --------------------------------------------------------------------------------------------------

    def _read_fit(self, _: msg.ReadFit) -> msg.Fit:
        return self._fit(self._known().layout, self._trusted)

    def _fit(self, layout: Layout, trusted: Iterable[str] = ()) -> msg.Fit:
        absent = frozenset(
            spec.name
            for spec in layout.table
            if spec.elements and spec.name not in layout.unknown and not layout.locate(spec.name)
        )
        return msg.Fit(layout.unknown, absent, layout.uncovered, self._cannot_reload(), frozenset(trusted))

    def _survey(self, request: msg.Survey) -> msg.SurveyResult:
        layout = self._surveyed = self._learn(request.channel.table)
        own = self._own_layout() if layout.broken or layout.uncovered else None
        broken = layout.broken if own is None or not own.broken else None
        left = {} if own is None or own.broken else own.uncovered
        strange = {name: count for name, count in layout.uncovered.items() if count > left.get(name, 0)}
        return msg.SurveyResult(self._fit(layout), broken, strange)

    def _own_layout(self) -> Layout | None:
        """The layout of what the engine itself loaded; None if its folder cannot be read any more."""
        try:
            with Checkpoint(self._folder) as files:
                return self._learn(files.table)
        except WeightcastError:
            return None

    def _learn_channel(self, request: msg.Learn) -> None:
        table = request.channel.table
        layout, self._surveyed = self._surveyed, None
        if layout is None or layout.table != table:
            layout = self._learn(table)
        self.close()
        self._trusted = set()
        self._set(table=None, position=None)
        self._live = LiveParameters(self._model, layout)
        self._set(table=table_digest(table))
        self._fit_changed()

    def _trust(self, request: msg.Trust) -> None:
        self._trusted |= request.names - self._known().layout.unknown.keys()
        self._fit_changed()

    def _distrust(self, request: msg.Distrust) -> None:
        self._known().layout.unknown.update(dict.fromkeys(request.names, request.reason))
        self._trusted -= request.names
        self._fit_changed()

    # -- position and pause ------------------------------------------------------------------------------------------

    def _set_position(self, request: msg.SetPosition) -> None:
        self._set(position=request.position, changing=request.position is None)

    def _set_paused_by_agent(self, request: msg.SetPausedByAgent) -> None:
        self._set(paused_by_agent=request.paused)

    def forget(self) -> None:
        """Called when the engine changes its parameters by itself: nothing is known about them any more."""
        self.close()
        self._set(position=None, updates=self._state.updates + 1)
        if self._live is not None:
            self._live.digests.clear()

    # -- jobs --------------------------------------------------------------------------------------------------------

    def _digest(self, request: msg.Digest) -> None:
        live, specs, trusted = self._known(), self._specs(request.names), frozenset(self._trusted)

        def work(job: Job) -> msg.Digests:
            found, remembered = {}, {}
            for spec in specs:
                job.refuse_cancelled()
                found[spec.name] = tuple(live.digest(spec, request.remember))
                parts = live.layout.locate(spec.name) if spec.name in trusted and not request.remember else ()
                if parts and all(part in live.digests for part in parts):
                    remembered[spec.name] = tuple(BoxDigest(part.box, live.digests[part]) for part in parts)
            return msg.Digests(found, remembered)

        self._jobs.start("read", request.job, work)

    def _stage_patches(self, request: msg.StagePatches) -> None:
        live, trusted = self._known(), frozenset(self._trusted)

        def work(job: Job) -> msg.Staged:
            with opened_patches(map(Path, request.paths)) as patches:
                return _staged(job, live.prepare_patches(patches, trusted, self._room(), job.refuse_cancelled))

        self._jobs.start("update", request.job, work)

    def _stage_weights(self, request: msg.StageWeights) -> None:
        live, specs = self._known(), self._specs(request.names)
        for name in request.names:
            if name not in self._trusted:
                raise UsageError("nothing is written through a layout that is not trusted", tensor=name)

        def work(job: Job) -> msg.Staged:
            with _mirrored(request.mirror, live.layout.table) as weights:
                return _staged(job, live.prepare_weights(weights, specs, self._room(), job.refuse_cancelled))

        self._jobs.start("update", request.job, work)

    def _compare_files(self, request: msg.CompareFiles) -> None:
        """A tensor that differs was changed after loading: it is not where the loader's layout says."""
        live = self._known()
        if self._state.updates:
            raise UsageError("the parameters are no longer what was loaded")

        def work(job: Job) -> msg.Comparison:
            if not self._loaded or _signature(self._folder) != self._loaded:  # the files have changed since
                return msg.Comparison(frozenset(), frozenset())
            same: set[str] = set()
            other: set[str] = set()
            with Checkpoint(self._folder, aliases=dict(live.layout.table.aliases)) as files:
                for spec in live.layout.table:
                    is_common = spec.name in files.table and files.table[spec.name] == spec
                    if is_common and live.layout.locate(spec.name):
                        found = live.prepare_weights(files, [spec], 0, job.refuse_cancelled)
                        (other if found.changed else same).add(spec.name)
            return msg.Comparison(frozenset(same), frozenset(other))

        self._jobs.start("read", request.job, work)

    # -- update ------------------------------------------------------------------------------------------------------

    def apply(self, text: str) -> None:
        """Carry out an `ApplyUpdate`.

        Never raises: an engine cannot tell its workers apart. `WorkerState` says whether it ``failed`` and, by
        ``changing``, whether anything was written before that.
        """
        self._set(failed=None)
        try:
            update = decode_request(text)
            if not isinstance(update, msg.ApplyUpdate):
                raise FormatError(f"{type(update).__name__} is not an update")
            prepared = self._take_prepared(update.job)
            if update.reload and (problem := self._cannot_reload()):
                raise UsageError(problem, tensor=update.reload[0])
            self._set(changing=True, updates=self._state.updates + 1)
            self._write(prepared, update)
            self._set(position=update.position, changing=False)
        except Exception as error:  # noqa: BLE001 -- the agent gets it instead
            _log.exception("an update failed")
            position = None if self._state.changing else self._state.position
            self._set(failed=f"{type(error).__name__}: {error}", position=position)

    def _take_prepared(self, job: str | None) -> Prepared | None:
        if job is None:
            return None
        if self._known().has_moved:
            raise UsageError("the engine has moved its parameters since they were learned")
        prepared = self._jobs.take_prepared(job)
        if prepared is None:
            raise UsageError("what was staged is not here any more")
        return prepared

    def _write(self, prepared: Prepared | None, update: msg.ApplyUpdate) -> None:
        live = self._known()
        table = live.layout.table
        if prepared is not None and not prepared.rewrites and not update.reload:
            live.apply(prepared)
            return
        with _mirrored(update.mirror, table) as weights:
            if prepared is not None:
                live.apply(prepared, weights)
            if update.reload:
                self._reload((name, _tensor_of(table[name], weights)) for name in update.reload)
        if live.has_moved:
            self._live = LiveParameters(self._model, live.layout)

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _room(self) -> int:
        """This worker's share of half of the free memory, on the parameters' device and on the host."""
        free = [self._available()]
        for device in {one.device for one in self._model.parameters() if one.device.type == "cuda"}:
            free.append(torch.cuda.mem_get_info(device)[0])
        return min(free) // (2 * self._state.world)

    def _known(self) -> LiveParameters:
        if self._live is None:
            raise UsageError("no layout was learned yet")
        return self._live

    def _specs(self, names: Iterable[str] | None) -> list[TensorSpec]:
        table = self._known().layout.table
        if names is None:
            return list(table)
        for name in names:
            if name not in table:
                raise UsageError("the learned table has no such tensor", tensor=name)
        return [table[name] for name in names]

    def close(self) -> None:
        """Cancel all jobs; what they staged is gone."""
        self._jobs.cancel()


def _staged(job: Job, prepared: Prepared) -> msg.Staged:
    job.prepared = prepared
    return msg.Staged(prepared.digests, prepared.changed, prepared.nbytes, bool(prepared.rewrites))


@contextmanager
def _mirrored(folder: str, table: TensorTable) -> Iterator[Weights]:
    """A mirror's weights, log included. Its lock is held, so that the log is not folded meanwhile."""
    with reading_held(Path(folder), table) as held:
        if held.fingerprint is None:
            raise CheckpointError("the folder is not a mirror of the channel", file=folder)
        yield held.weights


def _tensor_of(spec: TensorSpec, weights: Weights) -> torch.Tensor:
    bits = weights.read(spec.name)
    return torch.from_numpy(bits.view("u1")).view(TORCH_DTYPES[spec.dtype]).reshape(spec.shape)


def _available() -> int:
    """Bytes of host memory that are free, or can be freed without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def _signature(folder: Path) -> dict[str, tuple[int, int]]:
    """Sizes and times of a folder's weights; empty if there is no such folder."""
    found = {path.name: path.stat() for path in folder.glob("*.safetensors")}
    return {name: (status.st_size, status.st_mtime_ns) for name, status in found.items()}
