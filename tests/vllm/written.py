"""A trainer whose weights a test sets bit by bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import weightcast as wc


class Written:
    """The weights of a checkpoint, to be changed and published; version 0 is the checkpoint."""

    def __init__(self, model: Path | str, channel: Path | str):
        self.channel = str(channel)
        with wc.Checkpoint(model) as files:
            arrays = {spec.name: files.read(spec.name).reshape(spec.shape).copy() for spec in files.table}
            self.weights = wc.Arrays(arrays, dtypes={spec.name: spec.dtype for spec in files.table})
        self._publisher = wc.Publisher(self.channel, self.weights)
        self._rng = np.random.default_rng(0)

    def publish(self) -> int:
        return self._publisher.publish().result(60).position.version

    def step(self) -> int:
        """Change a hundredth of the elements by one unit in the last place."""
        for spec in self.weights.table:
            bits = self.weights.read(spec.name)
            bits[self._rng.choice(bits.size, max(1, bits.size // 100), replace=False)] ^= 1
        return self.publish()

    def flip(self, prefix: str, bit: int = 5) -> None:
        """Flip a bit of every element of the tensors of that prefix; a second flip takes it back."""
        for spec in self.weights.table:
            if spec.name.startswith(prefix):
                self.weights.read(spec.name)[...] ^= 1 << bit

    def close(self) -> None:
        self._publisher.close()
