"""All versions of a channel, by their manifests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from weightcast.channel.chain import Chain
from weightcast.channel.records import Manifest

_AT_ONCE = 16
"""Manifests that are fetched at the same time: a long history has thousands."""


def committed(chain: Chain) -> list[Manifest]:
    """The manifests that are there, oldest first; the head is among them even if no listing shows it yet."""
    head = chain.head()
    if head is None:
        return []
    older = [version for version in chain.versions() if version < head.position.version]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [*pool.map(chain.manifest, older), head]
