"""MaxNormActivation, alone and fused with the scale and position encoding after it in DANet; uncentred LayerNorm."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalin.errors import OperandError
from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.cuda_launch import launch
from megalin.ops.dispatch.custom_op import custom_op
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.dispatch.self_test import ROWS, compare, sample
from megalin.ops.norms.srmsnorm import unsupported, width_case
from megalin.ops.positions.encodings import cosine_relpe


def max_norm(x: Tensor, *, eps: float, scale: Tensor | None = None, backend: Backend = "auto") -> Tensor:
    """MaxNormActivation (DenseAttention) over the last dimension: y = s x / (max_j |s x_j| + eps).

    Args:
        x: [..., D], any float dtype; computed in at least fp32.
        scale: s [] > 0 in at least fp32, constant for autograd; one by default.
        eps: added to the maximum, so that a row of zeros gives zeros.
        backend: implementation to run; compiled ones take fp32, bf16 and fp16 of widths up to 16384.

    Returns:
        [..., D] in the dtype of `x`. The maximum's gradient goes to a single index, as in torch.max(dim):
        with M = max |s x| + eps, dx = s dy / M, and dx_j -= s sign(x_j) (sum dy . s x) / M^2 at that index j.

    Raises:
        KernelError: an explicit backend that cannot run.
    """
    case = (*width_case(x), ("scaled", scale is not None), ("heads", 0))
    choice = backends.choose("max_norm", backend, x.device.type, unsupported(x), case=case)
    if choice == "reference":
        return max_norm_reference(x, eps=eps, scale=scale)
    scale = None if scale is None else scale.detach().to(torch.float32)
    return _forward(x.contiguous(), None, None, scale, 0, 1, eps, choice)[0]


def max_norm_reference(x: Tensor, *, eps: float, scale: Tensor | None = None) -> Tensor:
    """Reference of `max_norm` in plain PyTorch: tests the kernels and runs on CPUs."""
    wide = x.to(compute_dtype(x))
    wide = wide if scale is None else wide * scale.detach()
    return (wide / (wide.abs().max(-1, keepdim=True).values + eps)).to(x.dtype)


def encoded_max_norm(
    x: Tensor,
    factor: Tensor,
    positions: Tensor,
    *,
    num_positions: int,
    num_heads: int,
    eps: float,
    backend: Backend = "auto",
) -> Tensor:
    """`max_norm`, a scale, then `cosine_relpe`: y_i = f cos(p 10000^(-i'/K)) x_i / (max_j |x_j| + eps), i' = i mod K.

    Args:
        x: [B, T, D], D = num_heads K, any float dtype.
        factor: f [1 or B, 1 or T], in at least fp32, constant for autograd. Where it is zero, so is y, and dx.
        positions: p [T] or [B, T] integers in [0, num_positions). For any other, kernels return NaN: the table has no
            cosine for it, and raising would wait for the device.
        num_positions: size of the kernels' table of cosines, rounded once from fp64: to fp32 for fp32 x, else to fp16,
            whose eps is an eighth of bf16's. Built at the first call with a size and cached.
        num_heads: number of times the frequencies repeat along D.
        eps, backend: as in `max_norm`.

    Returns:
        [B, T, D] in the dtype of `x`; only `x` gets a gradient.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: tensors with incompatible shapes, dtypes or devices.
    """
    places = "T int" if positions.dim() == 1 else "BT int"
    check_operands("max_norm", {"x": (x, "BTD"), "factor": (factor, "bt"), "positions": (positions, places)})
    if x.shape[-1] % num_heads:
        raise OperandError(f"max_norm: {num_heads} heads do not divide a width of {x.shape[-1]}")
    case = (*width_case(x), ("scaled", False), ("heads", num_heads))
    choice = backends.choose("max_norm", backend, x.device.type, unsupported(x), case=case)
    if choice == "reference":
        return encoded_max_norm_reference(x, factor, positions, num_heads=num_heads, eps=eps)
    outside = (positions < 0) | (positions >= num_positions)
    factors = factor.detach().to(torch.float32).expand(x.shape[:-1]).masked_fill(outside, torch.nan)
    places_inside = positions.masked_fill(outside, 0).contiguous()
    return _forward(x.contiguous(), factors.contiguous(), places_inside, None, num_positions, num_heads, eps, choice)[0]


def encoded_max_norm_reference(x: Tensor, factor: Tensor, positions: Tensor, *, num_heads: int, eps: float) -> Tensor:
    """Reference of `encoded_max_norm`: its three ops one after the other."""
    normed = max_norm_reference(x, eps=eps)
    scaled = normed.to(factor.dtype) * factor.detach()[..., None]
    return cosine_relpe(scaled.unflatten(-1, (num_heads, -1)), positions).to(x.dtype).flatten(-2)


def mean_magnitude_norm(x: Tensor, *, eps: float) -> Tensor:
    """Mean-magnitude norm, y = x / (mean_j |x_j| + eps) over the last dimension; arguments as `max_norm_reference`."""
    wide = x.to(compute_dtype(x))
    return (wide / (wide.abs().mean(-1, keepdim=True) + eps)).to(x.dtype)


class Encoding(NamedTuple):
    """Scale and position encoding of the rows of a matrix after their max norm."""

    factors: Tensor
    """One per row, fp32."""
    positions: Tensor
    """[P] indices into the rows of `cosines`; row r uses positions[r mod P]."""
    cosines: Tensor
    """[num_positions, K], repeated along the row."""


def _fake_forward(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    peak = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return torch.empty_like(x), peak, torch.empty_like(peak, dtype=torch.int32)


@custom_op("max_norm", _fake_forward)
def _forward(
    x: Tensor,
    factors: Tensor | None,
    positions: Tensor | None,
    scale: Tensor | None,
    num_positions: int,
    num_heads: int,
    eps: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., D], factors [...], positions [...] or its last dimension, all contiguous -> y, max + eps [...] and the
    index of the max [...]."""
    rows, width = x.shape[:-1], x.shape[-1]
    encoding = _encoding(x, factors, positions, num_positions, num_heads)
    if backend == "cuda":
        y, peak = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
        index = x.new_empty(rows, dtype=torch.int32)
        launch("max_norm_forward", x, *_for_cuda(encoding), scale, y, peak, index, peak.numel(), width, eps)
        return y, peak, index
    from megalin._triton.norms import max_norm as kernels

    y, peak, index = kernels.forward(x.view(-1, width), encoding, scale, eps)
    return y.view_as(x), peak.view(rows), index.view(rows)


@custom_op("max_norm_backward", lambda dy, x, *_: torch.empty_like(x))
def _backward(
    dy: Tensor,
    x: Tensor,
    factors: Tensor | None,
    positions: Tensor | None,
    scale: Tensor | None,
    num_positions: int,
    num_heads: int,
    peak: Tensor,
    index: Tensor,
    backend: str,
) -> Tensor:
    dy, width = dy.contiguous(), x.shape[-1]
    encoding = _encoding(x, factors, positions, num_positions, num_heads)
    if backend == "cuda":
        dx = torch.empty_like(x)
        launch("max_norm_backward", dy, x, *_for_cuda(encoding), scale, peak, index, dx, peak.numel(), width)
        return dx
    from megalin._triton.norms import max_norm as kernels

    dx = kernels.backward(dy.view(-1, width), x.view(-1, width), encoding, scale, peak.view(-1), index.view(-1))
    return dx.view_as(x)


def _encoding(
    x: Tensor, factors: Tensor | None, positions: Tensor | None, num_positions: int, num_heads: int
) -> Encoding | None:
    if factors is None or positions is None:
        return None
    dtype = torch.float32 if x.dtype == torch.float32 else torch.float16
    # Lengths up to a power of two share its table.
    table_size = 1 << (num_positions - 1).bit_length()
    return Encoding(factors, positions, _cosines(table_size, x.shape[-1] // num_heads, dtype, x.device))


def _for_cuda(encoding: Encoding | None) -> tuple[Tensor | int | None, ...]:
    """Factors, int32 positions, cosines, the number of positions and the cosines per head."""
    if encoding is None:
        return None, None, None, 1, 1
    factors, positions, cosines = encoding
    return factors, positions.to(torch.int32), cosines, positions.numel(), cosines.shape[1]


@functools.lru_cache(maxsize=8)
def _cosines(num_positions: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Table of cos(p 10000^(-i/K)) from fp64 angles, [num_positions, K] in `dtype`."""
    table = torch.empty(num_positions, head_dim, dtype=dtype, device=device)
    exponent = torch.arange(head_dim, dtype=torch.float64, device=device) * (-1.0 / head_dim)
    for first in range(0, num_positions, 4096):
        part = torch.arange(first, min(first + 4096, num_positions), dtype=torch.float64, device=device)
        table[first : first + len(part)] = (part[:, None] * 10000.0**exponent).cos()
    return table


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, factors, positions, scale, ctx.num_positions, ctx.num_heads, _, ctx.backend = inputs
    ctx.save_for_backward(x, factors, positions, scale, *output[1:])


def _differentiate(ctx: Any, dy: Tensor, _: Tensor | None, __: Tensor | None) -> tuple[Tensor | None, ...]:
    x, factors, positions, scale, peak, index = ctx.saved_tensors
    dx = _backward(dy, x, factors, positions, scale, ctx.num_positions, ctx.num_heads, peak, index, ctx.backend)
    return dx, None, None, None, None, None, None, None


torch.library.register_autograd(_forward, _differentiate, setup_context=_save)


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    """Rows with one maximum: of equal ones, the kernel and the reference may take different ones."""
    width, heads = case["D"], case["heads"]
    place = torch.arange(ROWS, device=device)
    x = sample(1, ROWS, width, device=device)
    x[0, place, place * 37 % width] = 8.0
    inputs = [x.to(case["x"])]
    if not heads:
        scale = torch.tensor(0.2, device=device) if case["scaled"] else None
        return compare(
            lambda x: _forward(x, None, None, scale, 0, 1, 1e-3, backend)[0],
            lambda x: max_norm_reference(x, eps=1e-3, scale=scale),
            inputs,
        )
    factor = (place % 4 * 0.5)[None]
    return compare(
        lambda x: _forward(x, factor, place, None, ROWS, heads, 1e-3, backend)[0],
        lambda x: encoded_max_norm_reference(x, factor.to(x.dtype), place, num_heads=heads, eps=1e-3),
        inputs,
    )


backends.register("max_norm", ("triton", "cuda"), _self_test)
