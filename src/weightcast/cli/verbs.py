"""The verbs by name: which module has each, and the line that `weightcast --help` shows for it.

Nothing is imported for that. A verb's module is imported when the verb is called, so that `weightcast log` does not pay
for numpy and the compiler of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """A function in a module of this package, named as the verb, with `_` for `-`."""

    module: str
    summary: str


PANELS: dict[str, dict[str, Verb]] = {
    "Channels: weights through a bucket": {
        "init": Verb("init", "Begin a channel with a checkpoint as version 0."),
        "publish": Verb("publish", "Publish a checkpoint as the next version."),
        "pull": Verb("pull", "Bring a folder to a version, once or continuously."),
        "log": Verb("log", "List versions, newest first."),
        "show": Verb("show", "Show what a version changed, by layer."),
        "compare": Verb("compare", "Show which tensors differ between two versions."),
        "status": Verb("status", "Show a channel's head, writer, size and replicas."),
        "plan": Verb("plan", "Show the cheapest route to a version."),
        "verify": Verb("verify", "Check a channel, a folder or a running engine."),
    },
    "Engines": {
        "attach": Verb("attach", "Keep a running engine on the newest weights."),
    },
    "Channels: upkeep": {
        "squash": Verb("squash", "Merge runs of versions into one patch each."),
        "gc": Verb("gc", "Delete what no replica needs any more."),
        "tag": Verb("tag", "Name a version, or list the names."),
        "pin": Verb("pin", "Keep a version: gc leaves all that leads to it."),
        "unpin": Verb("pin", "Let gc collect a version again."),
        "forget": Verb("forget", "Delete the heartbeat of a replica that is gone."),
        "repair": Verb("repair", "Restore channel.json from the copy in an anchor."),
        "reset": Verb("reset", "Delete a channel with all its versions."),
    },
    "Patches between checkpoints on disk": {
        "diff": Verb("diff", "Write the patch that leads from OLD to NEW."),
        "apply": Verb("apply", "Apply a patch to a checkpoint."),
        "inspect": Verb("inspect", "Show what a patch contains; needs no weights."),
        "digest": Verb("digest", "Print the digest of weights."),
    },
    "This machine": {
        "cache": Verb("cache", "List or delete the mirrors in your cache."),
        "warm-up": Verb("warm_up", "Compile the kernels now instead of on first use."),
    },
}
"""Panels in the order of the help, verbs in the order of their panel."""

VERBS: dict[str, Verb] = {name: verb for verbs in PANELS.values() for name, verb in verbs.items()}
