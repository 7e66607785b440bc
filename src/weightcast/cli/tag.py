"""`weightcast tag URL [VERSION NAME]`, `weightcast tag URL --delete NAME`"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from weightcast.channel.chain import Chain
from weightcast.channel.index import write_index
from weightcast.channel.tags import delete_tag, set_tag, valid_tags
from weightcast.cli.channels import commit_named, open_chain
from weightcast.cli.console import caution, say, tell
from weightcast.cli.options import NAMES, Url
from weightcast.cli.text import Column, Table, Text
from weightcast.cli.wording import ago, natural
from weightcast.errors import UsageError


def tag(
    url: Url,
    version: Annotated[str | None, typer.Argument(metavar="VERSION", help=f"What to name: {NAMES}.")] = None,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Its new name; it begins with a letter.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Move a tag that names another version.")] = False,
    delete: Annotated[str | None, typer.Option("--delete", metavar="NAME", help="Delete this tag.")] = None,
) -> None:
    """Name a version, or list the names.

    Every verb that takes a version takes a tag. `gc` never deletes a tagged version.
    """
    if delete is not None and (version is not None or force):
        raise UsageError("--delete takes the name of a tag and nothing else")
    if (version is None) != (name is None):
        hint = "`tag URL VERSION NAME` sets a tag, `tag URL` lists all, `tag URL --delete NAME` deletes one."
        raise UsageError("tag needs both a version and a name", hint=hint)
    chain = open_chain(url)
    if delete is not None:
        try:
            delete_tag(chain, delete)
        except UsageError:
            write_index(chain)  # an earlier run may have deleted it and failed to write the index
            raise
        write_index(chain)
        tell({"tag": delete, "deleted": True})
        say(f"tag {delete} deleted")
    elif version is not None and name is not None:
        _set(chain, version, name, force)
    else:
        _list(chain)


def _set(chain: Chain, version: str, name: str, force: bool) -> None:
    position = commit_named(chain, version).position
    before = set_tag(chain, name, position, force=force)
    changed = before != position
    write_index(chain)  # also if nothing changed: an earlier run may have failed between the two
    moved = before.version if before is not None and changed else None
    tell({"tag": name, "version": position.version, "digest": position.digest, "was": moved, "changed": changed})
    already = "" if changed else " already"
    say(f"{name} is version {position.version}{already}{f', no longer {moved}' if moved is not None else ''}")


def _list(chain: Chain) -> None:
    found, bad = valid_tags(chain)
    found.sort(key=lambda tag: natural(tag.name))
    rows = [
        {"tag": tag.name, "version": tag.position.version, "digest": tag.position.digest, "time": tag.time}
        for tag in found
    ]
    tell({"tags": rows, "damaged": {key: error.problem for key, error in bad}})
    for key, error in bad:
        caution(f"{key}: {error.problem}")
    table = Table(Column("tag", left=True), "version", "digest", "set")
    for tag in found:
        position = tag.position
        table.add(Text(tag.name, "yellow"), str(position.version), position.digest[:12], ago(time.time() - tag.time))
    say(table if found else "no tags")
