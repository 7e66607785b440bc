"""Fixtures of the command line's tests: a cache of one's own, and a channel to read or to change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cli_world import World, make_world
from offline_pairs import Pair, make_pair

from weightcast.cli.settings import begin_run


@pytest.fixture(autouse=True)
def no_settings() -> None:
    """Forget what a test before asked of the command in this process."""
    begin_run()


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache of one's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Made once, and only read by the tests."""
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def world(shared: World, tmp_path: Path) -> World:
    """A copy to change."""
    return World(Path(shutil.copytree(shared.url, tmp_path / "channel")), shared.checkpoints, shared.states)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Made once, and only read by the tests."""
    return make_pair(tmp_path_factory.mktemp("single"), sharded=False)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("sharded"), sharded=True)


@pytest.fixture(params=["single", "sharded"])
def pair(request: pytest.FixtureRequest) -> Pair:
    """Either of the two."""
    made: Pair = request.getfixturevalue(request.param)
    return made


@pytest.fixture
def target(single: Pair, tmp_path: Path) -> Path:
    """A copy of the old weights, alone in its folder."""
    (tmp_path / "target").mkdir()
    return Path(shutil.copy(single.old, tmp_path / "target" / "weights.safetensors"))
