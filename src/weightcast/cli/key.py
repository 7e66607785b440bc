"""`weightcast key new FILE`, `key show FILE|URL`, `key add URL KEY --role ROLE`, `key revoke URL KEY`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from weightcast.channel.key_file import read_private, read_public, write_private
from weightcast.channel.keyring import ROLES, AllowedKey, Role
from weightcast.channel.signing import PrivateKey, PublicKey, is_key_id
from weightcast.channel.trust import Trust
from weightcast.cli.console import caution, say, tell
from weightcast.cli.options import Sign, TrustedKey
from weightcast.cli.text import Column, Table
from weightcast.cli.trusting import open_trusted
from weightcast.disk.durable import replacing
from weightcast.errors import UsageError
from weightcast.upkeep.keyring import add_key, allowed_keys, revoke_key


def key(
    action: Annotated[Literal["new", "show", "add", "revoke"], typer.Argument(metavar="new|show|add|revoke")],
    place: Annotated[str, typer.Argument(metavar="FILE|URL", help="A private key's file, or a channel.")],
    public: Annotated[
        str | None,
        typer.Argument(metavar="KEY", help="add, revoke: the public key, ed25519:… or a file; revoke: or its id."),
    ] = None,
    role: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE", help="add: writer, cutter or replica; several times for several."),
    ] = None,
    first: Annotated[
        int, typer.Option("--from", min=0, metavar="VERSION", help="add: the first version it signs.")
    ] = 0,
    after: Annotated[
        int | None,
        typer.Option(min=0, metavar="VERSION", help="revoke: the last version for which its signatures still count."),
    ] = None,
    sign: Sign = None,
    trust: TrustedKey = None,
) -> None:
    """Make a key, show keys, or change which keys may sign a channel.

    `new` writes a private key to FILE, readable by you alone, and its public key to FILE.pub. `show` prints the public
    key of FILE, or with --trust the key list of a channel. `add` and `revoke` write the next list, which the root key
    signs: --sign ROOT.

    A writer signs versions, a cutter squashes and anchors, a replica heartbeats. Without --after nothing that a revoked
    key has signed counts any more: squashes have to be cut again, and versions that only it has signed are refused.
    """
    if action == "new":
        _refuse(public, role, sign, trust)
        _new(Path(place))
    elif action == "show" and trust is None:
        _refuse(public, role, sign)
        _show_one(read_public(place) if place.endswith(".pub") else read_private(place).public)
    elif action == "show":
        _refuse(public, role, sign)
        _show_list(place, cast(str, trust))
    else:
        _change(action, place, public, role, first, after, sign)


def _refuse(*given: object) -> None:
    if any(value is not None for value in given):
        raise UsageError("this option is for another action", hint="`weightcast key --help` says which takes what.")


def _new(path: Path) -> None:
    private = PrivateKey.new()
    public = path.with_name(f"{path.name}.pub")
    if public.exists():
        raise UsageError("there is a file already", file=str(public), hint="Name another file.")
    write_private(path, private)
    with replacing(public) as file:
        file.write(f"{private.public}\n".encode())
    tell({"private": str(path), "public": str(private.public), "id": private.public.id})
    say(f"{private.public}")
    say(f"the private key is in {path}: keep it, and give the line above to whoever is to trust it")


def _show_one(public: PublicKey) -> None:
    tell({"public": str(public), "id": public.id})
    say(str(public))


def _show_list(url: str, trust: str) -> None:
    chain = open_trusted(url, Trust(trust))
    assert chain.guard is not None
    keys = allowed_keys(chain)
    tell(
        {
            "channel": chain.store.url,
            "root": str(chain.guard.root),
            "number": chain.guard.keyring_number,
            "keys": [_fields(one) for one in keys],
        }
    )
    table = Table(Column("id", left=True), Column("role", left=True), "versions", Column("key", left=True, rank=1))
    table.add(chain.guard.root.id, "root", "all", str(chain.guard.root))
    for one in keys:
        table.add(one.public.id, one.role, f"{one.first}–{'' if one.last is None else one.last}", str(one.public))
    say(table)


def _fields(one: AllowedKey) -> dict[str, object]:
    return {"id": one.public.id, "public": str(one.public), "role": one.role, "first": one.first, "last": one.last}


def _change(
    action: str, url: str, public: str | None, role: list[str] | None, first: int, after: int | None, sign: str | None
) -> None:
    if public is None or sign is None:
        raise UsageError(
            f"key {action} takes a URL, a key and --sign ROOT", hint="The root's private key signs the list."
        )
    chain = open_trusted(url, None, sign=sign, begins=True)  # the root trusts itself
    if action == "add":
        if not role or set(role) - set(ROLES) or after is not None:
            raise UsageError("key add takes at least one --role, and no --after", hint=f"Roles: {', '.join(ROLES)}.")
        made = add_key(chain, read_public(public), cast(list[Role], role), first)
        line = f"{' and '.join(role)} from version {first} on"
    else:
        _refuse(role)
        named = public if is_key_id(public) else read_public(public).id
        made = revoke_key(chain, named, after)
        line = f"revoked {'for all versions' if after is None else f'after version {after}'}"
        if after is None:
            caution("versions, squashes and anchors that only this key has signed are refused from now on")
    tell({"channel": chain.store.url, "number": made.number, "keys": [_fields(one) for one in made.keys]})
    say(f"key list {made.number}: {line}")
