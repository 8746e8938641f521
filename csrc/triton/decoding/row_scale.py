"""Scale of a row under SRMSNorm, (mean(x^2) + eps)^(-1/2), which commutes with the linear map after the norm."""

import triton
import triton.language as tl


@triton.jit
def row_scale(x_ptr, width, eps, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)


@triton.jit
def summed_scale(squares_ptr, count, width, eps, BLOCK: tl.constexpr):
    """The same scale from `count` partial sums of squares."""
    index = tl.arange(0, BLOCK)
    squares = tl.load(squares_ptr + index, mask=index < count, other=0.0)
    return tl.rsqrt(tl.sum(squares, axis=0) / width + eps)
