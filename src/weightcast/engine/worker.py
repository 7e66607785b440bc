"""The worker's side of an engine: answers an agent's requests about its parameters, and writes what was prepared.

What takes long runs as a job, in a thread, while the engine serves. Only an `ApplyUpdate` writes to parameters;
`control` sends it while the engine is paused.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from weightcast.channel.keys import Position
from weightcast.channel.records import Channel
from weightcast.disk.checkpoint import Checkpoint
from weightcast.engine import messages as msg
from weightcast.engine.background import Job, Jobs
from weightcast.engine.box_digests import BoxDigest
from weightcast.engine.cuts import cuts_of
from weightcast.engine.decoding import prepare_coded
from weightcast.engine.layout import Layout
from weightcast.engine.learn import TORCH_DTYPES, Load
from weightcast.engine.live import LiveParameters
from weightcast.engine.prepared import Prepared
from weightcast.engine.protocol import decode_request, encode
from weightcast.engine.state import table_digest
from weightcast.errors import CheckpointError, FormatError, UsageError, WeightcastError
from weightcast.follow.mirror_reader import reading_held
from weightcast.follow.replica import opened_patches
from weightcast.format.joined import joined, open_objects
from weightcast.format.safetensors import ReopenedSource
from weightcast.format.spec import TensorSpec, TensorTable
from weightcast.format.tensors import Weights
from weightcast.format.workers import Workers

_log = logging.getLogger("weightcast")


class EngineWorker:
    """One worker's parameters.

    ``learn`` finds the layout of a table, ``reload`` loads weights through the engine's own loader while it runs,
    ``folder`` is the checkpoint that the engine loaded when it started. ``cannot_reload`` returns the reason if
    ``reload`` would break the engine, ``available`` the bytes of free host memory. ``written`` is called with the
    parameters that were written in place, to bring up to date what the engine has computed from them. Elements of the
    parameters in ``moved`` may be elsewhere than the loader put them.
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
        written: Callable[[Iterable[str]], object] = lambda parameters: None,
        moved: Container[str] = (),
    ):
        self._model, self._learn, self._reload = model, learn, reload
        self._cannot_reload, self._available = cannot_reload, available or _available
        self._written, self._moved = written, moved
        self._folder = Path(folder)
        self._state = msg.WorkerState(uuid.uuid4().hex, rank, world)
        self._live: LiveParameters | None = None
        self._channel: Channel | None = None
        self._surveyed: Layout | None = None
        """What `Survey` found, until `Learn` takes it."""
        self._trusted: set[str] = set()
        self._jobs = Jobs()
        self._digested_at: int | None = None
        """The count of updates when all that was digested last was read, if it was to be remembered."""
        self._staged_at = 0
        """The same for what was staged last."""
        self._loaded = _signature(self._folder)

    # -- requests ----------------------------------------------------------------------------------------------------

    def answer(self, text: str) -> str:
        """Answer a request. Never raises: an error in a worker takes the whole engine down."""
        handlers: dict[type, Callable[[Any], object]] = {
            msg.Hello: lambda _: self._state,
            msg.ReadFit: self._read_fit,
            msg.ReadLearned: lambda _: msg.Learned(self._channel),
            msg.Survey: self._survey,
            msg.Learn: self._learn_channel,
            msg.Trust: self._trust,
            msg.Distrust: self._distrust,
            msg.SetPosition: self._set_position,
            msg.PollJob: lambda request: msg.JobProgress(self._jobs.report(request.job).state),
            msg.ReadJob: lambda request: self._jobs.report(request.job),
            msg.ApplyUpdate: self._apply,
            msg.Digest: self._digest,
            msg.StagePatches: self._stage_patches,
            msg.StageCoded: self._stage_coded,
            msg.StageWeights: self._stage_weights,
            msg.CompareFiles: self._compare_files,
        }
        try:
            request = decode_request(text)
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
        return msg.Fit(
            layout.unknown, absent, layout.uncovered, self._cannot_reload(), frozenset(trusted), cuts_of(layout)
        )

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
        self._unlearn()
        self._live, self._channel = LiveParameters(self._model, layout), request.channel
        self._set(table=table_digest(table))
        self._fit_changed()

    def _unlearn(self) -> None:
        self.close()
        self._live, self._trusted, self._digested_at = None, set(), None
        self._set(table=None, position=None)

    def _trust(self, request: msg.Trust) -> None:
        live = self._known()
        self._trusted |= {name for name in request.names - live.layout.unknown.keys() if self._shows(live, name)}
        self._fit_changed()

    def _shows(self, live: LiveParameters, name: str) -> bool:
        """Whether a tensor's digest can show where its elements are: that of equal elements fits any place."""
        moved = [part for part in live.layout.locate(name) if part.parameter in self._moved]
        return not any(live.is_uniform(part) for part in moved)

    def _distrust(self, request: msg.Distrust) -> None:
        self._known().layout.unknown.update(dict.fromkeys(request.names, request.reason))
        self._trusted -= request.names
        self._fit_changed()

    # -- position ----------------------------------------------------------------------------------------------------

    def _set_position(self, request: msg.SetPosition) -> None:
        if self._digested_at != self._state.updates:
            raise UsageError("the parameters were written since they were digested")
        self._set(position=request.position, changing=False)

    def forget(self) -> None:
        """Called when the engine changes its parameters by itself: nothing is known about them any more."""
        self.close()
        self._set(position=None, updates=self._state.updates + 1)
        if self._live is not None:
            self._live.digests.clear()

    # -- jobs --------------------------------------------------------------------------------------------------------

    def _digest(self, request: msg.Digest) -> None:
        live, specs, trusted = self._at_hand(), self._specs(request.names), frozenset(self._trusted)
        updates = self._state.updates

        def work(job: Job) -> msg.Digests:
            each = live.digest_each(specs, request.remember, job.refuse_cancelled)
            if request.remember:
                if self._state.updates != updates:
                    live.digests.clear()  # some are of what was there before
                    raise UsageError("the parameters were written while they were digested")
                self._digested_at = updates
            found, remembered = {name: tuple(boxes) for name, boxes in each.items()}, {}
            for spec in specs:
                parts = live.layout.locate(spec.name) if spec.name in trusted and not request.remember else ()
                if parts and all(part in live.digests for part in parts):
                    remembered[spec.name] = tuple(BoxDigest(part.box, live.digests[part]) for part in parts)
            return msg.Digests(found, remembered)

        self._jobs.start_reading(request.job, work, request.changes)

    def _stage_patches(self, request: msg.StagePatches) -> None:
        live, trusted = self._at_hand(), frozenset(self._trusted)

        def work(job: Job) -> msg.Staged:
            with opened_patches(map(Path, request.paths)) as patches:
                return _staged(job, live.prepare_patches(patches, trusted, self._room(), job.refuse_cancelled))

        self._start_update(request.job, work)

    def _stage_coded(self, request: msg.StageCoded) -> None:
        live, trusted = self._at_hand(), frozenset(self._trusted)

        def work(job: Job) -> msg.Staged:
            versions = [joined(open_objects(map(ReopenedSource, map(Path, paths)))) for paths in request.versions]
            threads, room = max(1, len(os.sched_getaffinity(0)) // self._state.world), self._room()
            with opened_patches(map(Path, request.plain)) as patches:
                plain = {row.spec.name for patch in patches for row in patch.rows}
                prepared = live.prepare_patches(patches, trusted, room, job.refuse_cancelled, hold_wholes=True)
            with closing(Workers(threads)) as workers:
                decoded = prepare_coded(live, versions, trusted - plain, prepared.left, job.refuse_cancelled, workers)
            prepared.add(decoded.prepared)
            return replace(_staged(job, prepared), undecoded=decoded.undecoded)

        self._start_update(request.job, work)

    def _stage_weights(self, request: msg.StageWeights) -> None:
        live, specs = self._at_hand(), self._specs(request.names)
        for name in request.names:
            if name not in self._trusted:
                raise UsageError("nothing is written through a layout that is not trusted", tensor=name)

        def work(job: Job) -> msg.Staged:
            with _mirrored(request.mirror, live.layout.table) as weights:
                return _staged(job, live.prepare_weights(weights, specs, self._room(), job.refuse_cancelled))

        self._start_update(request.job, work)

    def _compare_files(self, request: msg.CompareFiles) -> None:
        """A tensor that differs was changed after loading: it is not where the loader's layout says."""
        live = self._at_hand()
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

        self._jobs.start_reading(request.job, work, request.changes)

    def _start_update(self, name: str, work: Callable[[Job], msg.Staged]) -> None:
        self._staged_at = self._state.updates
        self._jobs.start_update(name, work)

    # -- update ------------------------------------------------------------------------------------------------------

    def _apply(self, update: msg.ApplyUpdate) -> msg.WorkerState:
        """The state says whether it ``failed`` and, by ``changing``, whether anything was written before that."""
        self._set(failed=None)
        try:
            prepared = self._take_prepared(update.job)
            if update.reload and (problem := self._cannot_reload()):
                raise UsageError(problem, tensor=update.reload[0])
            if update.mirror is None and (update.reload or (prepared is not None and prepared.rewrites)):
                raise UsageError("there is no mirror to read from")
            self._set(changing=True, position=None, updates=self._state.updates + 1)
            self._write(prepared, update)
            for device in self._gpus:
                torch.cuda.synchronize(device)
            if update.settle:
                self._set(position=update.position, changing=False)
        except Exception as error:  # noqa: BLE001 -- the agent gets it instead
            _log.exception("an update failed")
            self._set(failed=f"{type(error).__name__}: {error}")
        return self._state

    def _take_prepared(self, job: str | None) -> Prepared | None:
        if job is None:
            return None
        self._at_hand()
        prepared = self._jobs.take_prepared(job)
        if prepared is None:
            raise UsageError("what was staged is not here any more")
        if self._staged_at != self._state.updates:
            raise UsageError("the parameters were written since it was staged")
        return prepared

    def _write(self, prepared: Prepared | None, update: msg.ApplyUpdate) -> None:
        live = self._known()
        table = live.layout.table
        if prepared is not None and not prepared.rewrites and not update.reload:
            live.apply(prepared)
            self._written(prepared.parameters)
            return
        assert update.mirror is not None, "else nothing is read from one"
        with _mirrored(update.mirror, table, update.position) as weights:
            if prepared is not None:
                live.apply(prepared, weights)
                self._written(prepared.parameters)
            if update.reload:
                self._reload((name, _tensor_of(table[name], weights)) for name in update.reload)
        if live.has_moved:
            self._live = LiveParameters(self._model, live.layout)

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _room(self) -> int:
        """This worker's share of half of the free memory, on the parameters' device and on the host."""
        free = [self._available()]
        for device in self._gpus:
            free.append(torch.cuda.mem_get_info(device)[0])
        return min(free) // (2 * self._state.world)

    @property
    def _gpus(self) -> set[torch.device]:
        return {one.device for one in self._model.parameters() if one.device.type == "cuda"}

    def _known(self) -> LiveParameters:
        if self._live is None:
            raise UsageError("no layout was learned yet")
        return self._live

    def _at_hand(self) -> LiveParameters:
        """The parameters, if they are where they were learned; else there is nothing to read or write any more."""
        live = self._known()
        if live.has_moved:
            self._unlearn()
            raise UsageError("the engine has moved its parameters since they were learned", hint="Learn them again.")
        return live

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
def _mirrored(folder: str, table: TensorTable, position: Position | None = None) -> Iterator[Weights]:
    """A mirror's weights, log included. Its lock is held, so that the log is not folded meanwhile.

    `CheckpointError` if it is not at ``position``: whoever keeps it may have gone on.
    """
    with reading_held(Path(folder), table) as held:
        if held.fingerprint is None:
            raise CheckpointError("the folder is not a mirror of the channel", file=folder)
        if position is not None and held.fingerprint.digest != position.digest:
            raise CheckpointError(f"the mirror is at {held.position}, not at {position}", file=folder)
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
