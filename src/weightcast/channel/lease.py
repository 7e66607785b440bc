"""The writer's lease: who writes to a channel. Advisory; commits are fenced without it."""

from __future__ import annotations

from functools import partial

from weightcast.channel.chain import Chain
from weightcast.channel.chain_reader import read_hint
from weightcast.channel.keys import WRITER
from weightcast.channel.records import Lease, dump_record, load_record


def take_lease(chain: Chain, lease: Lease) -> None:
    chain.store.put(WRITER, dump_record(lease))


def lease(chain: Chain) -> Lease | None:
    """The last lease that was taken; None if there is none that can be read."""
    return read_hint(chain.store, WRITER, partial(load_record, Lease))
