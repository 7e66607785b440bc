"""Compile Triton's kernels for a GPU that need not be there: the interpreter accepts more than the compiler."""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from weightcast.torch.kernels import (
    triton_coding,
    triton_marking,
    triton_order,
    triton_parts,
    triton_reading,
    triton_writing,
)
from weightcast.torch.kernels.triton import SUB, TILE

BITS = {  # of an element; the address of its words, and its traits
    16: ("*i16", {"MAGNITUDE": 0x7FFF, "SHIFT": 7, "BIAS": 0, "SIGNED": True}),
    64: ("*i64", {"MAGNITUDE": (1 << 63) - 1, "SHIFT": 52, "BIAS": 896, "SIGNED": True}),
}
CODING = {
    triton_order.arrange: {"STEP": 128},
    triton_coding.measure: {"STEP": 256, "FAR_STEP": 64},
    triton_coding.lay_out: {},
    triton_writing.write_bands: {"STEP": 128},
    triton_writing.write_rest: {"ROWS": 64},
}
DECODING = {
    triton_reading.read_header: {},
    triton_reading.read_lists: {},
    triton_marking.mark_listed: {"TILE": TILE, "SUB": SUB, "ALIGNED": True},
    triton_marking.step: {"STEP": 128},
    triton_reading.read_distances: {},
    triton_marking.gain: {"STEP": 64},
}
PLACING = {
    triton_parts.gain_in_boxes: {"STEP": 64, "LOOPS": 2},
    triton_parts.put_in_parts: {"STEP": 64, "LOOPS": 3},
}
DIGESTING = [{"TILE": TILE, "LOOPS": loops, "WIDE": loops == 3, "ALIGNED": loops == 0} for loops in (0, 1, 3)]
ADDRESSES = {
    "ends": "*i64",
    "old": "*i64",
    "sizes": "*i32",
    "block_begin": "*i64",
    "block_nbytes": "*i64",
    "positions": "*i64",
    "bands": "*u8",
    "tallied": "*u8",
    "uppers": "*u8",
    "band_of": "*u8",
    "in_sub": "*i16",
    "gains": "*i64",
}


def compile_all(kernels: dict[Any, dict[str, Any]], **others: str) -> None:
    """``others`` are addresses of this set of kernels alone."""
    for kernel, steps in kernels.items():
        for width, (words, traits) in BITS.items():
            addresses = {"was": words, "now": words, "values": words, **ADDRESSES, **others}
            given = {"WIDTH": width, "BITS": width, **traits, **steps}
            constants = {name: given[name] for name in kernel.arg_names if name in given}
            signature = {
                name: "constexpr" if name in constants else addresses.get(name, "*i32") for name in kernel.arg_names
            }
            triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))


if __name__ == "__main__":
    if sys.argv[1:] == ["decoding"]:
        compile_all(DECODING, words="*i64", marks="*i64")
        compile_all(PLACING, sources="*i64", firsts="*i64", loops="*i64")
        for constants in DIGESTING:
            tables = dict.fromkeys(("firsts", "sources", "sizes", "loops", "sums"), "*i64")
            compile_all({triton_parts.digest_parts: constants}, **tables)
    else:
        compile_all(CODING)
