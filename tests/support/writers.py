"""Writers that compete for a channel."""

from __future__ import annotations

import pytest

import weightcast as wc
from weightcast.channel.retention import Retention
from weightcast.errors import ConflictError
from weightcast.publish.publisher import Publisher
from weightcast.store.base import Store

SOON = Retention(window=100.0, grace=10.0, patience=100.0)


def publisher_of(store: Store, weights: wc.Arrays, writer: str | None = None) -> Publisher:
    return Publisher(store, wc.Arrays.copy_of(weights), threads=1, writer=writer)


def loses(publisher: Publisher, weights: wc.Arrays) -> None:
    """Publishing with it fails for good, and says why."""
    with pytest.raises(ConflictError, match="Only one writer may publish"):
        publisher.publish(weights=weights).result(30)
    with pytest.raises(ConflictError):
        publisher.publish(weights=weights)
    with pytest.raises(ConflictError):
        publisher.flush()
    publisher.close()
