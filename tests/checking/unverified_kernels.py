"""Kernels in Triton: one that the interpreter runs, and one that it cannot."""

import triton
import triton.language as tl


@triton.jit
def interpreted(x, result, x_numel, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    numbers = tl.load(x + at, mask=at < x_numel).to(tl.float32)
    tl.store(result + at, numbers * numbers * numbers, mask=at < x_numel)


@triton.jit
def not_interpreted(x, result, x_numel, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    numbers = tl.load(x + at, mask=at < x_numel).to(tl.float32)
    same = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [numbers], tl.float32, True, 1)
    tl.store(result + at, same * numbers * numbers, mask=at < x_numel)
