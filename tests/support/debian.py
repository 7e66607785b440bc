"""Programs from Debian's packages, unpacked into `.cache` of the repository and never installed.

Packages are fetched once, with what they need beyond what is installed here.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache"


class UnavailableError(Exception):
    """There can be no such program on this machine."""


@dataclass(frozen=True)
class Unpacked:
    """A folder with the files of packages."""

    root: Path

    @property
    def libraries(self) -> Path:
        return next(self.root.glob("usr/lib/*-linux-gnu"))

    @property
    def library_path(self) -> str:
        """Every folder with a shared library, for LD_LIBRARY_PATH."""
        places = [self.libraries, self.root / "lib" / self.libraries.name]
        places += sorted({found.parent for found in self.libraries.rglob("*.so*")})
        return ":".join(map(str, dict.fromkeys(places)))


def unpacked(name: str, packages: Sequence[str], tools: Sequence[str] = ()) -> Unpacked:
    """The files of packages, under a name in the cache; fetched on the first call. ``tools`` must be here, too."""
    cache = CACHE / name
    root = cache / "root"
    for tool in ("apt-get", "dpkg", *tools):
        if not shutil.which(tool):
            raise UnavailableError(f"{name} is had with {tool}, which is not here")
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                _fetch(Path(folder) / "debs", packages)
                for package in sorted((Path(folder) / "debs").glob("*.deb")):
                    run("dpkg", "-x", str(package), f"{folder}/root")
                (Path(folder) / "root").rename(root)
    return Unpacked(root)


def _fetch(folder: Path, packages: Sequence[str]) -> None:
    """Download the packages and what they need beyond what is installed here; no root needed where lists are there."""
    (folder / "partial").mkdir(parents=True)
    options = ["-o", f"Dir::Cache::archives={folder}", "-o", "Debug::NoLocking=1", "-y", "-qq"]
    install = ["apt-get", "install", "--download-only", "--no-install-recommends", *options, *packages]
    try:
        run(*install)
    except UnavailableError:
        run("apt-get", "update", "-qq")
        run(*install)


def run(*command: str, env: Mapping[str, str] | None = None, timeout: float = 600, folder: Path | None = None) -> None:
    """Run a command to its end; what it says is shown only if it fails."""
    try:
        done = subprocess.run(
            command,
            env=env,
            timeout=timeout,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(str(error)) from error
    if done.returncode:
        raise UnavailableError(f"{' '.join(command)}: {done.stdout.decode(errors='replace')[-2000:]}")
