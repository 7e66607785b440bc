"""The verbs in this process, and a channel that they made: what the tests of the command line share."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - numpy, and so safetensors, knows bfloat16 by it
import numpy as np
from cases import Bag, gaussian, moved, write_folder
from commands import COMMAND, Done
from safetensors.numpy import load_file
from typer.testing import CliRunner

from weightcast.cli import app
from weightcast.format.tensors import TensorSpec

USAGE, FOUND, FORMAT, CHECKPOINT, STORE, ACCESS, CHANNEL, CONFLICT = 2, 3, 4, 5, 7, 8, 9, 10
VERSIONS = 10
RECORD = "echo $WEIGHTCAST_VERSION $WEIGHTCAST_STEP $WEIGHTCAST_FOLDER $WEIGHTCAST_DIGEST >> {log}; "
"""A command for `pull --exec` that notes what it was given."""


def run(*arguments: str | Path | int) -> Done:
    """A verb, in this process: most of a process of its own is starting Python."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


def facts(*arguments: str | Path | int) -> dict[str, Any]:
    """What a verb tells a program."""
    return run(*arguments, "--json").facts


def text(*arguments: str | Path | int) -> str:
    """What a verb tells people."""
    done = run(*arguments)
    assert (done.code, done.err) == (0, "")
    return done.out


def tree(path: Path) -> dict[str, bytes | None]:
    """All that is below a folder, folders too."""
    return {str(at.relative_to(path)): at.read_bytes() if at.is_file() else None for at in sorted(path.rglob("*"))}


# -- a channel ---------------------------------------------------------------------------------------------------------


def model(seed: int = 0) -> Bag:
    """Three layers, and what stands around them."""
    rng = np.random.default_rng(seed)
    kinds = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "input_layernorm")
    names = [f"model.layers.{layer}.{kind}.weight" for layer in range(3) for kind in kinds]
    names += ["model.embed_tokens.weight", "model.norm.weight"]
    shapes = {name: (32,) if "norm" in name else (40, 32) for name in names}
    return Bag({TensorSpec(name, "BF16", shape): gaussian(rng, int(np.prod(shape))) for name, shape in shapes.items()})


def step(weights: Bag, seed: int) -> Bag:
    """A step of training: layers change the less the deeper they are, norms not at all."""
    rng = np.random.default_rng(1000 + seed)

    def density(name: str) -> float:
        layer = re.search(r"\d+", name)
        return 0.0 if "norm" in name else 0.2 / 4 ** int(layer[0]) if layer else 0.05

    return Bag({spec: moved(rng, weights.read(spec.name), density(spec.name)) for spec in weights.table})


@dataclass(frozen=True)
class World:
    """A channel with `VERSIONS` versions, and a checkpoint folder for each, as a trainer saved them."""

    url: Path
    checkpoints: tuple[Path, ...]
    states: tuple[Bag, ...]


def make_world(home: Path) -> World:
    """A channel made by the verbs themselves, with a squash, a second anchor, a pin, a tag and a label."""
    states = [model()]
    for seed in range(VERSIONS):
        states.append(step(states[-1], seed))
    checkpoints = [home / "checkpoints" / str(version) for version in range(VERSIONS + 1)]
    for folder, weights in zip(checkpoints, states, strict=True):
        write_folder(folder, weights)
    url, mirror = home / "channel", ("--mirror", home / "mirror")
    assert run("init", url, checkpoints[0], "--step", 0).code == 0
    for version in range(1, VERSIONS):
        label = ("-m", "after the warm-up") if version == 5 else ()
        assert run("publish", url, checkpoints[version], "--step", 10 * version, *mirror, *label).code == 0
    assert run("squash", url, "--anchor").code == 0
    assert run("pin", url, 4).code == 0
    assert run("tag", url, 4, "best").code == 0
    return World(url, tuple(checkpoints), tuple(states))


def holds(folder: Path, weights: Bag) -> bool:
    """Whether the files of a folder have these bits, by the safetensors library."""
    found = {name: array for file in folder.glob("*.safetensors") for name, array in load_file(file).items()}
    return found.keys() == {spec.name for spec in weights.table} and all(
        found[spec.name].tobytes() == weights.read(spec.name).tobytes() for spec in weights.table
    )


def objects(url: Path, kind: str) -> list[Path]:
    return sorted((url / kind).rglob("*.safetensors"))


@contextmanager
def following(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """`pull --follow` as a process; its lines are to be read one by one."""
    command = [*COMMAND, "pull", *arguments, "--follow", "--every", "0.05"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def ended(child: subprocess.Popen[str], number: int) -> Done:
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    return Done(child.returncode, out, err)


class Web:
    """A web server that can go away and come back."""

    def __init__(self, handler: Callable[..., BaseHTTPRequestHandler]):
        self._handler, self._port = handler, 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Web:
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), self._handler)
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Folder(SimpleHTTPRequestHandler):
    """Shows a folder."""

    def log_message(self, *_: object) -> None:
        pass


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def refused(watched: Path, code: int, *arguments: str | Path | int) -> str:
    """Assert one line on standard error, that exit code, and nothing changed below ``watched``; returns the line."""
    before = tree(watched)
    done = run(*arguments)
    assert done.code == code, done.err
    assert tree(watched) == before
    told = run(*arguments, "--json")
    assert told.code == code
    assert told.error["problem"] in done.complaint
    assert tree(watched) == before
    return done.complaint
