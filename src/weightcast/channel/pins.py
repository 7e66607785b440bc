"""Pins: versions that are never collected."""

from __future__ import annotations

from weightcast.channel.chain import Chain
from weightcast.channel.doomed import refuse_doomed
from weightcast.channel.keys import PINS, pin_key, read_pin_key
from weightcast.errors import ConflictError, MissingError


def pins(chain: Chain) -> dict[int, float]:
    """Pinned versions, and when they were pinned by the store's clock."""
    found = ((read_pin_key(listed.key), listed.modified) for listed in chain.store.list(PINS))
    return {version: when for version, when in found if version is not None}


def pin(chain: Chain, version: int) -> None:
    """Keep a version for good; `MissingError` if there is none, `ConflictError` if a collector is deleting it."""
    chain.manifest(version)
    chain.store.put(pin_key(version), b"{}")
    try:
        refuse_doomed(chain, version)
        chain.manifest(version)
    except (ConflictError, MissingError):
        unpin(chain, version)
        raise


def unpin(chain: Chain, version: int) -> None:
    chain.store.delete(pin_key(version))
