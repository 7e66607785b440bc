"""The index: a listing as an object, for stores that cannot list (http)."""

from __future__ import annotations

import json

from weightcast.channel.chain import Chain
from weightcast.channel.keys import ANCHORS, DELTAS, INDEX, MANIFESTS, SQUASHES, TAGS
from weightcast.channel.records import FORMAT


def write_index(chain: Chain) -> None:
    """Write the listing of all manifests and edges."""
    kinds = (MANIFESTS, DELTAS, SQUASHES, ANCHORS, TAGS)
    objects = [[o.key, o.size, round(o.modified, 3)] for kind in kinds for o in chain.store.list(kind)]
    chain.store.put(INDEX, json.dumps({"format": FORMAT, "objects": objects}, separators=(",", ":")).encode())
