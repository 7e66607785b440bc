"""The verbs, each with the line that `weightcast --help` shows for it.

Nothing is imported for that. The module of a verb has its name, with `_` for `-` and behind a keyword of Python, and a
function of the same name. It is imported when the verb is called, so that `weightcast log` does not pay for numpy and
the compiler of kernels.
"""

from __future__ import annotations

PANELS: dict[str, dict[str, str]] = {
    "Channels: weights through a bucket": {
        "init": "Begin a channel with a checkpoint as version 0.",
        "publish": "Publish a checkpoint as the next version.",
        "pull": "Bring a folder to a version, once or continuously.",
        "import": "Bring checkpoints, or another system's deltas, in.",
        "export": "Write versions as checkpoints, or in another layout.",
        "log": "List versions, newest first.",
        "show": "Show what a version changed, by layer.",
        "compare": "Show which tensors differ between two versions.",
        "analyze": "Show why so few weights change, and what that costs.",
        "status": "Show a channel's head, writer, size and replicas.",
        "plan": "Show the cheapest route to a version.",
        "dashboard": "Serve a live page about a channel.",
        "report": "Write that page as one file.",
        "verify": "Check a channel, a folder or a running engine.",
        "estimate": "Estimate what a sync costs, against other ways.",
    },
    "Engines": {
        "attach": "Keep a running engine on the newest weights.",
    },
    "Channels: upkeep": {
        "copy": "Bring a channel to another bucket, once or continuously.",
        "squash": "Merge runs of versions into one patch each.",
        "gc": "Delete what no replica needs any more.",
        "tag": "Name a version, or list the names.",
        "pin": "Keep a version: gc leaves all that leads to it.",
        "unpin": "Let gc collect a version again.",
        "forget": "Delete the heartbeat of a replica that is gone.",
        "key": "Make keys, and say which may sign a channel.",
        "repair": "Restore channel.json from the copy in an anchor.",
        "reset": "Delete a channel with all its versions.",
    },
    "Patches between checkpoints on disk": {
        "diff": "Write the patch that leads from OLD to NEW.",
        "apply": "Apply a patch to a checkpoint.",
        "inspect": "Show what a patch contains; needs no weights.",
        "digest": "Print the digest of weights.",
    },
    "This machine": {
        "cache": "List or delete the mirrors in your cache.",
        "warm-up": "Compile the kernels now instead of on first use.",
    },
}
"""Panels in the order of the help, verbs in the order of their panel."""

VERBS: dict[str, str] = {name: summary for verbs in PANELS.values() for name, summary in verbs.items()}
