"""Signed channels as others see them: a checker written from the page alone, a file server, a host without keys."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cryptography.exceptions import InvalidSignature
from servers import serving_folder
from signed_channel import SignedChannel, arrays, bits_of
from simple_trust import Checker

import weightcast as wc
from weightcast.channel.keys import manifest_key
from weightcast.errors import TrustError


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> SignedChannel:
    made = SignedChannel(tmp_path_factory.mktemp("signed"), 9)
    made.squash()
    return made


def test_checker_of_the_spec_alone_finds_all_signatures_right(channel: SignedChannel) -> None:
    checker = Checker(channel.url, channel.trust)
    checker.manifests()
    checker.anchors()
    checker.squashes()
    assert checker.counts == {"channel": 1, "keyring": 2, "manifest": 10, "anchor": 1, "squash": 1}


def test_checker_of_the_spec_alone_notices_another_step(channel: SignedChannel) -> None:
    path = channel.path(manifest_key(9))
    data = path.read_bytes()
    try:
        path.write_bytes(data.replace(b'"step":9', b'"step":8'))
        with pytest.raises(InvalidSignature):
            Checker(channel.url, channel.trust).manifests()
    finally:
        path.write_bytes(data)


def test_signed_channel_is_followed_over_http(channel: SignedChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    held = arrays(np.zeros_like(bits_of(0)))
    with serving_folder(channel.url) as web:
        with wc.Subscriber(web.url, held, threads=1, trust=channel.trust) as subscriber:
            subscriber.sync()
        assert np.array_equal(held.read("w"), bits_of(9))
        with pytest.raises(TrustError):
            wc.Subscriber(web.url, held, threads=1, trust=str(channel.public("stranger")))


def test_who_trusts_no_key_needs_no_cryptography(channel: SignedChannel, tmp_path: Path) -> None:
    code = (
        "import sys, weightcast as wc\n"
        f"with wc.Subscriber({str(channel.url)!r}, {str(tmp_path / 'mirror')!r}, threads=1) as s: s.sync()\n"
        "assert s.position.version == 9\n"
        "assert not any(name.startswith('cryptography') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
