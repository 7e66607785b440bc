"""A real S3 for tests and benchmarks: Ceph's object gateway, from Debian's packages, unpacked and never installed.

    python tests/support/rgw.py -- command …     runs a command with AWS_* set for a gateway of its own

Packages are fetched once, into `.cache/ceph` of the repository. A gateway is up about 15 s later, and its daemons die
with whoever started them.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from debian import UnavailableError, Unpacked, run, unpacked

PACKAGES = ["radosgw", "ceph-mon", "ceph-osd", "ceph-common"]
REGION = "us-east-1"


@dataclass(frozen=True)
class Endpoint:
    """A gateway that runs, and the one user it has."""

    url: str
    key: str
    secret: str

    def environment(self) -> dict[str, str]:
        """What lets every S3 client find it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
        }

    def make_bucket(self, name: str) -> str:
        """Make a bucket, or find it made; its URL."""
        import obstore
        from obstore.store import S3Store

        config = {"endpoint": self.url, "access_key_id": self.key, "secret_access_key": self.secret, "region": REGION}
        bucket = S3Store(name, config=config, client_options={"allow_http": True})
        request = urllib.request.Request(obstore.sign(bucket, "PUT", "", timedelta(minutes=1)), method="PUT")
        with urllib.request.urlopen(request, timeout=60):
            return f"s3://{name}"


@contextmanager
def serving() -> Iterator[Endpoint]:
    """A gateway with an empty store, for as long as the context lasts."""
    ceph = _Ceph(unpacked("ceph", PACKAGES, ["setpriv"]))
    with (
        tempfile.TemporaryDirectory(prefix="weightcast-rgw-", ignore_cleanup_errors=True) as folder,
        ExitStack() as stack,
    ):
        yield _start(ceph, Path(folder), stack)


@dataclass(frozen=True)
class _Ceph:
    """Unpacked packages, and how to run what is in them."""

    files: Unpacked

    @property
    def root(self) -> Path:
        return self.files.root

    @property
    def libraries(self) -> Path:
        return self.files.libraries

    def environment(self) -> dict[str, str]:
        folders = [self.libraries, self.libraries / "ceph", self.root / "lib" / self.libraries.name]
        return {
            "PATH": f"{self.root}/usr/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LD_LIBRARY_PATH": ":".join(map(str, folders)),
            "PYTHONPATH": f"{self.root}/usr/lib/python3/dist-packages",
        }

    def run(self, *command: str, tries: int = 1) -> None:
        """Run a command to its end; what it says is shown only if it fails."""
        for left in reversed(range(tries)):
            try:
                run(*command, env=self.environment(), timeout=60)
                return
            except UnavailableError:
                if not left:
                    raise


class _Daemon:
    """A program that runs until it is stopped, or until this process ends."""

    def __init__(self, ceph: _Ceph, log: Path, *command: str):
        self._ceph, self._log, self._command = ceph, log, command
        self._starts = 0
        self._start()

    def _start(self) -> None:
        self._starts += 1
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self._command, "-f"],
                env=self._ceph.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def revive(self) -> None:
        """Start it again if it ended. Ceph's daemons may ask the monitor too early ("wrong fsid") and give up."""
        if self._child.poll() is None:
            return
        if self._starts == 5:
            raise UnavailableError(f"{self._command[0]} ends: {self._log.read_text(errors='replace')[-2000:]}")
        self._start()

    def stop(self) -> None:
        self._child.kill()
        self._child.wait()


def _start(ceph: _Ceph, folder: Path, stack: ExitStack) -> Endpoint:
    for name in ("mon", "osd", "out"):
        (folder / name).mkdir()
    port, monitor = _free_port(), _free_port()
    conf, daemons = str(folder / "ceph.conf"), []
    fsid, osd = "11111111-2222-3333-4444-555555555555", "22222222-2222-3333-4444-555555555555"
    Path(conf).write_text(_configuration(ceph, folder, fsid, port, monitor))

    def daemon(name: str, *identity: str) -> None:
        daemons.append(_Daemon(ceph, folder / "out" / name, name, "-c", conf, *identity))
        stack.callback(daemons[-1].stop)

    monmap = str(folder / "monmap")
    ceph.run("monmaptool", "--create", "--addv", "a", f"[v1:127.0.0.1:{monitor}]", "--fsid", fsid, monmap)
    ceph.run("ceph-mon", "-c", conf, "-i", "a", "--mkfs", "--monmap", monmap)
    daemon("ceph-mon", "-i", "a")
    ceph.run("ceph-osd", "-c", conf, "-i", "0", "--mkfs", "--osd-uuid", osd)
    # With the interpreter that Debian's bindings are built for, which need not be ours.
    ceph.run("/usr/bin/python3", f"{ceph.root}/usr/bin/ceph", "-c", conf, "osd", "new", osd, tries=5)
    daemon("ceph-osd", "-i", "0")
    daemon("radosgw", "-n", "client.rgw")
    endpoint = Endpoint(f"http://127.0.0.1:{port}", "WEIGHTCASTKEY1", "weightcastsecret1")
    _wait_for(endpoint.url, daemons)
    user = ["--uid", "test", "--display-name", "test", "--access-key", endpoint.key, "--secret", endpoint.secret]
    ceph.run("radosgw-admin", "-c", conf, "user", "create", *user, tries=3)
    return endpoint


def _configuration(ceph: _Ceph, folder: Path, fsid: str, port: int, monitor: int) -> str:
    out, libraries = folder / "out", ceph.libraries
    return f"""
[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{monitor}
mon initial members = a
public addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
ms bind msgr2 = false
run dir = {out}
log file = {out}/$name.log
pid file = {out}/$name.pid
admin socket = {out}/$name.asok
crash dir = {out}
plugin dir = {libraries}/ceph
erasure code dir = {libraries}/ceph/erasure-code
osd class dir = {libraries}/rados-classes
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data avail crit = 1
mon osd full ratio = .99
mon osd nearfull ratio = .98
mon osd backfillfull ratio = .985
[mon.a]
mon data = {folder}/mon
[osd.0]
osd data = {folder}/osd
osd objectstore = bluestore
bluestore block size = {32 << 30}
bluestore fsck on mount = false
osd memory target = {1 << 30}
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw crypt require ssl = false
# Deleted and replaced objects keep their room for two hours by default, and a full device kills its daemon.
rgw gc obj min wait = 20
rgw gc processor period = 10
"""


def _wait_for(url: str, daemons: list[_Daemon]) -> None:
    for _ in range(1200):
        for daemon in daemons:
            daemon.revive()
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.HTTPError as error:
            error.close()
            return
        except OSError:
            time.sleep(0.1)
    raise UnavailableError("the gateway does not answer")


def _free_port() -> int:
    """One that no outgoing connection takes meanwhile, as it may those that the system itself hands out."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(12_000, 30_000)))
            return int(probe.getsockname()[1])


def main(arguments: list[str]) -> int:
    command = arguments[1:] if arguments[:1] == ["--"] else arguments
    if not command:
        print(__doc__)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with serving() as endpoint:
        return subprocess.run(command, env={**os.environ, **endpoint.environment()}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
