"""HGRN2's tied gates inside the kernels of the vector-decay scan: k and g from a logit l and a lower bound b.

    f = b + (1 - b) sigmoid(l),    k = 1 - f,    g = log f

In launches with GATES, k of a kernel is l, g is b [H, K] with strides of 0 over batch and tokens, dk is dl, and dg is
the gradient of b by chunk [B, H, N, K]. With u = exp(-|l|), D = 1 + u, and N = 1 + b u and S = u for l >= 0, N = b + u
and S = 1 for l < 0, no term cancels in

    f = N / D,    k = (1 - b) S / D,    dl = (1 - b) u / (N D) y,    db = sum over tokens of S / N y,    y = dg - f dk

b = 0 has no gradient through log b: db = sum of -y - dk. gates/forget_gates.py computes the same with divisions and a
logarithm, twice the instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

OPEN = tl.constexpr(1e4)
"""A logit with f = 1, so k = 0 and g = 0: of tokens after the last."""
TINY = tl.constexpr(1.1754943508222875e-38)
LOG2_E = tl.constexpr(1.4426950408889634)
ROOT_HALF = tl.constexpr(0x3F3504F3)
"""Bits of the square root of 1/2 in fp32."""


@triton.jit
def load_logit(logit_ptr, bound_ptr, stride, row, channel, mask, K: tl.constexpr):
    """Logits [C, BLOCK_K] of a chunk and bounds [1, BLOCK_K], fp32."""
    logit = tl.load(logit_ptr + row[:, None] * stride + channel[None, :], mask=mask, other=OPEN)
    bound = tl.load(bound_ptr + channel, mask=channel < K, other=0.0)
    return logit.to(tl.float32), bound[None, :]


@triton.jit
def as_result(x):
    """x plus a matmul of zeros, whose result has one layout over the registers: the compiler computes gates of it once.
    Gates of loaded logits it computes again in the layout of each use."""
    width: tl.constexpr = 16
    return tl.dot(tl.zeros([x.shape[0], width], tl.bfloat16), tl.zeros([width, x.shape[1]], tl.bfloat16), x)


@triton.jit
def reciprocal(x):
    """1 / x of TINY <= x < 1e37, of two roots and one step of Newton's."""
    root = tl.rsqrt(x)
    near = root * root
    return near * (2.0 - x * near)


@triton.jit
def numerators(logit, bound):
    """u, N and S."""
    small, opened = tl.exp2(tl.abs(logit) * -LOG2_E), logit >= 0.0
    return small, tl.where(opened, 1.0 + bound * small, bound + small), tl.where(opened, small, 1.0)


@triton.jit
def log2_of_gate(f, k):
    """log2 f: exponent, and a polynomial in the rest, which is -k where f is near 1. f = 0 gives -127."""
    bits = f.to(tl.int32, bitcast=True)
    exponent = (bits - ROOT_HALF) & -0x800000
    rest = tl.where(exponent == 0, -k, (bits - exponent).to(tl.float32, bitcast=True) - 1.0)
    # log2(1 + x) / x for x from 1 / sqrt 2 - 1 to sqrt 2 - 1, relative error 2.6e-8.
    value = 0.125853986 * rest - 0.207296073
    value = value * rest + 0.215721399
    value = value * rest - 0.238941714
    value = value * rest + 0.287915409
    value = value * rest - 0.360703796
    value = value * rest + 0.480910659
    value = value * rest - 0.721347332
    value = value * rest + 1.44269502
    return exponent.to(tl.float32) * 1.1920928955078125e-07 + value * rest


@triton.jit
def gate_key(logit, bound):
    """k and g / log 2 of logits."""
    small, n, s = numerators(logit, bound)
    inverse = reciprocal(1.0 + small)
    k = (1.0 - bound) * s * inverse
    return k, log2_of_gate(n * inverse, k)


@triton.jit
def load_keys(
    k_ptr, g_ptr, k_t, g_t, row, channel, mask,
    LOWEST: tl.constexpr, K: tl.constexpr, GATES: tl.constexpr, AS_RESULT: tl.constexpr,
):  # fmt: skip
    """k and g / log 2 [C, BLOCK_K] of a chunk, g at least LOWEST: loaded, or computed from logits and bounds."""
    if GATES:
        logit, bound = load_logit(k_ptr, g_ptr, k_t, row, channel, mask, K)
        k, g = gate_key(as_result(logit) if AS_RESULT else logit, bound)
    else:
        g = tl.load(g_ptr + row[:, None] * g_t + channel[None, :], mask=mask, other=0.0)
        k = tl.load(k_ptr + row[:, None] * k_t + channel[None, :], mask=mask, other=0.0)
        g = tl.maximum(g, LOWEST) * LOG2_E
    return k, g


@triton.jit
def store_gradients(dlogit_ptr, dbound_ptr, dk, dg, logit, bound, live, channel, out, mask, K: tl.constexpr):
    """dl of a chunk [C, BLOCK_K], and its summand of db in dbound [B, H, N, K]."""
    # Adding 0 dg moves the logits to the layout of dg while they are half as wide.
    small, n, s = numerators(logit + 0.0 * dg, bound)
    d = 1.0 + small
    inverse = reciprocal(tl.maximum(n * d, TINY))
    y = dg - n * n * inverse * dk
    # u / (N D) first: it is at most 1, where y / (N D) may overflow.
    tl.store(dlogit_ptr + out, ((1.0 - bound) * small * inverse * y).to(dlogit_ptr.dtype.element_ty), mask=mask)
    of_bound = tl.where(bound < TINY, -dk - y, s * d * inverse * y)
    total = tl.sum(tl.where(live[:, None], of_bound, 0.0), axis=0)
    tl.store(dbound_ptr + tl.program_id(0).to(tl.int64) * K + channel, total, mask=channel < K)
