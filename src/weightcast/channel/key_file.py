"""Keys in files and in the environment. A private key that others of the host can read is refused."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from weightcast.channel.signing import PrivateKey, PublicKey
from weightcast.errors import CheckpointError, UsageError

_SECRET = re.compile(r"weightcast-private-key ed25519 ([0-9a-f]{64})")
_MAX_BYTES = 4096
ENVIRONMENT = "env:"
"""Before the name of a variable that holds what a private key's file would."""

_NEW_ONE = "Make one with `weightcast key new FILE`."


def write_private(path: Path, private: PrivateKey) -> None:
    """Write a private key that only its owner can read; `UsageError` if there is a file already."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        hint = "Name another file; a key is never overwritten."
        raise UsageError("there is a file already", file=str(path), hint=hint) from None
    except OSError as error:
        raise CheckpointError(f"the key cannot be written: {error.strerror}", file=str(path)) from None
    with os.fdopen(fd, "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(f"weightcast-private-key ed25519 {private.secret().hex()}\n")
        file.flush()
        os.fsync(file.fileno())


def read_private(source: Path | str) -> PrivateKey:
    """The private key in a file, or in the environment variable of `env:NAME`.

    `UsageError` if the file may be read by others than its owner, or holds something else.
    """
    text = str(source)
    if text.startswith(ENVIRONMENT):
        name = text.removeprefix(ENVIRONMENT)
        return _parse(os.environ.get(name, ""), f"the variable {name}")
    path = Path(source)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise UsageError(f"the key cannot be read: {_why(error)}", file=text[:200], hint=_NEW_ONE) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError("this is not a file", file=str(path), hint=_NEW_ONE)
        if status.st_mode & 0o077:
            hint = f"Run: chmod 600 {path}. If others had access to this host, make another key."
            raise UsageError("others than its owner can read this private key", file=str(path), hint=hint)
        data = os.read(fd, _MAX_BYTES)
    finally:
        os.close(fd)
    return _parse(data.decode("ascii", "replace"), f"the file {path}")


def _why(error: OSError | ValueError) -> str:
    """A path with a zero byte is a ValueError, which has no text of the system."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _parse(text: str, where: str) -> PrivateKey:
    """The key; the error never holds the text, which may be a damaged secret."""
    found = _SECRET.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{where} holds no private key", hint=_NEW_ONE)
    return PrivateKey(bytes.fromhex(found[1]))


def read_public(source: str) -> PublicKey:
    """The public key that ``source`` is, or that the file of that path holds."""
    if source.strip().startswith("ed25519:"):
        return PublicKey.parse(source)
    path = Path(source)
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES)
    except (OSError, ValueError) as error:
        hint = "Name a file that `weightcast key new` made, or write the key itself: ed25519:…"
        raise UsageError(f"the public key cannot be read: {_why(error)}", file=source[:200], hint=hint) from None
    text = data.decode("ascii", "replace")
    if _SECRET.fullmatch(text.strip()):
        hint = f"Its public half is in {path}.pub, or `weightcast key show {path}` prints it."
        raise UsageError("this is a private key", file=source[:200], hint=hint)
    return PublicKey.parse(text)
