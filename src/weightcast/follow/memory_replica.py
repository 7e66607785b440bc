"""Weights in memory that are kept at a channel's versions."""

from __future__ import annotations

import shutil
from contextlib import ExitStack

from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position
from weightcast.channel.records import Manifest
from weightcast.channel.route import Route
from weightcast.disk.checkpoint import Checkpoint
from weightcast.disk.durable import Enter, Report, scratch, silent, untimed
from weightcast.disk.staged import scatter_into
from weightcast.errors import UsageError
from weightcast.follow.replica import Staged, opened_patches
from weightcast.follow.staging import stage_route
from weightcast.format.digest import Fingerprint, fingerprint
from weightcast.format.tensors import Target, Weights, refuse_other_bits
from weightcast.format.workers import ONE, Workers


class MemoryReplica:
    """A target in memory. Staged patches are in a temporary folder; `apply` only writes them into the target."""

    beside = None
    takes_anchors = True

    def __init__(self, target: Target, workers: Workers = ONE, report: Report = silent):
        if not isinstance(target, Target):
            hint = "Pass wc.Arrays, or the path of a folder for a mirror on disk."
            raise UsageError(f"a {type(target).__name__} cannot take patches", hint=hint)
        for spec in target.table:
            refuse_other_bits(spec, target.read(spec.name))
        self._target = target
        self._workers, self._report = workers, report
        self.version: int | None = None
        self.fingerprint: Fingerprint | None = fingerprint(target, workers)
        self._folder = ExitStack()
        self.workshop = self._folder.enter_context(scratch())

    @property
    def weights(self) -> Weights | None:
        return self._target

    @property
    def base(self) -> Weights | None:
        return self._target

    def locate(self, version: int | None) -> None:
        self.version = version

    def examine(self) -> bool:
        remembered, self.fingerprint = self.fingerprint, fingerprint(self._target, self._workers)
        if remembered == self.fingerprint:
            return True
        self.version = None
        return False

    def examine_if_changed(self) -> None:
        """Do nothing: memory gives no cheap sign of having been written."""

    def stage(self, chain: Chain, route: Route, goal: Manifest, enter: Enter = untimed) -> Staged:
        return stage_route(chain, self, route, goal, self._workers, self._report, enter)

    def apply(self, staged: Staged) -> None:
        with opened_patches(patch.path for patch in staged.patches) as patches:
            self.version = self.fingerprint = None  # until the last bit is written the weights are a mixture
            if staged.anchor is not None:
                with Checkpoint(staged.anchor.folder) as files:
                    for spec in files.table:
                        self._target.write(spec.name, files.read(spec.name))
            for patch in patches:
                scatter_into(self._target, patch)
        self.fingerprint, self.version = staged.fingerprint, staged.position.version
        for done in staged.patches:
            done.path.unlink()
        if staged.anchor is not None:
            shutil.rmtree(staged.anchor.folder)

    def stage_back(self, goal: Position) -> Staged | None:
        return None

    def fold(self, wait: bool = True, patience: float | None = None) -> bool:
        return True

    def begin_fold(self) -> None:
        """Do nothing: there are no files."""

    def take_up_fold(self) -> None:
        """Do nothing: none is ever begun."""

    def close(self) -> None:
        self._folder.close()
