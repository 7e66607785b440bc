"""`weightcast show URL VERSION`"""

import time
from typing import Annotated, Any

import typer

from weightcast.channel.chain import Chain
from weightcast.channel.records import Manifest
from weightcast.channel.tags import tags_by_position
from weightcast.cli.channels import commit_named, open_chain
from weightcast.cli.console import report, say
from weightcast.cli.heat import drawn, heat_of, legend, listed
from weightcast.cli.inspect import describe
from weightcast.cli.options import Url, Version
from weightcast.cli.tensors import All, list_tensors
from weightcast.cli.text import Column, Table, Text
from weightcast.cli.wording import ago, moment, size
from weightcast.format.patchfile import PatchReader
from weightcast.view.objects import StoreSource


def show(
    url: Url,
    version: Version,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List the most changed tensors instead of drawing layers.")
    ] = False,
    everything: All = False,
) -> None:
    """Show what a version changed, by layer and kind of tensor.

    Only a few kB of its patch are read.
    """
    chain = open_chain(url)
    manifest = commit_named(chain, version)
    commit = {
        "version": manifest.position.version,
        "step": manifest.step,
        "time": f"{moment(manifest.time)}, {ago(time.time() - manifest.time)}",
        "writer": manifest.writer,
        "label": manifest.label,
        "tags": list(tags_by_position(chain).get(manifest.position, ())),
    }
    if manifest.base is None:
        _show_anchor(chain, manifest, commit)
        return
    summary, rows = describe([PatchReader(StoreSource(chain.store, ref)) for ref in manifest.objects])
    report(commit | summary, time=manifest.time, tensors=rows)
    say("")
    if tensors or everything:
        list_tensors(rows, everything)
    else:
        _draw(chain, rows)


def _draw(chain: Chain, rows: list[dict[str, Any]]) -> None:
    heat = heat_of(chain.channel.table, {row["name"]: row["changed"] for row in rows})
    for stack in heat.stacks:
        if len(heat.stacks) > 1:
            say(Text(stack.name, "bold"))
        say(drawn(stack))
        say("")
    if heat.others:
        say(listed(heat.others))
        say("")
    say(legend())


def _show_anchor(chain: Chain, manifest: Manifest, commit: dict[str, Any]) -> None:
    """A version that is a whole checkpoint: its files, or where they are."""
    anchor = chain.anchor(manifest.key)
    files = {ref.key.rpartition("/")[2]: ref.size for ref in anchor.files}
    reference = f"{anchor.reference.repository}@{anchor.reference.revision}" if anchor.reference else None
    more = {"result": anchor.position.digest, "reference": reference, "bytes": anchor.nbytes}
    report(commit | more, time=manifest.time, files=files)
    table = Table(Column(style="dim"), Column(left=True), header=False)
    for name, nbytes in files.items():
        table.add(size(nbytes), name)
    say(table)
