"""Speed and overhead of the codecs on a 596 M-parameter bf16 model, synthesised: no data needed, 6 GB of memory.

    python benchmarks/speed.py [--scale 1.0] [--threads 1 2 4 8 16]

Prints one JSON object. Times are multiples of one memcpy of the new tensors on one thread, in the same run. Weights are
normal; every step adds a normally distributed update to fp32 masters, scaled so that about 1 % of the bf16 bits change.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from functools import partial

import numpy as np
from codec_sizes import best_of, memcpy_seconds

import weightcast as wc
from weightcast.format.kernels import cpu
from weightcast.format.patchfile import PatchReader
from weightcast.format.safetensors import BytesSource

UPDATE = 3.9e-7
"""Standard deviation of a step at which about 1 % of weights with deviation 0.03 change their bf16 bits."""


def qwen3_shapes(scale: float) -> dict[str, tuple[int, ...]]:
    """The tensors of a Qwen3-0.6B and a value head, 311; a ``scale`` below 1 takes fewer layers and words."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (int(151936 * scale), 1024),
        "model.norm.weight": (1024,),
    }
    if scale >= 1:
        shapes["value_head.weight"] = (1024,)
    layer = {
        "input_layernorm": (1024,),
        "mlp.down_proj": (1024, 3072),
        "mlp.gate_proj": (3072, 1024),
        "mlp.up_proj": (3072, 1024),
        "post_attention_layernorm": (1024,),
        "self_attn.k_norm": (128,),
        "self_attn.k_proj": (1024, 1024),
        "self_attn.o_proj": (1024, 2048),
        "self_attn.q_norm": (128,),
        "self_attn.q_proj": (2048, 1024),
        "self_attn.v_proj": (1024, 1024),
    }
    for i in range(max(1, int(28 * scale))):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def moe_shapes(tensors: int, elements: int) -> dict[str, tuple[int, ...]]:
    """Many small experts, as many elements in all."""
    rows = max(1, elements // tensors // 128)
    kinds = ("down_proj", "gate_proj", "up_proj")
    return {
        f"model.layers.{i // 384}.mlp.experts.{i // 3 % 128}.{kinds[i % 3]}.weight": (rows, 128) for i in range(tensors)
    }


def synthesise(shapes: dict[str, tuple[int, ...]]) -> tuple[wc.Arrays, wc.Arrays]:
    """Weights before and after one optimizer step."""
    rng = np.random.default_rng(1)
    sides: tuple[dict[str, np.ndarray], dict[str, np.ndarray]] = {}, {}
    for name, shape in shapes.items():
        master = rng.standard_normal(shape, np.float32)
        master *= 0.03
        sides[0][name] = wc.round_to("BF16", master)
        master += rng.standard_normal(shape, np.float32) * np.float32(UPDATE)
        sides[1][name] = wc.round_to("BF16", master)
    before, after = (wc.Arrays(side, dict.fromkeys(shapes, "BF16")) for side in sides)
    return before, after


def bare_diff(old: wc.Arrays, new: wc.Arrays) -> float:
    """Seconds of the compare kernel alone, on one thread."""
    pairs = [(old.read(spec.name), new.read(spec.name)) for spec in old.table]
    room = max(bits.size for bits, _ in pairs)
    indices, was, now = np.empty(room, np.int64), np.empty(room, np.uint16), np.empty(room, np.uint16)

    def run() -> None:
        for before, after in pairs:
            cpu.changes(before, after, 0, indices, was, now)

    return best_of(run, 3)


def overhead_share(data: bytes) -> float:
    """Part of a file that is not coded streams."""
    return PatchReader(BytesSource(data)).overhead / len(data)


def measure_threads(old: wc.Arrays, new: wc.Arrays, patch: wc.Patch, threads: int, copy: float) -> dict[str, float]:
    """Multiples of one memcpy for each operation, with so many threads."""
    with wc.Workers(threads) as workers:
        fingerprint = wc.fingerprint(old, workers)
        times = {
            "fingerprint": best_of(partial(wc.fingerprint, old, workers), 3) / copy,
            "diff": best_of(partial(wc.diff, old, new, fingerprint, workers), 3) / copy,
        }
        for codec in ("gap", "banded"):
            data = wc.encode(patch, codec, old, workers)
            times[f"{codec}_encode"] = best_of(partial(wc.encode, patch, codec, old, workers), 3) / copy
            times[f"{codec}_decode"] = best_of(partial(wc.decode, data, old, workers), 3) / copy
    times["diff_and_gap_encode"] = times["diff"] + times["gap_encode"]
    return times


def measure_model(scale: float, threads: Sequence[int]) -> dict[str, object]:
    """A dense model: times, sizes, overhead."""
    old, new = synthesise(qwen3_shapes(scale))
    copy = memcpy_seconds(new)
    with wc.Workers(max(threads)) as workers:
        patch = wc.diff(old, new, workers=workers)
        files = {codec: wc.encode(patch, codec, old, workers) for codec in ("gap", "banded")}
        exact = all(wc.decode(data, old, workers) == patch for data in files.values())
    return {
        "tensors": len(old.table),
        "elements": old.table.elements,
        "density": patch.changed / old.table.elements,
        "memcpy_seconds": copy,
        "bare_diff_kernel_1_thread": bare_diff(old, new) / copy,
        "memcpys_by_threads": {count: measure_threads(old, new, patch, count, copy) for count in threads},
        "bit_exact": exact,
        "bits_per_change": {codec: 8 * len(data) / patch.changed for codec, data in files.items()},
        "overhead": {codec: overhead_share(data) for codec, data in files.items()},
    }


def measure_many(tensors: int, elements: int, workers: wc.Workers) -> dict[str, float]:
    """Overhead where the same elements are spread over many tensors."""
    old, new = synthesise(moe_shapes(tensors, elements))
    patch = wc.diff(old, new, workers=workers)
    return {codec: overhead_share(wc.encode(patch, codec, old, workers)) for codec in ("gap", "banded")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    args = parser.parse_args()
    wc.warm_up()
    facts = measure_model(args.scale, args.threads)
    with wc.Workers(max(args.threads)) as workers:
        facts["overhead_20000_tensors"] = measure_many(20_000, int(596_000_000 * args.scale), workers)
    print(json.dumps({"hardware": f"{platform.machine()}, {os.cpu_count()} cores"} | facts, indent=1))


if __name__ == "__main__":
    main()
