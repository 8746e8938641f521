"""MaxNormActivation, alone and with the scale and the encoding that follow it in DANet, and the uncentred LayerNorm."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from megalin.ops import backend as backends
from megalin.ops.backend import Backend, Compiled
from megalin.ops.cuda_launch import launch
from megalin.ops.positions import cosine_relpe
from megalin.ops.self_test import compare, sample
from megalin.ops.srmsnorm import compute_dtype, unsupported


def max_norm(x: Tensor, *, eps: float, backend: Backend = "auto") -> Tensor:
    """y = x / (max_j |x_j| + eps) over the last dimension (DenseAttention, MaxNormActivation).

    Args:
        x: [..., D], any float dtype; computed in at least fp32.
        eps: added to the maximum, so that a row of zeros gives zeros.
        backend: which implementation runs; compiled ones take fp32, bf16 and fp16 of widths up to 16384.

    Returns:
        [..., D] in the dtype of `x`. The maximum's gradient goes to a single index, as torch.max(dim) has it:
        with M = max |x| + eps, dx = dy / M, and dx_j -= sign(x_j) (sum dy . x) / M^2 at that index j.

    Raises:
        KernelError: an explicit backend that cannot run.
    """
    choice = backends.choose("max_norm", backend, x.device.type, unsupported(x))
    if choice == "reference":
        return max_norm_reference(x, eps=eps)
    return _forward(x.contiguous(), None, None, 1, eps, choice)[0]


def max_norm_reference(x: Tensor, *, eps: float) -> Tensor:
    """The equation of `max_norm` in plain PyTorch; the truth of the kernels and the CPU backend."""
    wide = x.to(compute_dtype(x))
    return (wide / (wide.abs().max(-1, keepdim=True).values + eps)).to(x.dtype)


def encoded_max_norm(
    x: Tensor, factor: Tensor, positions: Tensor, *, num_heads: int, eps: float, backend: Backend = "auto"
) -> Tensor:
    """y_i = f cos(p 10000^(-i'/K)) x_i / (max_j |x_j| + eps), i' = i mod K: `max_norm`, a scale, then `cosine_relpe`.

    Args:
        x: [B, T, D], D = num_heads K, any float dtype.
        factor: f [1 or B, 1 or T], in at least fp32, constant for autograd. Where it is zero, so is y, and dx.
        positions: p [T] or [B, T] integers, of magnitude below 2^24.
        num_heads: how often the frequencies repeat along D.
        eps, backend: as `max_norm`.

    Returns:
        [B, T, D] in the dtype of `x`; gradient to `x` alone.

    Raises:
        KernelError: an explicit backend that cannot run.
    """
    choice = backends.choose("max_norm", backend, x.device.type, unsupported(x))
    if choice == "reference":
        return encoded_max_norm_reference(x, factor, positions, num_heads=num_heads, eps=eps)
    rows = x.shape[:-1]
    factors = factor.detach().to(torch.float32).expand(rows).contiguous()
    places = positions.to(torch.int32).expand(rows).contiguous()
    return _forward(x.contiguous(), factors, places, num_heads, eps, choice)[0]


def encoded_max_norm_reference(x: Tensor, factor: Tensor, positions: Tensor, *, num_heads: int, eps: float) -> Tensor:
    """The three ops of `encoded_max_norm` one after the other."""
    normed = max_norm_reference(x, eps=eps)
    scaled = normed.to(factor.dtype) * factor.detach()[..., None]
    return cosine_relpe(scaled.unflatten(-1, (num_heads, -1)), positions).to(x.dtype).flatten(-2)


def mean_magnitude_norm(x: Tensor, *, eps: float) -> Tensor:
    """y = x / (mean_j |x_j| + eps) over the last dimension; arguments and result as `max_norm_reference`."""
    wide = x.to(compute_dtype(x))
    return (wide / (wide.abs().mean(-1, keepdim=True) + eps)).to(x.dtype)


@torch.library.custom_op("megalin::max_norm", mutates_args=())
def _forward(
    x: Tensor, factors: Tensor | None, positions: Tensor | None, num_heads: int, eps: float, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., D], factors and positions [...], all contiguous -> y, max + eps and its index [...]."""
    rows, width = x.shape[:-1], x.shape[-1]
    encoding = _encoding(x, factors, positions, num_heads)
    if backend == "cuda":
        y, peak = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
        index = x.new_empty(rows, dtype=torch.int32)
        launch("max_norm_forward", x, *encoding, y, peak, index, peak.numel(), width, eps)
        return y, peak, index
    from megalin._triton import max_norm as kernels

    y, peak, index = kernels.forward(x.view(-1, width), encoding, eps)
    return y.view_as(x), peak.view(rows), index.view(rows)


@_forward.register_fake
def _(
    x: Tensor, factors: Tensor | None, positions: Tensor | None, num_heads: int, eps: float, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    peak = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return torch.empty_like(x), peak, torch.empty_like(peak, dtype=torch.int32)


@torch.library.custom_op("megalin::max_norm_backward", mutates_args=())
def _backward(
    dy: Tensor,
    x: Tensor,
    factors: Tensor | None,
    positions: Tensor | None,
    num_heads: int,
    peak: Tensor,
    index: Tensor,
    backend: str,
) -> Tensor:
    dy, width = dy.contiguous(), x.shape[-1]
    encoding = _encoding(x, factors, positions, num_heads)
    if backend == "cuda":
        dx = torch.empty_like(x)
        launch("max_norm_backward", dy, x, *encoding, peak, index, dx, peak.numel(), width)
        return dx
    from megalin._triton import max_norm as kernels

    dx = kernels.backward(dy.view(-1, width), x.view(-1, width), encoding, peak.view(-1), index.view(-1))
    return dx.view_as(x)


@_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    factors: Tensor | None,
    positions: Tensor | None,
    num_heads: int,
    peak: Tensor,
    index: Tensor,
    backend: str,
) -> Tensor:
    return torch.empty_like(x)


def _encoding(x: Tensor, factors: Tensor | None, positions: Tensor | None, num_heads: int) -> tuple[Tensor | None, ...]:
    """What the kernels take: factors, positions and frequencies, or three times None."""
    if factors is None or positions is None:
        return None, None, None
    return factors, positions, _frequencies(x.shape[-1], num_heads, x.device)


@functools.cache
def _frequencies(width: int, num_heads: int, device: torch.device) -> Tensor:
    """10000^(-i/K) / 2 pi turns a position in units of 2^-32, [width] int32: p times it is off by p 2^-33 turns."""
    head_dim = width // num_heads
    exponent = torch.arange(head_dim, dtype=torch.float64) * (-1.0 / head_dim)
    turns = 10000.0**exponent / (2.0 * math.pi)
    return (turns * 2.0**32).round().to(torch.int32).repeat(num_heads).to(device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, factors, positions, ctx.num_heads, _, ctx.backend = inputs
    ctx.save_for_backward(x, factors, positions, *output[1:])


def _differentiate(ctx: Any, dy: Tensor, _: Tensor | None, __: Tensor | None) -> tuple[Tensor | None, ...]:
    x, factors, positions, peak, index = ctx.saved_tensors
    dx = _backward(dy, x, factors, positions, ctx.num_heads, peak, index, ctx.backend)
    return dx, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _self_test(backend: Compiled, device: str) -> str:
    positions = torch.arange(5, dtype=torch.int32, device=device)[None]
    factor = torch.tensor([[0.3, 0.0, 1.0, 2.0, 0.1]], device=device)
    x = [sample(1, 5, 200, device=device)]
    plain = compare(
        lambda x: _forward(x, None, None, 1, 1e-3, backend)[0], lambda x: max_norm_reference(x, eps=1e-3), x
    )
    return plain or compare(
        lambda x: _forward(x, factor, positions, 2, 1e-3, backend)[0],
        lambda x: encoded_max_norm_reference(x, factor.to(x.dtype), positions, num_heads=2, eps=1e-3),
        x,
    )


backends.register("max_norm", ("triton", "cuda"), _self_test)
