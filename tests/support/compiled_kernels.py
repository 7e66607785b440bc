"""Compile Triton's coding kernels for a GPU that need not be there: the interpreter accepts more than the compiler."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from weightcast.torch.kernels import triton_coding, triton_order, triton_writing

BITS = {  # of an element; the address of its words, and its traits
    16: ("*i16", {"MAGNITUDE": 0x7FFF, "SHIFT": 7, "BIAS": 0, "SIGNED": True}),
    64: ("*i64", {"MAGNITUDE": (1 << 63) - 1, "SHIFT": 52, "BIAS": 896, "SIGNED": True}),
}
KERNELS = {
    triton_order.arrange: {"STEP": 128},
    triton_coding.measure: {"STEP": 256, "FAR_STEP": 64},
    triton_coding.lay_out: {},
    triton_writing.write_bands: {"STEP": 128},
    triton_writing.write_rest: {"ROWS": 64},
}


def compile_all() -> None:
    for kernel, steps in KERNELS.items():
        for width, (words, traits) in BITS.items():
            addresses = {
                "was": words,
                "now": words,
                "ends": "*i64",
                "block_begin": "*i64",
                "bands": "*u8",
                "uppers": "*u8",
            }
            given = {"WIDTH": width, **traits, **steps}
            constants = {name: given[name] for name in kernel.arg_names if name in given}
            signature = {
                name: "constexpr" if name in constants else addresses.get(name, "*i32") for name in kernel.arg_names
            }
            triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))


if __name__ == "__main__":
    compile_all()
