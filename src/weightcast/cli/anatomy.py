"""The anatomy of deltas as tables for people, from the facts that programs are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weightcast.analysis.anatomy import Anatomy
from weightcast.cli.console import facts, say
from weightcast.cli.heat import block, drawn, heat_of, legend, listed
from weightcast.cli.text import Column, Table, Text
from weightcast.cli.wording import count, size

_RARE = 1e-3
"""Exponents of a smaller share of the weights are shown together."""

_WAYS = 6
"""Ways to cut that are shown, the cheapest; and none at all, to compare with."""

DIRECT = "weights that are rounded after each update, without masters"
MASTERS = "masters of higher precision, rounded for publishing"
IN_WORDS = {"masters": MASTERS, "direct": DIRECT}


def show(values: dict[str, Any], found: Anatomy) -> None:
    """Print all of it, the reasons first."""
    facts(_summary(values))
    for one in values["dtypes"]:
        _show_dtype(one)
    _title("where")
    _show_layers(found)
    _title("how the union grows with the versions between two syncs")
    say(_interval_table(values))
    _title("what the codecs make of it")
    say(_codec_table(values))
    if "cadence" in values:
        assumed = values["cadence"]["assumed"]
        _title(f"how to cut: an estimate for {count(assumed['replicas'], 'replica')} that follow every version, and")
        say(f"in a hundred versions join with nothing, and come back late, {assumed['joins_per_hundred_versions']:g}×")
        say(_cadence_table(values["cadence"]["ways"]))


def _title(text: str) -> None:
    say("")
    say(Text(text, "bold"))


def _summary(values: dict[str, Any]) -> dict[str, str]:
    changed = f"{values['density']:.3%} of the elements in a step, {values['changed']:,} flips in all"
    summary = {"steps": str(values["steps"]), "changed": changed}
    if values["returned_share"] is not None:
        summary["returned"] = f"{values['returned_share']:.1%} of later flips went back to bits of an earlier version"
    return summary


def _show_dtype(one: dict[str, Any]) -> None:
    if one["exponents"] is None:
        _title(f"{one['dtype']}: no floats, so there are no exponents to explain it by")
        return
    if not one["fits"]:
        _title(f"{one['dtype']}: no number flipped")
        return
    _title(f"{one['dtype']}: why so few")
    facts(_reasons(one))
    say("")
    say(_exponent_table(one))


def _reasons(one: dict[str, Any]) -> dict[str, str]:
    best, other = one["fits"]
    flips = one["changed"]
    near = one["distances"][0] / flips
    reasons = {}
    if one["looks_like"] == "neither":
        reasons["looks like"] = f"neither kind of training: the better model has {_misplaced(best)}"
    else:
        either = one["looks_like"] == "either"
        like = "either kind of training, since updates are as large as steps" if either else IN_WORDS[best["kind"]]
        reasons["looks like"] = f"{like}: {_misplaced(best)}"
        reasons["updates"] = f"up to {best['largest_update']:.2g}, {best['mean_update']:.2g} in the mean"
        reasons["near enough"] = (
            f"{one['visible_share']:.1%} of the weights have a float within twice the largest update"
        )
        reasons["otherwise"] = f"{IN_WORDS[other['kind']]}: {_misplaced(other)}"
    reasons["distances"] = f"{near:.1%} to the next float"
    reasons["directions"] = (
        f"{one['away'] / flips:.1%} away from zero, {one['towards'] / flips:.1%} towards it, "
        f"{one['across'] / flips:.2%} across"
    )
    return reasons


def _misplaced(fit: dict[str, Any]) -> str:
    return f"{fit['misplaced']:.1%} of flips elsewhere than predicted"


def grouped(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Exponents as they are shown: rare ones at either end are put together, as `below` or `above`."""
    total = sum(row["weights"] for row in rows)
    common = [i for i, row in enumerate(rows) if row["weights"] >= _RARE * total]
    first, last = common[0], common[-1]
    shown = [row | {"shown": f"{row['smallest']:.1e}"} for row in rows[first : last + 1]]
    if first:
        shown.insert(0, _together(rows[:first]) | {"shown": "smaller"})
    if last + 1 < len(rows):
        shown.append(_together(rows[last + 1 :]) | {"shown": "larger"})
    return shown


def _together(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    sums = {key: sum(row[key] for row in rows) for key in ("weights", "flips")}
    kinds = {kind for row in rows for kind in row["predicted"]}
    predicted = {kind: sum(row["predicted"].get(kind, 0.0) for row in rows) for kind in kinds}
    return sums | {"ulp": None, "predicted": predicted}


def _exponent_table(one: dict[str, Any]) -> Table:
    table = Table("|w| from", Column("next float", rank=2), Column("weights", rank=1), "flipped %", "predicted %")
    kind = one["fits"][0]["kind"]
    for row in grouped(one["exponents"]):
        predicted = _percent(row["predicted"][kind] / row["weights"]) if row["predicted"] else ""
        step = "" if row["ulp"] is None else f"+{row['ulp']:.1e}"
        measured = block(row["flips"] / row["weights"])
        table.add(row["shown"], step, f"{row['weights']:,}", measured, predicted)
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.0f}" if share >= 0.0995 else f"{100 * share:.2f}"


def _show_layers(found: Anatomy) -> None:
    heat = heat_of(found.table, {name: round(changed / found.steps) for name, changed in found.changed.items()})
    for stack in heat.stacks:
        if len(heat.stacks) > 1:
            say(Text(stack.name, "bold"))
        say(drawn(stack))
    if heat.others:
        say(listed(heat.others))
    say(legend())


def _interval_table(values: dict[str, Any]) -> Table:
    table = Table("versions", "changed %", Column("returned on the way %", rank=1), "in one patch", "one by one")
    elements = max(values["model_elements"], 1)
    for row in values["intervals"]:
        gone = 1 - row["changed"] / row["touched"] if row["touched"] else 0.0
        table.add(
            f"{row['versions']}",
            _percent(row["changed"] / elements),
            f"{100 * gone:.1f}",
            size(row["bytes"]),
            size(row["bytes_one_by_one"]),
        )
    return table


def _codec_table(values: dict[str, Any]) -> Table:
    table = Table(Column("codec", left=True), "a version", "bits per change", Column("of the model", rank=1))
    for row in values["codecs"]:
        each = row["bytes"] / values["steps"]
        bits = "" if row["bits_per_change"] is None else f"{row['bits_per_change']:.2f}"
        table.add(row["codec"], size(each), bits, f"1 : {values['model_bytes'] / each:,.0f}")
    return table


def _cadence_table(ways: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        Column("squashes", left=True),
        Column("anchors", left=True),
        "moved a version",
        Column("uploaded", rank=1),
        "a join",
        "a return",
        Column("stored", rank=2),
    )
    uncut = [way for way in ways[_WAYS:] if not way["squash_levels"] and not way["anchor_every"]]
    for i, way in enumerate([*ways[:_WAYS], *uncut]):
        table.add(
            Text(levels_in_words(way["squash_levels"]), "" if i else "bold"),
            anchors_in_words(way["anchor_every"]),
            *(size(way[key]) for key in ("moved", "uploaded", "join", "back", "stored")),
        )
    return table


def levels_in_words(levels: Sequence[int]) -> str:
    return "every " + ", ".join(map(str, levels)) if levels else "none"


def anchors_in_words(every: int | None) -> str:
    return f"every {every}" if every else "the first alone"
