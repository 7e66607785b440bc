"""Ways to damage an object of a channel."""

from __future__ import annotations

from collections.abc import Callable

from scripted_store import ScriptedStore
from worlds import World, follow

from weightcast.channel.policy import Pinned


def mirrored(world: World) -> World:
    """A mirror at version 1, to be brought forward."""
    follow(world, policy=Pinned(1))
    return world


Damage = Callable[[ScriptedStore, str, str], None]


def _swap(store: ScriptedStore, key: str, other: str) -> None:
    one, two = store.get(key), store.get(other)
    store.put(key, two)
    store.put(other, one)


def flipped(data: bytes) -> bytes:
    middle = len(data) * 2 // 3
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGES: dict[str, Damage] = {
    "missing": lambda store, key, other: store.delete(key),
    "empty": lambda store, key, other: store.put(key, b""),
    "cut": lambda store, key, other: store.put(key, store.get(key)[: len(store.get(key)) // 2]),
    "one byte short": lambda store, key, other: store.put(key, store.get(key)[:-1]),
    "one byte long": lambda store, key, other: store.put(key, store.get(key) + b"\0"),
    "a bit flipped": lambda store, key, other: store.put(key, flipped(store.get(key))),
    "another's bytes": lambda store, key, other: store.put(key, store.get(other)),
    "swapped": _swap,
}


def keys_of(world: World, prefix: str) -> list[str]:
    return sorted(key for key in world.objects() if key.startswith(prefix))
