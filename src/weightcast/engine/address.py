"""How an agent finds the control server of an engine: by a record that the engine leaves in a private folder.

    RUNTIME/8000.json     where the engine that serves on port 8000 is controlled, and the token for it (mode 0600)
    RUNTIME/8000.sock     its control server
    RUNTIME/8000.lock     locked while that engine runs

RUNTIME is `WEIGHTCAST_RUNTIME_DIR`, else `weightcast` in the user's `XDG_RUNTIME_DIR`, else a folder of the user's own
in the system's folder for temporary files. Nobody else can enter it.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from weightcast.disk.durable import replacing
from weightcast.errors import EngineGoneError, UsageError

RUNTIME = "WEIGHTCAST_RUNTIME_DIR"

START = (
    """vllm serve MODEL --weight-transfer-config '{"backend": "weightcast"}' """
    "--middleware weightcast_vllm.Middleware"
)

_MAX_RECORD = 4096
_SHORTEST_TOKEN = 16


@dataclass(frozen=True)
class Address:
    """Where a control server listens: on a socket of this host, or at a host and port."""

    token: str
    socket: Path | None = None
    host: str = ""
    port: int = 0
    is_tls: bool = False


def check_engine(engine: str, token: str | None) -> SplitResult:
    """The parts of an engine's name; `UsageError` if it is none.

    ``http://127.0.0.1:8000`` is the engine of this host that serves on that port. With a token any address of a control
    server will do; one of another host must be ``https://``.
    """
    hint = "Write http://127.0.0.1:PORT for an engine of this host, or https://HOST:PORT with a token."
    try:
        parts = urlsplit(engine)
        parts.port  # noqa: B018 -- raises for what is not a port
    except ValueError:
        raise UsageError(f"{engine[:200]!r} is not the address of an engine", hint=hint) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{engine[:200]!r} is not the address of an engine", hint=hint)
    if not is_loopback(parts.hostname):
        if token is None:
            hint = "Run the agent on the engine's host, or pass the engine's token with --engine-token."
            raise UsageError(f"{parts.hostname} is another host", hint=hint)
        if parts.scheme == "http":
            hint = "Put TLS in front of the control server, and write https://."
            raise UsageError(f"the token would travel to {parts.hostname} in clear text", hint=hint)
    if token is not None and len(token) < _SHORTEST_TOKEN:
        raise UsageError("the token is too short", hint=f"{_SHORTEST_TOKEN} characters at least.")
    return parts


def find_address(engine: str, token: str | None = None) -> Address:
    """`EngineGoneError` if no engine has left a record under that name: it may come."""
    parts = check_engine(engine, token)
    is_tls = parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    if token is not None:
        assert parts.hostname is not None
        return Address(token, None, parts.hostname, port, is_tls)
    return read_record(record_path(runtime_folder(), port), engine)


def engines_here() -> list[str]:
    """The engines of this host that have left a record, as names for `find_address`. Some may have been killed."""
    found = [path.stem for path in runtime_folder().glob("*.json") if path.stem.isdigit()]
    return [f"http://127.0.0.1:{port}" for port in sorted(found, key=int)]


# -- records -----------------------------------------------------------------------------------------------------------


def runtime_folder() -> Path:
    if named := os.environ.get(RUNTIME):
        return Path(named)
    if session := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(session) / "weightcast"
    return Path(tempfile.gettempdir()) / f"weightcast-{os.getuid()}"


def make_private(folder: Path) -> None:
    """Create the folder; `UsageError` if anybody else may enter it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        hint = f"Remove it, make it yours alone (chmod 700), or name another one in {RUNTIME}."
        raise UsageError("others may use the folder of control sockets", file=str(folder), hint=hint)


def record_path(folder: Path, port: int) -> Path:
    return folder / f"{port}.json"


def new_token() -> str:
    return secrets.token_urlsafe(32)


def write_record(path: Path, address: Address) -> None:
    with replacing(path) as out:
        os.fchmod(out.fileno(), 0o600)
        out.write(_record(address))


def _record(address: Address) -> bytes:
    record = {"token": address.token, "socket": str(address.socket) if address.socket else None, "port": address.port}
    return json.dumps(record).encode()


def read_record(path: Path, engine: str) -> Address:
    """`EngineGoneError` if there is none; `UsageError` if others could have written it."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe must not hold us up
            found = os.fstat(file.fileno())
            text = file.read(_MAX_RECORD) if stat.S_ISREG(found.st_mode) else b""
    except FileNotFoundError:
        problem = "no engine of this host can be controlled under this address"
        hint = f"Start it with `{START}`. If it is starting, the agent waits."
        raise EngineGoneError(problem, url=engine, hint=hint) from None
    except OSError as error:
        raise UsageError(f"cannot read the engine's record: {error}", file=str(path)) from error
    # Whoever named a folder may read records of other users there: root in a container, for one.
    is_trusted = found.st_uid == os.getuid() or (os.getuid() == 0 and bool(os.environ.get(RUNTIME)))
    if found.st_mode & 0o077 or not is_trusted:
        raise UsageError("others could have written the engine's record", file=str(path), hint="Remove it.")
    with suppress(ValueError, RecursionError, TypeError, KeyError):
        record = json.loads(text)
        token, place, port = record["token"], record["socket"], record["port"]
        if isinstance(token, str) and isinstance(port, int) and isinstance(place, str | None):
            return Address(token, Path(place)) if place else Address(token, None, "127.0.0.1", port)
    raise UsageError("the engine's record is malformed", file=str(path), hint="Remove it, and restart the engine.")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
