"""The worker's side of an engine: answers what an agent asks of its parameters, and writes what was prepared.

Requests and answers are JSON. What takes long goes on in a thread, as a *job*, while the engine serves: an agent asks
for it again. Nothing but `apply` writes to a parameter, and nobody calls that but a paused engine.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from weightcast.channel.keys import Position
from weightcast.channel.records import channel_from_json, position_from_json, position_json
from weightcast.disk.checkpoint import Checkpoint
from weightcast.engine.layout import Held, Layout
from weightcast.engine.learn import Load
from weightcast.engine.live import LiveParameters, Prepared
from weightcast.engine.meeting import PROTOCOL
from weightcast.errors import CheckpointError, UsageError, WeightcastError
from weightcast.follow.mirror_reader import reading_held
from weightcast.follow.replica import Layers
from weightcast.format.digest import table_json
from weightcast.format.spec import TensorSpec, TensorTable
from weightcast.format.tensors import Weights
from weightcast.torch.coordinates import DTYPES

_TORCH = {name: dtype for dtype, name in DTYPES.items()}
_log = logging.getLogger("weightcast")


_LOOK, _UPDATE = "look", "update"


class _CancelledError(Exception):
    """Ends a job that nobody waits for."""


class _Job:
    """Work in a thread; ``result`` is for the agent, ``prepared`` for `apply`."""

    def __init__(self, name: str, work: Callable[[_Job], dict[str, Any]]):
        self.name = name
        self.cancelled = threading.Event()
        self.result: dict[str, Any] | None = None
        self.prepared: Prepared | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="weightcast-job", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        if self.cancelled.is_set():
            raise _CancelledError

    def _run(self) -> None:
        try:
            self.result = {"state": "done", **self._work(self)}
        except _CancelledError:
            self.result = {"state": "cancelled"}
        except Exception as error:  # noqa: BLE001 -- a thread's only way to tell
            _log.exception("a job failed")
            self.result = {"state": "failed", "error": f"{type(error).__name__}: {error}"}

    def cancel(self) -> None:
        self.cancelled.set()
        self._thread.join()


class EngineWorker:
    """One worker's parameters.

    ``learn`` finds the layout of a table, ``reload`` is the engine's own way to load weights while it runs, ``folder``
    is what it loaded when it began. ``cannot_reload`` gives the reason if ``reload`` would spoil the engine.
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
    ):
        self._model, self._learn, self._reload = model, learn, reload
        self._cannot_reload = cannot_reload
        self._folder = Path(folder)
        self._rank, self._world = rank, world
        self._instance = uuid.uuid4().hex
        self._position: Position | None = None
        self._changing = False
        """From the first write of an update to the last: set for good if that broke off."""
        self._held = False
        """Whether an agent has paused the engine, and nobody has let it go on since."""
        self._failed: str | None = None
        self._table: str | None = None
        """Which one was learned."""
        self._updates = 0
        self._lessons = 0
        """How often what `names` tells has changed."""
        self._live: LiveParameters | None = None
        self._surveyed: Layout | None = None
        """What `survey` found, until `learn` takes it up."""
        self._trusted: set[str] = set()
        self._jobs: dict[str, _Job] = {}
        """What reads and what prepares an update: one of each, so that a look does not take away what was staged."""
        self._loaded = _signature(self._folder)

    # -- requests ----------------------------------------------------------------------------------------------------

    def answer(self, text: str) -> dict[str, str]:
        """Never raises: an error in a worker would take the whole engine down."""
        try:
            request = json.loads(text)
            known: Mapping[str, Callable[..., dict[str, Any]]] = {
                "hello": self.hello,
                "names": self.names,
                "survey": self.survey,
                "learn": self.learn,
                "digest": self.digest,
                "verify": self.verify,
                "stage_patches": self.stage_patches,
                "stage_weights": self.stage_weights,
                "compare_files": self.compare_files,
                "job": self.job,
                "trust": self.trust,
                "doubt": self.doubt,
                "stand": self.stand,
                "hold": self.hold,
            }
            answer = known[request.pop("do")](**request)
        except WeightcastError as error:
            answer = {"error": str(error)}
        except Exception as error:  # noqa: BLE001 -- an agent is told instead
            _log.exception("a request failed")
            answer = {"error": f"{type(error).__name__}: {error}"}
        return {"json": json.dumps(answer)}

    def hello(self) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL,
            "instance": self._instance,
            "rank": self._rank,
            "world": self._world,
            "position": position_json(self._position),
            "changing": self._changing,
            "failed": self._failed,
            "held": self._held,
            "updates": self._updates,
            "table": self._table,
            "lessons": self._lessons,
        }

    def names(self) -> dict[str, Any]:
        """How the learned table fits, and for which tensors the layout was proven."""
        return {**self._fit(self._known().layout), "trusted": sorted(self._trusted)}

    def survey(self, channel: str) -> dict[str, Any]:
        """Find out how the tensors of a channel would fit; what was learned before stays as it is.

        ``strange`` says whether the engine's own checkpoint fits better: then this one is of another model.
        """
        layout = self._learn(channel_from_json(channel.encode()).table)
        self._surveyed = layout
        fit = self._fit(layout)
        own = self._own_layout() if layout.broken or layout.uncovered else None
        broken = layout.broken if own is None or not own.broken else None
        left = {} if own is None or own.broken else own.uncovered
        strange = {name: count for name, count in layout.uncovered.items() if count > left.get(name, 0)}
        return {**fit, "broken": broken, "strange": strange}

    def _own_layout(self) -> Layout | None:
        """The layout of what the engine itself loaded; None if its folder cannot be read any more."""
        try:
            with Checkpoint(self._folder) as files:
                return self._learn(files.table)
        except WeightcastError:
            return None

    def _fit(self, layout: Layout) -> dict[str, Any]:
        """Tensors that cannot be followed, tensors and parameters without a counterpart, what rules out a reload."""
        absent = [
            spec.name
            for spec in layout.table
            if spec.elements and spec.name not in layout.unknown and not layout.locate(spec.name)
        ]
        return {
            "unknown": layout.unknown,
            "absent": absent,
            "uncovered": layout.uncovered,
            "cannot_reload": self._cannot_reload(),
        }

    def learn(self, channel: str) -> dict[str, Any]:
        """Take up the layout of a channel's tensors; what was known of another table is forgotten."""
        table = channel_from_json(channel.encode()).table
        layout, self._surveyed = self._surveyed, None
        if layout is None or layout.table != table:
            layout = self._learn(table)
        self.close()
        self._table, self._trusted, self._position = None, set(), None
        self._live = LiveParameters(self._model, layout)
        self._table = hashlib.sha256(table_json(table).encode()).hexdigest()
        self._lessons += 1
        return {}

    def digest(self, job: str, names: list[str] | None = None) -> dict[str, Any]:
        """Begin to digest what is there, of some tensors or all."""
        live, specs = self._known(), self._specs(names)

        def work(running: _Job) -> dict[str, Any]:
            found = {}
            for spec in specs:
                running.pause()
                found[spec.name] = live.held(spec)
            return {"held": _held_json(found)}

        return self._begin(_LOOK, job, work)

    def verify(self, job: str) -> dict[str, Any]:
        """Begin to digest what is there, beside what it was when it was last proven."""
        live, specs, trusted = self._known(), self._specs(None), frozenset(self._trusted)

        def work(running: _Job) -> dict[str, Any]:
            found, remembered = {}, {}
            for spec in specs:
                running.pause()
                found[spec.name] = live.held(spec, remember=False)
                parts = live.layout.locate(spec.name)
                if parts and spec.name in trusted and all(part in live.fingerprint for part in parts):
                    remembered[spec.name] = [Held(part.box, live.fingerprint[part]) for part in parts]
            return {"held": _held_json(found), "remembered": _held_json(remembered)}

        return self._begin(_LOOK, job, work)

    def stage_patches(self, job: str, paths: list[str]) -> dict[str, Any]:
        """Begin to prepare staged patches, one behind the other; only of tensors whose layout is trusted."""
        live, trusted = self._known(), frozenset(self._trusted)

        def work(running: _Job) -> dict[str, Any]:
            with Layers([Path(path) for path in paths]) as layers:
                room = self._room()
                return self._prepared(running, live.prepare_patches(layers.readers, trusted, room, running.pause))

        return self._begin(_UPDATE, job, work)

    def stage_weights(self, job: str, folder: str, names: list[str]) -> dict[str, Any]:
        """Begin to prepare all that differs from a mirror, of some tensors."""
        live, specs = self._known(), self._specs(names)
        for name in names:
            if name not in self._trusted:
                raise UsageError("a layout that was not proven is not written through", tensor=name)

        def work(running: _Job) -> dict[str, Any]:
            with _mirrored(folder, live.layout.table) as weights:
                return self._prepared(running, live.prepare_weights(weights, specs, self._room(), running.pause))

        return self._begin(_UPDATE, job, work)

    def compare_files(self, job: str) -> dict[str, Any]:
        """Begin to find out which tensors are, read through the layout, what the engine loaded when it began.

        Those that are not were changed after loading; the layout that the loader shows is not where they are.
        """
        live = self._known()
        if self._updates:
            raise UsageError("the parameters are not what was loaded any more")

        def work(running: _Job) -> dict[str, Any]:
            if (
                not self._loaded or _signature(self._folder) != self._loaded
            ):  # there is nothing to compare with any more
                return {"same": [], "other": []}
            same: list[str] = []
            other: list[str] = []
            with Checkpoint(self._folder, aliases=dict(live.layout.table.aliases)) as files:
                for spec in live.layout.table:
                    if spec.name in files.table and files.table[spec.name] == spec:
                        found = live.prepare_weights(files, [spec], 0, running.pause)
                        if live.layout.locate(spec.name):
                            (other if found.changed else same).append(spec.name)
            return {"same": same, "other": other}

        return self._begin(_LOOK, job, work)

    def job(self, job: str) -> dict[str, Any]:
        """How a job is doing, and what it found."""
        found = next((one for one in self._jobs.values() if one.name == job), None)
        return {"state": "gone"} if found is None else found.result or {"state": "running"}

    def trust(self, names: list[str]) -> dict[str, Any]:
        """Be told for which tensors the layout was proven: their live digests were the manifest's."""
        self._trusted |= set(names) - self._known().layout.unknown.keys()
        self._lessons += 1
        return {}

    def doubt(self, names: list[str], reason: str) -> dict[str, Any]:
        """Be told that the layout is wrong for some tensors, whatever may be read through it later."""
        self._known().layout.unknown.update(dict.fromkeys(names, reason))
        self._trusted -= set(names)
        self._lessons += 1
        return {}

    def stand(self, position: list[Any] | None) -> dict[str, Any]:
        """Be told where the parameters stand; None if they are not what they should be."""
        self._position = None if position is None else position_from_json(position)
        self._changing = position is None
        return {}

    def forget(self) -> None:
        """The engine has changed its parameters by itself: nothing is known of them any more."""
        self.close()
        self._position, self._updates = None, self._updates + 1
        if self._live is not None:
            self._live.fingerprint.clear()

    def hold(self, held: bool) -> dict[str, Any]:
        """Be told that an agent pauses the engine, or no longer: the next one must know whose pause it is."""
        self._held = held
        return {}

    # -- update ------------------------------------------------------------------------------------------------------

    def apply(self, job: str | None, position: list[Any] | None, mirror: Mapping[str, Any], reload: list[str]) -> None:
        """Write what a job prepared, then load what has to go through the engine's own loader.

        Does not raise: an engine cannot tell its workers apart. `hello` tells whether it ``failed``, and, by
        ``changing``, whether anything was written before.
        """
        self._failed = None
        try:
            prepared = self._staged(job)
            if reload and (problem := self._cannot_reload()):
                raise UsageError(problem, tensor=reload[0])
            self._changing = True
            self._updates += 1
            self._write(prepared, mirror, reload)
            self._position = None if position is None else position_from_json(position)
            self._changing = False
        except Exception as error:  # noqa: BLE001 -- an agent is told instead
            _log.exception("an update failed")
            self._failed = f"{type(error).__name__}: {error}"
            self._position = None if self._changing else self._position

    def _staged(self, job: str | None) -> Prepared | None:
        if job is None:
            return None
        found = self._jobs.get(_UPDATE)
        if found is None or found.name != job or found.prepared is None:
            raise UsageError("what was staged is not here any more")
        if self._known().has_moved:
            raise UsageError("the engine has moved its parameters since they were learned")
        prepared, found.prepared = found.prepared, None
        return prepared

    def _write(self, prepared: Prepared | None, mirror: Mapping[str, Any], reload: list[str]) -> None:
        live = self._known()
        table = live.layout.table
        if prepared is not None and not prepared.wholes and not reload:
            live.apply(prepared)
            return
        with _mirrored(mirror["folder"], table) as weights:
            if prepared is not None:
                live.apply(prepared, weights)
            if reload:
                self._reload((name, _tensor_of(table[name], weights)) for name in reload)
        if live.has_moved:
            self._live = LiveParameters(self._model, live.layout)

    # -- jobs --------------------------------------------------------------------------------------------------------

    def _begin(self, kind: str, name: str, work: Callable[[_Job], dict[str, Any]]) -> dict[str, Any]:
        if kind in self._jobs:
            self._jobs.pop(kind).cancel()
        self._jobs[kind] = _Job(name, work)
        return {}

    @staticmethod
    def _prepared(job: _Job, prepared: Prepared) -> dict[str, Any]:
        job.prepared = prepared
        return {"held": _held_json(prepared.held), "changed": prepared.changed, "nbytes": prepared.nbytes}

    def _room(self) -> int:
        """This worker's share of half of the memory that is free where the parameters are, and here."""
        free = [_available()]
        for device in {one.device for one in self._model.parameters() if one.device.type == "cuda"}:
            free.append(torch.cuda.mem_get_info(device)[0])
        return min(free) // (2 * self._world)

    def _known(self) -> LiveParameters:
        if self._live is None:
            raise UsageError("nothing was learned yet")
        return self._live

    def _specs(self, names: Iterable[str] | None) -> list[TensorSpec]:
        table = self._known().layout.table
        return list(table) if names is None else [table[name] for name in names]

    def close(self) -> None:
        for job in self._jobs.values():
            job.cancel()
        self._jobs.clear()


@contextmanager
def _mirrored(folder: str, table: TensorTable) -> Iterator[Weights]:
    """A mirror's weights as of the end of its log; nobody folds that meanwhile."""
    with reading_held(Path(folder), table) as held:
        if held.fingerprint is None:
            raise CheckpointError("the folder is not a mirror of the channel", file=folder)
        yield held.weights


def _tensor_of(spec: TensorSpec, weights: Weights) -> torch.Tensor:
    bits = weights.read(spec.name)
    return torch.from_numpy(bits.view("u1")).view(_TORCH[spec.dtype]).reshape(spec.shape)


def _held_json(held: Mapping[str, list[Held]]) -> dict[str, Any]:
    return {name: [one.as_json() for one in boxes] for name, boxes in held.items()}


def _available() -> int:
    """Bytes of memory that can be had without anyone being pushed out."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def _signature(folder: Path) -> dict[str, tuple[int, int]]:
    """Sizes and times of a folder's weights; nothing where it is no folder."""
    found = {path.name: path.stat() for path in folder.glob("*.safetensors")}
    return {name: (status.st_size, status.st_mtime_ns) for name, status in found.items()}
