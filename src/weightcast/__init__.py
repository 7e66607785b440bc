"""Keeps inference engines on the trainer's latest weights by shipping only the bits that changed.

>>> import numpy as np
>>> import weightcast as wc
>>> here, there = (wc.Arrays({"w": np.zeros(1000, np.float32)}) for _ in range(2))
>>> trained = wc.Arrays({"w": np.eye(1, 1000, 7, dtype=np.float32)[0]})
>>> data = wc.encode(wc.diff(here, trained), "banded", old=here)      # the trainer: a few hundred bytes
>>> patch = wc.decode(data, old=there)                                # an engine that holds the same old weights
>>> reached = patch.apply(there, wc.fingerprint(there))               # verifies base and result, then overwrites
>>> reached.digest == wc.fingerprint(trained).digest
True

Through a bucket, or a folder in place of one:

>>> import tempfile
>>> bucket = tempfile.mkdtemp()
>>> _ = wc.init(bucket, here)
>>> with wc.Publisher(bucket, here) as publisher, wc.Subscriber(bucket, there) as subscriber:
...     here.read("w")[500] = 0x3F800000                              # a training step
...     version = publisher.publish(step=1).result().position
...     staged = subscriber.poll()                                    # fetched, decoded, verified; nothing changed yet
...     subscriber.apply(staged) == version
True
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weightcast import _startup, errors  # noqa: F401 - the first import of all: signals, for the command alone
from weightcast.errors import WeightcastError

if TYPE_CHECKING:
    from weightcast.channel.keys import Position
    from weightcast.channel.policy import AtLeast, Every, Newest, Pinned, Policy
    from weightcast.channel.records import Manifest, ObjectRef, Reference
    from weightcast.channel.trust import Trust
    from weightcast.disk.apply import Applied, Written, apply_in_place, apply_to_copy, write_patch
    from weightcast.disk.checkpoint import Checkpoint
    from weightcast.events.event import Event, Sink
    from weightcast.events.json_lines import JsonLines
    from weightcast.follow.mirror_reader import reading
    from weightcast.follow.replica import Staged
    from weightcast.follow.subscriber import Subscriber
    from weightcast.follow.update import Update
    from weightcast.format.boxes import Box, Range
    from weightcast.format.codec import CodecName
    from weightcast.format.cut import Cut
    from weightcast.format.diff import anchor, diff
    from weightcast.format.digest import Fingerprint, box_digest, fingerprint
    from weightcast.format.joined import decode
    from weightcast.format.kernels.ready import warm_up
    from weightcast.format.patch import ModelSize, Patch, TensorPatch, advance, compose
    from weightcast.format.patchfile import encode
    from weightcast.format.scan import Detect
    from weightcast.format.spec import Dtype, TensorSpec, TensorTable
    from weightcast.format.tensors import Arrays, Target, Weights, round_to
    from weightcast.format.workers import Workers
    from weightcast.publish.codec_choice import CodecChoice
    from weightcast.publish.open import init
    from weightcast.publish.peers import Peers
    from weightcast.publish.publisher import Publisher
    from weightcast.publish.receipt import Receipt
    from weightcast.publish.shards import Shards
    from weightcast.publish.stream_publisher import StreamPublisher
    from weightcast.store import open_store
    from weightcast.store.backoff import Clock
    from weightcast.store.base import Listed, Store

__version__ = "0.1.0"

__all__ = [
    "Applied",
    "Arrays",
    "AtLeast",
    "Box",
    "Checkpoint",
    "Clock",
    "CodecChoice",
    "CodecName",
    "Cut",
    "Detect",
    "Dtype",
    "Event",
    "Every",
    "Fingerprint",
    "JsonLines",
    "Listed",
    "Manifest",
    "ModelSize",
    "Newest",
    "ObjectRef",
    "Patch",
    "Peers",
    "Pinned",
    "Policy",
    "Position",
    "Publisher",
    "Range",
    "Receipt",
    "Reference",
    "Shards",
    "Sink",
    "Staged",
    "Store",
    "StreamPublisher",
    "Subscriber",
    "Target",
    "TensorPatch",
    "TensorSpec",
    "TensorTable",
    "Trust",
    "Update",
    "WeightcastError",
    "Weights",
    "Workers",
    "Written",
    "advance",
    "anchor",
    "apply_in_place",
    "apply_to_copy",
    "box_digest",
    "compose",
    "decode",
    "diff",
    "encode",
    "errors",
    "fingerprint",
    "init",
    "open_store",
    "reading",
    "round_to",
    "warm_up",
    "write_patch",
]

_HOMES = {
    "channel.keys": "Position",
    "channel.policy": "AtLeast Every Newest Pinned Policy",
    "channel.records": "Manifest ObjectRef Reference",
    "channel.trust": "Trust",
    "disk.apply": "Applied Written apply_in_place apply_to_copy write_patch",
    "disk.checkpoint": "Checkpoint",
    "events.event": "Event Sink",
    "events.json_lines": "JsonLines",
    "follow.mirror_reader": "reading",
    "follow.replica": "Staged",
    "follow.subscriber": "Subscriber",
    "follow.update": "Update",
    "format.boxes": "Box Range",
    "format.codec": "CodecName",
    "format.cut": "Cut",
    "format.diff": "anchor diff",
    "format.digest": "Fingerprint box_digest fingerprint",
    "format.joined": "decode",
    "format.kernels.ready": "warm_up",
    "format.patch": "ModelSize Patch TensorPatch advance compose",
    "format.patchfile": "encode",
    "format.scan": "Detect",
    "format.spec": "Dtype TensorSpec TensorTable",
    "format.tensors": "Arrays Target Weights round_to",
    "format.workers": "Workers",
    "publish.codec_choice": "CodecChoice",
    "publish.open": "init",
    "publish.peers": "Peers",
    "publish.publisher": "Publisher",
    "publish.receipt": "Receipt",
    "publish.shards": "Shards",
    "publish.stream_publisher": "StreamPublisher",
    "store": "open_store",
    "store.backoff": "Clock",
    "store.base": "Listed Store",
}
"""Which module has which public names. They are imported when first used: the command needs few of them, quickly."""

_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'weightcast' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"weightcast.{_HOME_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOME_OF]
