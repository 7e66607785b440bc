"""The verbs for channels: what they print, for people and for programs, and what they leave behind when they fail."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from cases import Bag, gaussian, moved, write_folder
from commands import COMMAND, SCRIPT, Done, at_once
from safetensors.numpy import load_file
from scripted_store import ScriptedStore
from typer.testing import CliRunner

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import put_heartbeat
from weightcast.channel.keys import Position
from weightcast.channel.records import Heartbeat
from weightcast.cli import app
from weightcast.cli.console import EXIT_CODES, EXIT_CODES_HELP
from weightcast.cli.gc import seconds
from weightcast.cli.heat import heat_of, place_of
from weightcast.cli.pull import SHORT, _follow
from weightcast.cli.wording import ratio, size, span
from weightcast.errors import AccessError, ChannelError, ConflictError, SpaceError, StoreError, UsageError
from weightcast.follow.loop import OnError
from weightcast.follow.subscriber import Subscriber
from weightcast.follow.update import Update
from weightcast.format.spec import TensorSpec
from weightcast.store import open_store
from weightcast.store.memory import MemoryStore

USAGE, FOUND, FORMAT, CHECKPOINT, STORE, ACCESS, CHANNEL, CONFLICT = 2, 3, 4, 5, 7, 8, 9, 10
VERBS = ("init", "publish", "pull", "log", "show", "status", "plan", "verify", "squash", "gc", "pin", "unpin", "reset")
VERSIONS = 10


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache of one's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


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


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Made once, by the verbs themselves, and only read by the tests."""
    home = tmp_path_factory.mktemp("world")
    states = [model()]
    for seed in range(VERSIONS):
        states.append(step(states[-1], seed))
    checkpoints = [home / "checkpoints" / str(version) for version in range(VERSIONS + 1)]
    for folder, weights in zip(checkpoints, states, strict=True):
        write_folder(folder, weights)
    url, mirror = home / "channel", ("--mirror", home / "mirror")
    assert run("init", url, checkpoints[0], "--step", 0).code == 0
    for version in range(1, VERSIONS):
        assert run("publish", url, checkpoints[version], "--step", 10 * version, *mirror).code == 0
    assert run("squash", url, "--anchor").code == 0
    assert run("pin", url, 4).code == 0
    return World(url, tuple(checkpoints), tuple(states))


@pytest.fixture
def world(shared: World, tmp_path: Path) -> World:
    """A copy to change."""
    return World(Path(shutil.copytree(shared.url, tmp_path / "channel")), shared.checkpoints, shared.states)


def holds(folder: Path, weights: Bag) -> bool:
    """Whether the files of a folder have these bits, by the safetensors library."""
    found = {name: array for file in folder.glob("*.safetensors") for name, array in load_file(file).items()}
    return found.keys() == {spec.name for spec in weights.table} and all(
        found[spec.name].tobytes() == weights.read(spec.name).tobytes() for spec in weights.table
    )


def objects(url: Path, kind: str) -> list[Path]:
    return sorted((url / kind).rglob("*.safetensors"))


# -- from one folder to another ----------------------------------------------------------------------------------------


def test_init_publish_pull(shared: World, tmp_path: Path, cache: Path) -> None:
    url, folder = tmp_path / "channel", tmp_path / "replica"
    begun = facts("init", url, shared.checkpoints[0], "--step", 5)
    digest = facts("digest", shared.checkpoints[1])["position"]
    published = facts("publish", url, shared.checkpoints[1], "--step", 6, "--codec", "gap")
    assert (begun["version"], begun["channel"]) == (0, str(url))
    assert (published["version"], published["digest"], published["new"], published["step"]) == (1, digest, True, 6)
    assert published["bytes"] == objects(url, "deltas")[0].stat().st_size
    assert published["ratio_to_full"] == shared.states[0].table.nbytes / published["bytes"]
    assert [path.name for path in (cache / "weightcast").iterdir()] == [begun["id"]]
    pulled = facts("pull", url, folder)
    assert (pulled["version"], pulled["digest"], pulled["step"], pulled["new"]) == (1, digest, 6, True)
    assert holds(folder, shared.states[1])
    assert (folder / "config.json").exists()


def test_publishing_the_newest_again_publishes_nothing(world: World) -> None:
    before = tree(world.url / "manifests")
    again = facts("publish", world.url, world.checkpoints[VERSIONS - 1])
    assert (again["version"], again["new"]) == (VERSIONS - 1, False)
    assert "has these weights already" in text("publish", world.url, world.checkpoints[VERSIONS - 1])
    assert tree(world.url / "manifests") == before


def test_publish_says_what_it_cost(world: World) -> None:
    line = text("publish", world.url, world.checkpoints[VERSIONS])
    assert re.fullmatch(rf"version {VERSIONS}  \d+\.\d+% changed  [\d.]+ kB  1 : [\d.]+  [\d.]+ s\n", line)


def test_pull_any_version_in_any_order(shared: World, tmp_path: Path) -> None:
    folder = tmp_path / "replica"
    for version in (3, 7, 0):
        assert facts("pull", shared.url, folder, "--version", version)["version"] == version
        assert holds(folder, shared.states[version])
    assert text("pull", shared.url, folder).startswith(f"version {VERSIONS - 1} ")
    assert text("pull", shared.url, folder) == f"version {VERSIONS - 1} is there already\n"
    assert facts("pull", shared.url, folder)["new"] is False


def test_pull_takes_over_a_checkpoint_of_a_version(shared: World, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(shared.checkpoints[8], tmp_path / "replica"))
    assert facts("pull", shared.url, folder)["bytes"] == objects(shared.url, "deltas")[8].stat().st_size
    assert holds(folder, shared.states[VERSIONS - 1])


def test_a_reference_uploads_no_weights(shared: World, tmp_path: Path) -> None:
    url = tmp_path / "channel"
    facts("init", url, shared.checkpoints[0], "--reference", "some/model@abc123")
    assert objects(url, "anchors") == []
    assert facts("show", url, 0)["reference"] == "some/model@abc123"
    assert facts("status", url)["references"] == {"0": "some/model@abc123"}
    done = run("pull", url, tmp_path / "replica")
    assert done.code == CHANNEL
    assert "Download some/model at abc123" in done.complaint
    shutil.copytree(shared.checkpoints[0], tmp_path / "replica", dirs_exist_ok=True)
    assert facts("pull", url, tmp_path / "replica")["version"] == 0


# -- a command after each version --------------------------------------------------------------------------------------

RECORD = "echo $WEIGHTCAST_VERSION $WEIGHTCAST_STEP $WEIGHTCAST_FOLDER $WEIGHTCAST_DIGEST >> {log}; "


def test_exec_is_told_what_came(shared: World, tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "replica"
    command = RECORD.format(log=log)
    pulled = facts("pull", shared.url, folder, "--exec", command)
    assert log.read_text().split() == [str(VERSIONS - 1), "90", str(folder), pulled["digest"]]
    facts("pull", shared.url, folder, "--exec", command)
    assert log.read_text().count("\n") == 1, "nothing new, nothing run"


def test_exec_finds_the_files_at_the_version(shared: World, tmp_path: Path) -> None:
    folder = tmp_path / "replica"
    run("pull", shared.url, folder, "--version", 1)
    assert run("pull", shared.url, folder, "--exec", f"cp -r $WEIGHTCAST_FOLDER {tmp_path}/seen").code == 0
    assert holds(tmp_path / "seen", shared.states[VERSIONS - 1])


def test_a_failing_command_is_the_exit_code(shared: World, tmp_path: Path) -> None:
    done = run("pull", shared.url, tmp_path / "replica", "--exec", "exit 42")
    assert (done.code, done.err) == (42, "warning: the command ended with exit code 42\n")
    assert holds(tmp_path / "replica", shared.states[VERSIONS - 1])
    killed = run("pull", shared.url, tmp_path / "other", "--exec", "kill -9 $$")
    assert killed.code == 128 + 9


def test_what_the_command_prints_does_not_mix_with_json(shared: World, tmp_path: Path) -> None:
    (done,) = at_once(("pull", shared.url, tmp_path / "replica", "--exec", "echo noise", "--json"))
    assert done.facts["version"] == VERSIONS - 1
    assert done.err == "noise\n"


# -- follow ------------------------------------------------------------------------------------------------------------


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


def test_follow_tells_every_version_and_folds_when_it_is_stopped(world: World, tmp_path: Path) -> None:
    folder, log = tmp_path / "replica", tmp_path / "log"
    command = RECORD.format(log=log) + f"cp -r $WEIGHTCAST_FOLDER {tmp_path}/seen; test $WEIGHTCAST_VERSION != 10"
    flags = ("--json", "--replica", "rack-7", "--exec", command)
    with following(world.url, folder, *flags) as child:
        assert child.stdout is not None
        first, ran = (json.loads(child.stdout.readline()) for _ in range(2))
        assert (first["event"], first["version"], first["step"]) == ("version", VERSIONS - 1, 90)
        assert first.keys() == {"event", "time", "version", "digest", "step", "bytes", "seconds", "lag"}
        assert ran == {"event": "command", "version": VERSIONS - 1, "exit_code": 0}
        shutil.rmtree(tmp_path / "seen")
        run("publish", world.url, world.checkpoints[VERSIONS], "--step", 100)
        second, failed = (json.loads(child.stdout.readline()) for _ in range(2))
        assert (second["version"], second["step"], failed["exit_code"]) == (VERSIONS, 100, 1)
        assert holds(tmp_path / "seen", world.states[VERSIONS]), "folded before the command runs"
        done = ended(child, signal.SIGTERM)
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out) == {"event": "end", "version": VERSIONS}
    assert holds(folder, world.states[VERSIONS])
    assert [line.split()[0] for line in log.read_text().splitlines()] == [str(VERSIONS - 1), str(VERSIONS)]
    assert [row["name"] for row in facts("status", world.url)["replicas"]] == ["rack-7"]


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


def test_follow_survives_an_outage_with_one_warning(world: World, tmp_path: Path) -> None:
    folder, web = tmp_path / "replica", Web(partial(Folder, directory=str(tmp_path)))
    with ExitStack() as running:
        with web:
            child = running.enter_context(following(f"{web.address}/channel", folder))
            assert child.stdout is not None
            assert child.stderr is not None
            line = child.stdout.readline()
            assert re.fullmatch(r"\d\d:\d\d:\d\d  version 9 +step 90 +[\d.]+ kB +[\d.]+ s  lag \S+ \w+\n", line)
        assert child.stderr.readline().startswith("warning: nothing answers at that address")
        run("publish", world.url, world.checkpoints[VERSIONS])
        with web:
            assert "version 10 " in child.stdout.readline()
            done = ended(child, signal.SIGINT)
    assert (done.code, done.out, done.err) == (0, "stopped at version 10\n", "")
    assert holds(folder, world.states[VERSIONS])


def test_an_outage_is_told_once_and_the_next_one_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Shaky(Subscriber):
        def rounds(self, every: float = 1.0, on_error: OnError | None = None) -> Iterator[Update | None]:
            assert on_error is not None
            for version in (1, 2):
                for problem in ("no answer", "no answer", "no way", "no answer"):
                    on_error(StoreError(problem, url="s3://bucket"))
                yield Update(Position(version, "0" * 64), None, 5, {"fetch": 0.1})

    store, weights = MemoryStore("x"), model()
    wc.init(store, weights)
    with Shaky(store, weights) as subscriber:
        _follow(subscriber, tmp_path, 1.0, None, as_json=True)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    told = [event.get("version") or event["problem"] for event in events]
    assert told == ["no answer", "no way", 1, "no answer", "no way", 2]


def test_follow_ends_at_what_no_patience_cures(shared: World, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_folder(other, model(seed=1))
    before = tree(other)
    (done,) = at_once(("pull", shared.url, other, "--follow"))
    assert done.code == USAGE
    assert "other weights" in done.complaint
    assert tree(other) == before


# -- log ---------------------------------------------------------------------------------------------------------------


def test_log_has_the_newest_first(shared: World) -> None:
    rows = facts("log", shared.url)["versions"]
    assert [row["version"] for row in rows] == list(range(VERSIONS))[::-1]
    assert [row["step"] for row in rows] == [10 * version for version in range(VERSIONS)][::-1]
    sizes = [path.stat().st_size for path in objects(shared.url, "deltas")]
    assert [row["bytes"] for row in rows[:-1]] == sizes[::-1]
    old, new = shared.states[3:5]
    changed = sum(int((old.read(spec.name) != new.read(spec.name)).sum()) for spec in old.table)
    assert rows[-5]["changed"] == changed
    assert rows[-5]["density"] == changed / old.table.elements
    assert {row["version"] for row in rows if row["anchor"]} == {0, VERSIONS - 1}
    assert {row["version"] for row in rows if row["pinned"]} == {4}
    assert {row["version"]: row["squashes"] for row in rows if row["squashes"]} == {8: [8]}


def test_log_for_people(shared: World) -> None:
    head, *lines = text("log", shared.url).splitlines()
    assert head.split() == ["version", "step", "age", "changed", "bytes", "to", "full", "codec", "writer"]
    assert [line.split()[0] for line in lines] == [str(version) for version in range(VERSIONS)][::-1]
    marks = {line.split()[0]: mark for line in lines for mark in ("⚓", "pinned", "⇤8") if f" {mark} " in line}
    assert marks == {"9": "⚓", "8": "⇤8", "4": "pinned", "0": "⚓"}
    assert len(text("log", shared.url, "-n", 3).splitlines()) == 4


def test_log_finds_versions_behind_a_gap(world: World) -> None:
    for version in (5, 6, 7):
        (world.url / "manifests" / f"{version:012d}.json").unlink()
    assert [row["version"] for row in facts("log", world.url, "-n", 4)["versions"]] == [9, 8, 4, 3]
    assert [row["version"] for row in facts("log", world.url, "--all")["versions"]] == [9, 8, 4, 3, 2, 1, 0]


def test_log_shows_what_is_damaged_in_its_place(world: World) -> None:
    (world.url / "manifests" / f"{3:012d}.json").write_text("{")
    rows = {row["version"]: row for row in facts("log", world.url)["versions"]}
    assert "no JSON" in rows[3]["problem"]
    assert "no JSON" in text("log", world.url)
    assert rows[2]["step"] == 20


# -- show --------------------------------------------------------------------------------------------------------------


def test_show_counts_every_tensor(shared: World) -> None:
    old, new = shared.states[4:6]
    truth = {spec.name: int((old.read(spec.name) != new.read(spec.name)).sum()) for spec in old.table}
    shown = facts("show", shared.url, 5)
    assert {row["name"]: row["changed"] for row in shown["tensors"]} == {n: c for n, c in truth.items() if c}
    assert (shown["version"], shown["step"], shown["codec"]) == (5, 50, "banded")
    assert shown["density"] == sum(truth.values()) / old.table.elements
    listed = text("show", shared.url, 5, "--tensors")
    assert all((name in listed) == bool(changed) for name, changed in truth.items())


def test_show_draws_layers_and_kinds(shared: World) -> None:
    lines = text("show", shared.url, 5).splitlines()
    at = next(i for i, line in enumerate(lines) if line.split()[:1] == ["layer"])
    assert lines[at].split() == ["layer", "q_proj", "o_proj", "up_proj", "norm"]
    rows = [line.split() for line in lines[at + 1 : at + 4]]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert [row[-1] for row in rows] == ["·"] * 3
    assert [float(row[2]) for row in rows] == sorted((float(row[2]) for row in rows), reverse=True)
    assert any("model.embed_tokens.weight" in line for line in lines[at + 4 :])
    assert "% changed" in lines[-1]


def test_show_lists_tensors_where_names_have_no_layers(tmp_path: Path) -> None:
    bits = {name: np.zeros(50, np.float32) for name in ("tower", "bridge")}
    url = tmp_path / "channel"
    wc.init(url, wc.Arrays(bits))
    with wc.Publisher(url, wc.Arrays(bits)) as publisher:
        publisher.publish(1, wc.Arrays(bits | {"tower": np.eye(1, 50, dtype=np.float32)[0]}))
    lines = [line.split() for line in text("show", url, 1).splitlines()]
    assert ["·", "bridge"] in lines
    assert ["▅", "2.0", "tower"] in lines


def test_show_an_anchor(shared: World) -> None:
    shown = facts("show", shared.url, 0)
    assert shown["files"].keys() == {path.name for path in shared.checkpoints[0].iterdir()}
    assert shown["bytes"] == sum(path.stat().st_size for path in shared.checkpoints[0].iterdir())
    assert "config.json" in text("show", shared.url, 0)


def test_show_reads_tables_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    old = gaussian(rng, 1 << 20)
    url = tmp_path / "channel"
    arrays = [wc.Arrays({"w": bits.reshape(1024, -1)}, {"w": "BF16"}) for bits in (old, moved(rng, old, 0.1))]
    wc.init(url, arrays[0])
    with wc.Publisher(url, arrays[0]) as publisher:
        publisher.publish(1, arrays[1])
    asked: list[int] = []

    counting = ScriptedStore(open_store(url))
    counting.answer("get", "deltas/", lambda data: asked.append(len(data)) or data)
    monkeypatch.setattr("weightcast.store.open_store", lambda url, _: counting)
    assert facts("show", url, 1)["bytes"] > 60_000
    assert 0 < sum(asked) < 17_000


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.12.self_attn.q_proj.weight", ("model.layers", 12, "q_proj")),
        ("model.layers.3.mlp.experts.17.up_proj.weight", ("model.layers", 3, "up_proj")),
        ("model.layers.3.post_attention_layernorm.weight", ("model.layers", 3, "norm")),
        ("transformer.h.0.ln_1.bias", ("transformer.h", 0, "norm")),
        ("transformer.h.0.attn.c_attn.bias", ("transformer.h", 0, "c_attn")),
        ("blocks.layers.1.self_attn.in_proj_weight", ("blocks.layers", 1, "in_proj")),
        ("0.weight", ("", 0, "weight")),
        ("model.embed_tokens.weight", None),
        ("", None),
        ("a..b", None),
    ],
)
def test_places_of_tensors(name: str, place: tuple[str, int, str] | None) -> None:
    assert place_of(name) == place


def test_towers_are_drawn_apart() -> None:
    names = ("vision.blocks.0.mlp.weight", "text.layers.0.mlp.weight")
    table = Bag({TensorSpec(name, "BF16", (8,)): np.zeros(8, np.uint16) for name in names}).table
    heat = heat_of(table, {names[0]: 2})
    assert {stack.name: stack.cells[0, "mlp"].density for stack in heat.stacks} == {
        "vision.blocks": 0.25,
        "text.layers": 0,
    }


# -- plan --------------------------------------------------------------------------------------------------------------


def test_plan_takes_the_squash(shared: World) -> None:
    sizes = {path.name[:12]: path.stat().st_size for path in objects(shared.url, "deltas")}
    (squash,) = objects(shared.url, "squashes")
    found = facts("plan", shared.url, "--from", 0)
    kinds = [(edge["kind"], edge["base"], edge["result"]) for edge in found["route"]]
    assert kinds == [("squash", 0, 8), ("delta", 8, 9)]
    assert found["bytes"] == squash.stat().st_size + sizes[f"{9:012d}"]
    assert found["replay"] == {"bytes": sum(sizes.values()), "objects": 9}
    assert found["anchor_and_replay"]["objects"] == 1
    assert (found["from"], found["to"]) == (0, 9)


def test_plan_from_nothing(shared: World) -> None:
    route = facts("plan", shared.url, "--from", "nothing", "--to", 8)["route"]
    assert [(edge["kind"], edge["base"], edge["result"]) for edge in route] == [("anchor", None, 0), ("squash", 0, 8)]
    assert facts("plan", shared.url, "--from", 9, "--to", 8)["route"] == route, "nothing leads back"


def test_plan_from_a_folder(shared: World, tmp_path: Path) -> None:
    assert facts("plan", shared.url, "--from", shared.checkpoints[5])["from"] == 5
    run("pull", shared.url, tmp_path / "mirror", "--version", 3)
    before = tree(tmp_path)
    assert facts("plan", shared.url, "--from", tmp_path / "mirror")["from"] == 3
    assert tree(tmp_path) == before
    done = run("plan", shared.url, "--from", shared.checkpoints[VERSIONS])
    assert done.code == USAGE
    assert "no version of this channel" in done.complaint


def test_plan_for_people(shared: World) -> None:
    lines = [line.split() for line in text("plan", shared.url, "--from", 0).splitlines()]
    assert lines[0] == ["kind", "from", "to", "bytes"]
    assert [line[:4] for line in lines[1:3]] == [["squash", "0", "→", "8"], ["delta", "8", "→", "9"]]
    assert [line[:2] for line in lines[4:]] == [["this", "route"], ["every", "delta"], ["newest", "anchor,"]]
    assert text("plan", shared.url, "--from", 9) == "nothing to do: version 9 is there\n"


# -- verify ------------------------------------------------------------------------------------------------------------


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_verify_a_whole_channel(shared: World, tmp_path: Path) -> None:
    assert facts("verify", shared.url) == {"head": 9, "proven_objects": None, "findings": [], "notes": []}
    assert facts("verify", shared.url, "--deep", "--scratch", tmp_path)["proven_objects"] == 12
    assert list(tmp_path.iterdir()) == []
    assert text("verify", shared.url).startswith("whole up to version 9")


def test_verify_names_what_is_missing(world: World) -> None:
    gone = objects(world.url, "deltas")[2]
    gone.unlink()
    done = run("verify", world.url)
    assert done.code == FOUND
    assert gone.name in done.out
    told = run("verify", world.url, "--json")
    assert told.code == FOUND
    assert any(gone.name in finding["problem"] for finding in json.loads(told.out)["findings"])


def test_verify_deep_reads_every_bit(world: World) -> None:
    damaged = objects(world.url, "deltas")[2]
    flip(damaged)
    assert run("verify", world.url).code == 0
    done = run("verify", world.url, "--deep")
    assert done.code == FOUND
    assert f"deltas/{damaged.name}" in done.out


def test_verify_a_folder(shared: World, tmp_path: Path) -> None:
    found = facts("verify", shared.checkpoints[6], shared.url)
    assert (found["version"], found["behind"], found["claimed"], found["differing"]) == (6, 3, None, [])
    assert "the digest that it has in version 6" in text("verify", shared.checkpoints[6], shared.url)
    strange = run("verify", shared.checkpoints[VERSIONS], shared.url)
    assert strange.code == FOUND
    assert "no version of this channel has these bits" in strange.out


def test_verify_reads_the_log_of_a_mirror_and_leaves_it(shared: World, tmp_path: Path) -> None:
    folder = tmp_path / "mirror"
    for version in (7, 9):
        with wc.Subscriber(shared.url, folder, wc.Pinned(version), fold=False) as subscriber:
            staged = subscriber.poll()
            assert staged is not None
            subscriber.apply(staged)
    assert not holds(folder, shared.states[9]), "what came last is in the log"
    before = tree(folder)
    found = facts("verify", folder, shared.url)
    assert (found["version"], found["claimed"], found["differing"]) == (9, 9, [])
    assert facts("plan", shared.url, "--from", folder)["from"] == 9
    assert tree(folder) == before


def test_verify_names_the_tensors_that_differ(shared: World, tmp_path: Path) -> None:
    folder = tmp_path / "mirror"
    run("pull", shared.url, folder)
    flip(folder / "model-00002-of-00002.safetensors")
    with wc.Checkpoint(folder) as files:
        (name,) = [
            spec.name
            for spec in files.table
            if not np.array_equal(files.read(spec.name), shared.states[9].read(spec.name))
        ]
    done = run("verify", folder, shared.url)
    assert done.code == FOUND
    assert "1 tensors differ from version 9" in done.out
    assert name in done.out
    told = json.loads(run("verify", folder, shared.url, "--json").out)
    assert (told["version"], told["claimed"], told["differing"]) == (None, 9, [name])
    assert facts("pull", shared.url, folder)["new"] is True, "and pull mends it"
    assert holds(folder, shared.states[9])


# -- upkeep ------------------------------------------------------------------------------------------------------------


def test_squash_cuts_what_is_due_once(world: World, tmp_path: Path) -> None:
    for path in objects(world.url, "squashes"):
        path.unlink()
    kept = tmp_path / "kept" / "deep"
    found = facts("squash", world.url, "--folder", kept)
    assert [(edge["base"], edge["result"]) for edge in found["squashes"]] == [(0, 8)]
    assert found["anchor"] is None
    assert kept.is_dir()
    assert facts("squash", world.url, "--folder", kept)["squashes"] == []
    assert text("squash", world.url) == "no squash is due\n"


def test_squash_cuts_an_anchor_at_the_head(world: World, tmp_path: Path) -> None:
    run("publish", world.url, world.checkpoints[VERSIONS])
    assert facts("squash", world.url, "--anchor")["anchor"] == VERSIONS
    assert facts("status", world.url)["anchors"] == [0, 9, 10]
    assert facts("plan", world.url, "--from", "nothing")["route"][0]["result"] == VERSIONS
    before = tree(world.url)
    assert "⚓ version 10" in text("squash", world.url, "--anchor")
    assert tree(world.url) == before


@pytest.mark.parametrize(("written", "meant"), [("90s", 90), ("15m", 900), ("1.5h", 5400), ("7d", 604800), ("0s", 0)])
def test_durations(written: str, meant: float) -> None:
    assert seconds(written) == meant


@pytest.mark.parametrize("written", ["", "7", "d", "7w", "-1d", "1e3s", "7 d", "nan"])
def test_durations_that_are_none(written: str) -> None:
    with pytest.raises(UsageError, match="no duration"):
        seconds(written)


def test_gc_keeps_pins_and_deletes_the_rest_in_two_runs(world: World, tmp_path: Path) -> None:
    now = ("--window", "0s", "--grace", "0s", "--patience", "0s")
    before = tree(world.url)
    planned = facts("gc", world.url, *now, "--dry-run")
    assert tree(world.url) == before
    assert planned["versions"] == [5, 6, 7, 8]
    assert facts("gc", world.url)["versions"] == [], "by default a week is kept"
    first, second = facts("gc", world.url, *now), facts("gc", world.url, *now)
    assert (first["versions"], first["objects"]) == ([5, 6, 7, 8], [])
    assert set(second["objects"]) == set(first["doomed"])
    assert second["bytes"] == sum(len(before[key] or b"") for key in second["objects"])
    assert [row["version"] for row in facts("log", world.url)["versions"]] == [9, 4, 3, 2, 1, 0]
    for version in (4, 9):
        assert facts("pull", world.url, tmp_path / "replica", "--version", version)["version"] == version
        assert holds(tmp_path / "replica", world.states[version])
    assert "versions gone" in text("gc", world.url, *now)


def test_pin_and_unpin(world: World) -> None:
    assert facts("pin", world.url, 6) == {"version": 6, "pinned": True, "changed": True}
    assert facts("pin", world.url, 6)["changed"] is False
    assert facts("status", world.url)["pins"] == [4, 6]
    assert facts("unpin", world.url, 6) == {"version": 6, "pinned": False, "changed": True}
    assert facts("unpin", world.url, 6)["changed"] is False
    assert facts("status", world.url)["pins"] == [4]


def test_reset_needs_a_yes(world: World) -> None:
    before = tree(world.url)
    done = run("reset", world.url)
    assert done.code == USAGE
    assert "--yes" in done.complaint
    assert tree(world.url) == before
    assert facts("reset", world.url, "--yes")["deleted"] > 20
    assert run("status", world.url).code == CHANNEL
    assert facts("init", world.url, world.checkpoints[3])["version"] == 0


@pytest.mark.parametrize(("answer", "code"), [("n", 1), ("y", 0)])
def test_reset_asks_on_a_terminal(world: World, answer: str, code: int) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen([*COMMAND, "reset", world.url], stdin=theirs, stdout=theirs, stderr=theirs) as child:
        os.close(theirs)
        said = b""
        while b"[y/N]" not in said:
            said += os.read(ours, 1000)
        os.write(ours, f"{answer}\n".encode())
        assert child.wait(60) == code
    os.close(ours)
    assert "up to 9" in re.sub(r"\s+", " ", said.decode())
    assert (world.url / "channel.json").exists() == (answer == "n")


def test_status(world: World) -> None:
    chain = Chain.open(open_store(world.url))
    put_heartbeat(chain, Heartbeat("rack-1", Position(9, "0" * 64), time.time()))
    put_heartbeat(chain, Heartbeat("rack-2", Position(3, "0" * 64), time.time(), "the disk is full"))
    found = facts("status", world.url)
    assert (found["head"]["version"], found["head"]["step"]) == (9, 90)
    assert found["head"]["age"] >= 0
    assert found["writer"]["name"] == facts("log", world.url)["versions"][0]["writer"]
    assert (found["anchors"], found["pins"]) == ([0, 9], [4])
    for kind in ("anchors", "deltas", "squashes", "manifests"):
        files = [path for path in (world.url / kind).rglob("*") if path.is_file()]
        assert found["stored"][kind] == {"objects": len(files), "bytes": sum(path.stat().st_size for path in files)}
    assert [(row["name"], row["version"], row["lag"], row["error"]) for row in found["replicas"]] == [
        ("rack-1", 9, 0, None),
        ("rack-2", 3, 6, "the disk is full"),
    ]
    lines = text("status", world.url).splitlines()
    assert any(re.match(r" +head  version 9, step 90, .* ago", line) for line in lines)
    assert re.match(r"rack-2 +3 +6 .* ago +the disk is full", lines[-1])


def test_status_and_log_over_http(shared: World) -> None:
    with Web(partial(Folder, directory=str(shared.url))) as web:
        assert facts("status", web.address)["head"]["version"] == 9
        assert len(facts("log", web.address)["versions"]) == VERSIONS
        assert facts("show", web.address, 5)["tensors"] == facts("show", shared.url, 5)["tensors"]
        done = run("pin", web.address, 5)
        assert done.code == STORE
        assert "nothing can be written over http" in done.complaint


# -- what goes wrong ---------------------------------------------------------------------------------------------------


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


def test_an_address_with_a_typo(shared: World, tmp_path: Path) -> None:
    for url in ("s3:/bucket/run", "s4://bucket/run", "htps://host/run"):
        for verb in (("pull", url, tmp_path / "x"), ("publish", url, shared.checkpoints[1]), ("log", url)):
            assert "Did you mean" in refused(tmp_path, USAGE, *verb)
    assert "there is no channel here" in refused(tmp_path, CHANNEL, "pull", f"{shared.url}x", tmp_path / "x")
    assert "`weightcast init" in refused(tmp_path, CHANNEL, "publish", tmp_path / "none", shared.checkpoints[1])


def test_a_folder_that_is_no_checkpoint(world: World, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("train")
    notes, url = tmp_path / "notes", world.url
    assert "safetensors" in refused(tmp_path, CHECKPOINT, "init", tmp_path / "new", notes)
    assert "safetensors" in refused(tmp_path, CHECKPOINT, "publish", url, notes)
    assert "safetensors" in refused(tmp_path, CHECKPOINT, "verify", notes, url)
    assert "neither empty nor a checkpoint" in refused(tmp_path, USAGE, "pull", url, notes)
    assert "no such file or folder" in refused(tmp_path, CHECKPOINT, "publish", url, tmp_path / "gone")


def test_a_table_that_changed_shape(world: World, tmp_path: Path) -> None:
    grown = {spec: gaussian(np.random.default_rng(0), spec.elements) for spec in model().table}
    grown[TensorSpec("model.extra.weight", "BF16", (4,))] = np.zeros(4, np.uint16)
    write_folder(tmp_path / "grown", Bag(grown))
    line = refused(tmp_path, USAGE, "publish", world.url, tmp_path / "grown")
    assert "model.extra.weight" in line
    assert "`weightcast reset`" in line
    assert "another model" in refused(tmp_path, USAGE, "pull", world.url, tmp_path / "grown")
    assert "another model" in refused(tmp_path, USAGE, "verify", tmp_path / "grown", world.url)


def test_a_newer_format(world: World, tmp_path: Path) -> None:
    for name in ("channel.json", f"manifests/{9:012d}.json"):
        path = world.url / name
        path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":2'))
        for verb in (
            ("pull", world.url, tmp_path / "x"),
            ("status", world.url),
            ("publish", world.url, world.checkpoints[9]),
        ):
            assert "install a newer one" in refused(tmp_path, FORMAT, *verb)
        path.write_bytes(path.read_bytes().replace(b'"format":2', b'"format":1'))


def test_a_version_that_is_not_there(world: World, tmp_path: Path) -> None:
    url = world.url
    verbs: list[tuple[str | Path | int, ...]] = [
        ("show", url, 77),
        ("pin", url, 77),
        ("pull", url, tmp_path / "x", "--version", 77),
        ("plan", url, "--from", 0, "--to", 77),
    ]
    for verb in verbs:
        line = refused(tmp_path, USAGE, *verb)
        assert "there is no version 77" in line
        assert f"`weightcast log {url}`" in line
    assert "the newest is 9" in refused(tmp_path, USAGE, "plan", url, "--from", 77)


def test_a_folder_with_other_weights(world: World, tmp_path: Path) -> None:
    write_folder(tmp_path / "other", model(seed=1))
    assert "Name an empty folder" in refused(tmp_path, USAGE, "pull", world.url, tmp_path / "other")


def test_a_channel_where_there_is_one(world: World, tmp_path: Path) -> None:
    assert "`weightcast reset" in refused(tmp_path, CONFLICT, "init", world.url, world.checkpoints[0])


def test_words_that_do_not_go_together(world: World, tmp_path: Path) -> None:
    url, folder = world.url, tmp_path / "x"
    refused(tmp_path, USAGE, "pull", url, folder, "--follow", "--version", 3)
    refused(tmp_path, USAGE, "pull", url, folder, "--replica", "a/b")
    refused(tmp_path, USAGE, "init", folder, world.checkpoints[0], "--reference", "no-revision")
    refused(tmp_path, USAGE, "gc", url, "--window", "soon")
    refused(tmp_path, USAGE, "verify", url, world.checkpoints[0])
    refused(tmp_path, USAGE, "verify", world.checkpoints[0])
    refused(tmp_path, USAGE, "verify", world.checkpoints[0], url, "--deep")
    refused(tmp_path, USAGE, "verify", url, url, url)
    assert "the folder above it" in refused(tmp_path, USAGE, "pull", url, tmp_path / "no" / "where")
    assert "no such folder" in refused(tmp_path, USAGE, "verify", url, "--deep", "--scratch", tmp_path / "nowhere")


def test_a_bucket_that_does_not_answer(shared: World, tmp_path: Path) -> None:
    with Web(Folder) as web:
        address = web.address
    before = tree(tmp_path)
    for done in at_once(("pull", address, tmp_path / "x"), ("publish", address, shared.checkpoints[1])):
        assert done.code == STORE
        assert "nothing answers at that address" in done.complaint
        assert "Check host and port" in done.complaint
    assert tree(tmp_path) == before


class S3(BaseHTTPRequestHandler):
    """As much of S3 as it takes to be refused: everything, or only what would write."""

    protocol_version = "HTTP/1.1"
    root: Path | None = None
    code = "SignatureDoesNotMatch"

    def do_GET(self) -> None:
        path = self.root / self.path.partition("?")[0].removeprefix("/bucket/") if self.root else None
        if path is None:
            self._answer(403, f"<Error><Code>{self.code}</Code></Error>".encode())
        elif "list-type=2" in self.path:
            self._answer(200, self._listing(parse_qs(urlsplit(self.path).query)["prefix"][0]))
        elif path.is_file():
            data, (first, last) = path.read_bytes(), re.findall(r"\d+", self.headers["Range"])
            part = data[int(first) : int(last) + 1]
            self._answer(206, part, f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}")
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(403, f"<Error><Code>{self.code}</Code></Error>".encode())

    def _listing(self, prefix: str) -> bytes:
        assert self.root is not None
        files = {str(path.relative_to(self.root)): path for path in self.root.rglob("*") if path.is_file()}
        rows = "".join(
            f"<Contents><Key>{key}</Key><Size>{files[key].stat().st_size}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key in sorted(files)
            if key.startswith(prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode()

    do_POST = do_DELETE = do_PUT  # noqa: N815 - the base class's way of naming

    def _answer(self, status: int, body: bytes, part: str = "") -> None:
        self.send_response(status)
        if part:
            self.send_header("Content-Range", part)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"0"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def s3(monkeypatch: pytest.MonkeyPatch, web: Web) -> str:
    pytest.importorskip("obstore")
    keys = {"AWS_ENDPOINT_URL": web.address, "AWS_REGION": "us-east-1"}
    keys |= {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "guess"}
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    return "s3://bucket/channel"


def test_wrong_credentials(shared: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Web(S3) as web:
        url = s3(monkeypatch, web)
        verbs = (
            ("pull", url, tmp_path / "x"),
            ("publish", url, shared.checkpoints[1]),
            ("init", url, shared.checkpoints[0]),
        )
        for verb in verbs:
            line = refused(tmp_path, ACCESS, *verb)
            assert "Check AWS_SECRET_ACCESS_KEY" in line
            assert "guess" not in line


def test_a_missing_permission(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ReadOnly(S3):
        root, code = tmp_path, "AccessDenied"

    with Web(ReadOnly) as web:
        url = s3(monkeypatch, web)
        line = refused(tmp_path, ACCESS, "publish", url, world.checkpoints[VERSIONS])
        assert "these credentials may not" in line
        assert "Have it allowed" in line
        assert facts("pull", url, tmp_path / "replica")["version"] == VERSIONS - 1, "reading is allowed"


def test_a_disk_without_room(shared: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    done = run("pull", shared.url, tmp_path / "replica")
    assert done.code == EXIT_CODES[SpaceError]
    assert "Make room" in done.complaint


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_no_traceback(tmp_path: Path, number: int, code: int) -> None:
    """While a store keeps us waiting."""
    asked, over = threading.Event(), threading.Event()

    class Mute(Folder):
        def do_GET(self) -> None:
            asked.set()
            over.wait(60)

    with Web(Mute) as web:
        command = [*COMMAND, "pull", web.address, tmp_path / "replica"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert asked.wait(60)
            done = ended(child, number)
        over.set()
    assert (done.code, done.complaint) == (code, "error: interrupted\n")
    assert tree(tmp_path) == {}


def test_a_signal_reaches_the_command_and_it_is_waited_for(shared: World, tmp_path: Path) -> None:
    mark = tmp_path / "begun"
    ending = f"trap 'sleep 0.5; echo ended >> {mark}; exit 1' TERM"
    command = f"exec > /dev/null 2>&1; {ending}; touch {mark}; while :; do sleep 0.05; done"
    with following(shared.url, tmp_path / "replica", "--exec", command, "--replica", "r") as child:
        while not mark.exists():
            time.sleep(0.02)
        done = ended(child, signal.SIGINT)
    assert done.code == 0
    assert mark.read_text() == "ended\n"


# -- what all verbs have in common ------------------------------------------------------------------------------------


def test_markup_from_outside_is_text(tmp_path: Path) -> None:
    names = ["[bold]w[/bold]", "[/]", "model.layers.0.[red]x.weight"]
    bits = {name: np.zeros(16, np.float32) for name in names}
    url = tmp_path / "[blink]channel["
    wc.init(url, wc.Arrays(bits), writer="w")
    with wc.Publisher(url, wc.Arrays(bits), writer="w") as publisher:
        publisher.publish(1, wc.Arrays({name: np.ones(16, np.float32) for name in names}))
    chain = Chain.open(open_store(url))
    put_heartbeat(chain, Heartbeat("r", Position(0, "0" * 64), 1.0, "[/red] [link=x]"))
    shown = text("show", url, 1, "--tensors")
    assert all(name in shown for name in names)
    assert "[red]x" in text("show", url, 1)
    assert "[/red] [link=x]" in text("status", url)
    assert str(url) in text("status", url)
    assert str(url) in run("show", url, 7).complaint


def test_every_verb_has_short_help() -> None:
    listing = run("--help").out
    for verb in VERBS:
        done = run(verb, "--help")
        assert done.code == 0
        assert f"weightcast {verb}" in done.out or f"root {verb}" in done.out
        assert re.search(rf"^  {verb} ", listing, re.MULTILINE)


def test_exit_codes_are_told_apart_and_documented() -> None:
    order = list(EXIT_CODES)
    for kind, parent in ((AccessError, StoreError), (ConflictError, ChannelError)):
        assert order.index(kind) < order.index(parent)
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    documented = {int(code) for code in re.findall(r"(?:: |; )(\d+) ", EXIT_CODES_HELP)}
    assert documented == {0, 1, SHORT, 130, *EXIT_CODES.values()}
    assert "Exit codes" in run("--help").out


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("p", {"publish", "pull", "plan", "pin"}), ("pull --f", {"--follow"}), ("publish --codec b", {"banded"})],
)
def test_the_shell_completes(typed: str, offered: set[str]) -> None:
    words = f"weightcast {typed}"
    asked = {"_WEIGHTCAST_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run([SCRIPT], env=os.environ | asked, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == offered


@pytest.mark.skipif(find_spec("torch") is None, reason="the demo trains with torch")
def test_the_demo_ends_with_the_same_bits_everywhere() -> None:
    demo = Path(__file__).parents[2] / "examples" / "follow.py"
    command = [sys.executable, demo, "--steps", "2", "--warm-up", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search("The trainer and both followers hold the same bits: [0-9a-f]{64}", done.stdout)


def test_sizes_and_times_for_people() -> None:
    sizes = [size(n) for n in (0, 999, 1000, 9960, 61_234, 999_499, 999_500, 14 * 10**9, 5 * 10**15)]
    assert sizes == ["0 B", "999 B", "1.00 kB", "9.96 kB", "61.2 kB", "999 kB", "1.00 MB", "14.0 GB", "5,000 TB"]
    spans = [span(s) for s in (-5, 0.04, 3.21, 59, 119, 600, 7199, 7200, 86400, 200000)]
    assert spans == ["0.0 s", "0.0 s", "3.2 s", "59 s", "119 s", "10 min", "120 min", "2 h", "24 h", "2 d"]
    assert [ratio(1000, 10), ratio(1000, 1000), ratio(10**7, 1)] == ["1 : 100", "1 : 1.00", "1 : 10,000,000"]
