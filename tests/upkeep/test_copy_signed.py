"""The copy of a signed channel: whoever trusts its key can read it there, also while its home is away."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from fake_clock import FakeClock
from scripted_store import ScriptedStore
from signed_channel import SignedChannel, arrays, bits_of

import weightcast as wc
from weightcast.channel.keys import keyring_key
from weightcast.errors import ConflictError, TrustError
from weightcast.store.file import FileStore
from weightcast.upkeep.copy import Copier


@pytest.fixture
def signed(tmp_path: Path) -> SignedChannel:
    (tmp_path / "home").mkdir()
    return SignedChannel(tmp_path / "home", versions=8)


@pytest.fixture
def copy(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "copy")


def bring(signed: SignedChannel, copy: FileStore, scratch: Path) -> None:
    with closing(Copier(signed.store, copy, scratch, clock=FakeClock())) as copier:
        while copier.sync() is not None:
            pass


def test_reader_with_the_key_follows_a_copy_through_a_rotation(
    signed: SignedChannel, copy: FileStore, tmp_path: Path
) -> None:
    bring(signed, copy, tmp_path)
    weights = arrays(bits_of(0))
    with wc.Subscriber(copy, weights, trust=signed.trust, threads=1) as subscriber:
        subscriber.sync()
        assert np.array_equal(weights.read("w"), bits_of(8))
        signed.add("stranger", "writer", first=9)
        signed.revoke("writer", last=8)
        signed.publish(writer="stranger")
        bring(signed, copy, tmp_path)
        subscriber.sync()
        assert np.array_equal(weights.read("w"), bits_of(9))


def test_squash_in_a_copy_is_as_good_as_at_home(signed: SignedChannel, copy: FileStore, tmp_path: Path) -> None:
    signed.squash()
    bring(signed, copy, tmp_path)
    assert {listed.key for listed in copy.list("squashes/")} == {
        listed.key for listed in signed.store.list("squashes/")
    }
    weights = arrays(bits_of(0))
    with wc.Subscriber(copy, weights, trust=signed.trust, threads=1) as subscriber:
        subscriber.sync()
    assert np.array_equal(weights.read("w"), bits_of(8))


def test_copy_with_another_list_of_keys_is_refused(signed: SignedChannel, copy: FileStore, tmp_path: Path) -> None:
    copy.create(keyring_key(1), b"{}")
    with pytest.raises(ConflictError, match="another list of keys"):
        bring(signed, copy, tmp_path)


def test_reader_joins_from_a_copy_while_the_home_is_away(
    signed: SignedChannel, copy: FileStore, tmp_path: Path
) -> None:
    bring(signed, copy, tmp_path)
    home = ScriptedStore(signed.store)
    home.fail("")
    weights = arrays(bits_of(0))
    with wc.Subscriber(home, weights, near=[copy], trust=signed.trust, threads=1) as subscriber:
        subscriber.sync()
    assert np.array_equal(weights.read("w"), bits_of(8))


def test_revocation_is_known_by_the_home_though_a_copy_lacks_it(
    signed: SignedChannel, copy: FileStore, tmp_path: Path
) -> None:
    bring(signed, copy, tmp_path)
    signed.revoke("writer", last=2)
    with (
        pytest.raises(TrustError),
        wc.Subscriber(signed.store, arrays(bits_of(0)), near=[copy], trust=signed.trust, threads=1) as subscriber,
    ):
        subscriber.sync()
