"""Versions of several objects, each with boxes of tensors, in one folder of a channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from boxed import columns

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.keys import Position
from weightcast.channel.records import Manifest, ObjectRef
from weightcast.format.boxes import Place
from weightcast.format.coding import cut_tensor
from weightcast.format.patchfile import encode_boxes
from weightcast.format.tensors import Weights
from weightcast.format.workers import ONE

FOLDER, OTHER_FOLDER = "0123456789abcdef", "fedcba9876543210"
CODECS = ("banded", "plain", "gap")


def objects_of(patch: wc.Patch, old: Weights, codecs: Sequence[str] = CODECS) -> list[bytes]:
    """A patch as one object for each codec: each has some columns of every tensor, the first also what has none."""
    tensors: list[list[wc.TensorPatch]] = [[] for _ in codecs]
    places: list[dict[str, Place]] = [{} for _ in codecs]
    for tensor in patch.tensors:
        for i, place in enumerate(columns(tensor.spec, len(codecs))):
            places[i][place.label] = place
            tensors[i] += [part for _, part in cut_tensor(tensor, [place])]
    made = []
    for codec, some, boxes in zip(codecs, tensors, places, strict=True):
        known = {label: place.read(old.read(place.spec.name)) for label, place in boxes.items()}
        made.append(encode_boxes(replace(patch, tensors=tuple(some)), codec, boxes, known, ONE))
    return made


def put_objects(
    chain: Chain, old: Weights, new: Weights, folder: str = FOLDER, codecs: Sequence[str] = CODECS
) -> Manifest:
    """Upload the next version as several objects; returns the manifest that would commit it."""
    patch, head = wc.diff(old, new), chain.head()
    assert head is not None
    position = Position(head.position.version + 1, patch.result)
    refs: list[ObjectRef] = [chain.put_delta(position, data, folder) for data in objects_of(patch, old, codecs)]
    return chain.draft(position, head.position, refs, codecs[0], patch.changed, position.version, "ranks")


def publish_objects(
    chain: Chain, old: Weights, new: Weights, folder: str = FOLDER, codecs: Sequence[str] = CODECS
) -> Manifest:
    manifest = put_objects(chain, old, new, folder, codecs)
    chain.commit(manifest)
    return manifest


def sizes_of(chain: Chain, folder: str) -> Mapping[str, int]:
    """The objects in a folder, by their keys."""
    return {listed.key: listed.size for listed in chain.store.list(folder)}
