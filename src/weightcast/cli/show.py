"""`weightcast show URL VERSION`"""

from typing import Annotated, Any

import typer

from weightcast.channel.chain import Chain
from weightcast.channel.records import Manifest, ObjectRef
from weightcast.cli.console import AsJson, Url, commit_of, facts, open_chain, say, tell, working
from weightcast.cli.heat import block, drawn, heat_of, legend, listed
from weightcast.cli.inspect import describe
from weightcast.cli.pin import Version
from weightcast.cli.text import Table, Text
from weightcast.cli.wording import moment, one_line, size
from weightcast.errors import FormatError
from weightcast.format.patchfile import PatchReader
from weightcast.store.base import Store

_FRONT = 16384
"""Bytes that are fetched at once from the front of an object: the header and the digests of most."""


class StoreSource:
    """An object of a store as bytes at rest, of which only what is asked for is fetched."""

    def __init__(self, store: Store, ref: ObjectRef):
        self._store, self._key = store, ref.key
        self.name, self.size = f"{store.url}/{ref.key}", ref.size
        self._front = store.get(ref.key, 0, min(_FRONT, ref.size))

    def read_into(self, out: memoryview, at: int) -> None:
        end = at + len(out)
        data = self._front[at:end] if end <= len(self._front) else self._store.get(self._key, at, len(out))
        if len(data) != len(out):
            raise FormatError("the object ends too early", file=self.name, hint="It must be published again.")
        out[:] = data


def show(
    url: Url,
    version: Version,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every changed tensor.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a version changed, by layer and kind of tensor.

    Only the tables of its patch are read, which are a few kB of it.
    """
    with working(1, as_json, kernels=False):
        chain = open_chain(url)
        manifest = commit_of(chain, version)
        if manifest.base is None:
            _show_anchor(chain, manifest, as_json)
            return
        summary, rows = describe(PatchReader(StoreSource(chain.store, manifest.object)))
        if as_json:
            tell(_commit(manifest) | summary | {"tensors": rows})
            return
        facts(_commit(manifest) | {"time": moment(manifest.time)} | summary, as_json=False)
        say("")
        if tensors:
            say(_list(rows))
        else:
            _draw(chain, rows)


def _commit(manifest: Manifest) -> dict[str, Any]:
    return {
        "version": manifest.position.version,
        "step": manifest.step,
        "time": manifest.time,
        "writer": manifest.writer,
    }


def _draw(chain: Chain, rows: list[dict[str, Any]]) -> None:
    heat = heat_of(chain.channel.table, {row["name"]: row["changed"] for row in rows})
    for stack in heat.stacks:
        if len(heat.stacks) > 1:
            say(Text(one_line(stack.name), "bold"))
        say(drawn(stack))
        say("")
    if heat.others:
        say(listed(heat.others))
        say("")
    say(legend())


def _list(rows: list[dict[str, Any]]) -> Table:
    table = Table()
    for column in ("% changed", "changed", "bytes"):
        table.add_column(column, justify="right")
    table.add_column("tensor")
    for row in rows:
        table.add_row(block(row["density"]), f"{row['changed']:,}", f"{row['bytes']:,}", row["name"])
    return table


def _show_anchor(chain: Chain, manifest: Manifest, as_json: bool) -> None:
    """A version that is a whole checkpoint: its files, or where they are."""
    anchor = chain.anchor(manifest.object.key)
    files = {ref.key.rpartition("/")[2]: ref.size for ref in anchor.files}
    reference = f"{anchor.reference.repository}@{anchor.reference.revision}" if anchor.reference else None
    values = _commit(manifest) | {"result": anchor.position.digest, "reference": reference, "bytes": anchor.nbytes}
    if as_json:
        tell(values | {"files": files})
        return
    facts(values | {"time": moment(manifest.time)}, as_json=False)
    for name, nbytes in files.items():
        say(Text.assemble((f"{size(nbytes):>8}", "dim"), "  ", one_line(name)))
