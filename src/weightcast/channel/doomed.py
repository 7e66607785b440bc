"""Lists of what a collector deletes (SPEC 13.3): manifests at once, objects when the list is a grace period old."""

from __future__ import annotations

import json
import uuid

from weightcast.channel.chain import Chain
from weightcast.channel.chain_reader import read_record
from weightcast.channel.keys import DOOMED, read_manifest_key
from weightcast.errors import ConflictError, FormatError, MissingError
from weightcast.format.json import parse_json
from weightcast.store.base import Listed


def doom(chain: Chain, keys: list[str]) -> str:
    """Write a list; returns its key."""
    key = f"{DOOMED}{uuid.uuid4().hex}.json"
    chain.store.put(key, json.dumps(keys).encode())
    return key


def doomed(chain: Chain) -> dict[Listed, list[str]]:
    """The lists, each with its keys; those that cannot be read are left out."""
    lists = {}
    for listed in chain.store.list(DOOMED):
        try:
            keys = parse_json(read_record(chain.store, listed.key), "list")
        except (MissingError, FormatError):
            continue
        lists[listed] = [key for key in keys if isinstance(key, str)] if isinstance(keys, list) else []
    return lists


def refuse_doomed(chain: Chain, version: int) -> None:
    """`ConflictError` if a collector may be deleting ``version``: check this after writing a pin or tag of it.

    A collector lists the manifests that it is about to delete, then reads pins and tags again. So either it sees the
    pin or tag, or this sees its list.
    """
    for listed, keys in doomed(chain).items():
        if any(found[0] == version for found in map(read_manifest_key, keys) if found):
            hint = (
                f"Try again when `weightcast gc` has ended. If none is running, one was killed: "
                f"delete {listed.key}, then try again."
            )
            raise ConflictError(f"version {version} is being deleted", file=chain.store.url, hint=hint)
