"""Readers that trust a key, near copies that lag: what was seen stays seen, and an honest lag is no attack."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_clock import FakeClock
from scripted_store import Request, ScriptedStore
from signed_channel import SignedChannel, arrays, bits_of

import weightcast as wc
from weightcast.channel.keys import manifest_key
from weightcast.channel.nearest import Nearest
from weightcast.errors import MissingError, StoreError, TrustError
from weightcast.store.file import FileStore
from weightcast.upkeep.copy import Copier


@pytest.fixture
def signed(tmp_path: Path) -> SignedChannel:
    (tmp_path / "home").mkdir()
    return SignedChannel(tmp_path / "home", versions=3)


def bring(signed: SignedChannel, copy: FileStore, scratch: Path) -> None:
    with closing(Copier(signed.store, copy, scratch, clock=FakeClock())) as copier:
        while copier.sync() is not None:
            pass


def test_version_that_comes_while_another_thread_looks_is_no_rollback(signed: SignedChannel) -> None:
    store = ScriptedStore(signed.store)
    weights = arrays(bits_of(0))
    with wc.Subscriber(store, weights, trust=signed.trust, threads=1) as subscriber:
        chain = subscriber.chain

        def not_there_yet(request: Request, proceed: Callable[[], Any]) -> Any:
            try:
                return proceed()
            except MissingError:
                signed.publish()
                chain.manifest(4)  # in another thread, as a mirror does beside an engine that is updated directly
                raise

        store.on("get", manifest_key(4), not_there_yet, times=1)
        head = chain.head()
    assert head is not None
    assert head.position.version == 3


def test_copy_that_lags_behind_what_a_mirror_has_seen_is_no_rollback_while_the_home_is_away(
    signed: SignedChannel, tmp_path: Path
) -> None:
    copy = FileStore(tmp_path / "copy")
    bring(signed, copy, tmp_path)
    mirror = tmp_path / "mirror"
    with wc.Subscriber(signed.store, mirror, trust=signed.trust, threads=1) as subscriber:
        subscriber.sync()
        signed.publish()
        subscriber.poll()  # version 4 is seen, and the process ends before it is applied
    home = ScriptedStore(signed.store)
    home.fail("")
    with wc.Subscriber(home, mirror, near=[copy], threads=1) as subscriber:
        assert subscriber.position is not None
        assert subscriber.position.version == 3
        with pytest.raises(StoreError):
            subscriber.sync()


def test_list_of_keys_is_read_from_the_copy_that_has_it_while_the_home_is_away(
    signed: SignedChannel, tmp_path: Path
) -> None:
    late, fresh = FileStore(tmp_path / "late"), FileStore(tmp_path / "fresh")
    bring(signed, late, tmp_path)
    signed.add("stranger", "writer", first=4)
    signed.publish(writer="stranger")
    bring(signed, fresh, tmp_path)
    home = ScriptedStore(signed.store)
    home.fail("")
    near = Nearest(home, [late, fresh])
    near.expect(4)  # so the first copy is known to lag
    weights = arrays(bits_of(0))
    with wc.Subscriber(near, weights, trust=signed.trust, threads=1) as subscriber:
        subscriber.sync()
    assert np.array_equal(weights.read("w"), bits_of(4))


def test_manifest_that_a_copy_has_changed_is_read_at_home(signed: SignedChannel, tmp_path: Path) -> None:
    copy = FileStore(tmp_path / "copy")
    bring(signed, copy, tmp_path)
    key = manifest_key(3)
    copy.put(key, copy.get(key).replace(b'"step":3', b'"step":7'))
    home, weights = ScriptedStore(signed.store), arrays(bits_of(0))
    with wc.Subscriber(home, weights, near=[copy], trust=signed.trust, threads=1) as subscriber:
        with home.fail("get", "manifests/"), pytest.raises(TrustError):
            subscriber.sync()
        assert np.array_equal(weights.read("w"), bits_of(0))
        subscriber.sync()
        assert subscriber.position is not None
        assert subscriber.chain.manifest(3).step == 3
    assert np.array_equal(weights.read("w"), bits_of(3))
