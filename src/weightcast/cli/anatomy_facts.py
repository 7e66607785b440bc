"""The anatomy of deltas as facts: what `weightcast analyze` tells programs, and what its page draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weightcast.analysis.anatomy import Anatomy, Explained
from weightcast.analysis.cadence import HORIZON, Cadence, Fleet
from weightcast.analysis.rounding import verdict, visible_share
from weightcast.cli.heat import heat_of
from weightcast.cli.tensors import most_changed


def facts_of(found: Anatomy) -> dict[str, Any]:
    """Everything that was counted and measured, as JSON."""
    heat = heat_of(found.table, found.changed)
    later = sum(sum(flips.changed[1:]) for flips in found.flips)
    returned = sum(flips.returned for flips in found.flips)
    return {
        "steps": found.steps,
        "model_tensors": len(found.table),
        "model_elements": found.table.elements,
        "model_bytes": found.table.nbytes,
        "changed": found.total,
        "density": found.density,
        "changed_by_step": [sum(counts) for counts in zip(*(flips.changed for flips in found.flips), strict=True)],
        "returned": returned,
        "returned_share": returned / later if later else None,
        "dtypes": [_dtype(one) for one in found.dtypes],
        "layers": [
            {
                "stack": stack.name,
                "layers": list(stack.layers),
                "kinds": list(stack.kinds),
                "cells": [
                    {"layer": layer, "kind": kind, "changed": cell.changed, "density": cell.density / found.steps}
                    for (layer, kind), cell in sorted(stack.cells.items())
                ],
            }
            for stack in heat.stacks
        ],
        "tensors": most_changed(
            [
                {
                    "name": spec.name,
                    "dtype": spec.dtype,
                    "shape": list(spec.shape),
                    "changed": found.changed[spec.name],
                    "density": found.changed[spec.name] / max(spec.elements * found.steps, 1),
                }
                for spec in found.table
            ]
        ),
        "intervals": _intervals(found),
        "codecs": [
            {
                "codec": codec,
                "bytes": sum(sizes),
                "bits_per_change": 8 * sum(sizes) / found.total if found.total else None,
                "by_step": list(sizes),
            }
            for codec, sizes in found.sizes.codecs.items()
        ],
    }


def _dtype(one: Explained) -> dict[str, Any]:
    values: dict[str, Any] = {"dtype": one.dtype, "elements": one.flips.elements, "changed": one.flips.total}
    counted = one.flips.exponents
    if counted is None:
        return values | {"exponents": None}
    fit = one.fits[0] if one.fits else None
    last = max((i for i, flips in enumerate(counted.distances) if flips), default=-1)
    return values | {
        "exponents": [
            {
                "smallest": row.smallest,
                "ulp": row.ulp,
                "weights": row.weights,
                "flips": row.flips,
                "predicted": dict(row.predicted),
            }
            for row in one.rows
        ],
        "fits": [
            {"kind": fit.kind, "largest_update": fit.largest, "mean_update": fit.mean, "misplaced": fit.misplaced}
            for fit in one.fits
        ],
        "looks_like": verdict(one.fits),
        "visible_share": visible_share(one.rows, fit.largest) if fit else None,
        "distances": [int(flips) for flips in counted.distances[: last + 1]],
        "away": counted.away,
        "towards": counted.towards,
        "across": counted.across,
    }


def _intervals(found: Anatomy) -> list[dict[str, Any]]:
    """What one sync ships, by the number of versions since the last: means over the windows."""
    rows = []
    for each, sizes in found.sizes.windows.items():
        unions = [flips.unions[each] for flips in found.flips]
        singles = found.sizes.windows[1][: each * len(sizes)]
        rows.append(
            {
                "versions": each,
                "windows": len(sizes),
                "changed": sum(union.changed for union in unions) / len(sizes),
                "touched": sum(union.touched for union in unions) / len(sizes),
                "bytes": sum(sizes) / len(sizes),
                "bytes_one_by_one": sum(singles) / len(sizes),
            }
        )
    return rows


def cadence_facts(found: Sequence[Cadence], fleet: Fleet) -> dict[str, Any]:
    """The estimate of what cutting costs, with what it assumes."""
    return {
        "assumed": {"replicas": fleet.replicas, "joins_per_hundred_versions": fleet.joins, "versions": HORIZON},
        "ways": [
            {
                "squash_levels": list(one.levels),
                "anchor_every": one.anchor_every,
                "moved": one.moved,
                "uploaded": one.uploaded,
                "downloaded": one.downloaded,
                "join": one.join,
                "back": one.back,
                "stored": one.stored,
            }
            for one in found
        ],
    }
