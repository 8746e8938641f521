"""Position encodings: LRPE in its cosine and its rotation form, RoPE, Cosine RelPE, and places in packed documents."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megalin.ops.srmsnorm import compute_dtype


def lrpe_cosine(x: Tensor, theta: Tensor, positions: Tensor) -> Tensor:
    """y_t = [x_t cos(p_t theta) | x_t sin(p_t theta)], so that y_s . y_t = sum_i x_si x_ti cos(theta_i (s - t)).

    Args:
        x: [B, T, H, K] queries or keys.
        theta: [H, K] angular frequencies in radians a token, fp32.
        positions: [T] or [B, T] token positions, integers (a shift of all positions changes nothing).

    Returns:
        [B, T, H, 2K] in the dtype of `x`. Angles, sines and products are computed in at least fp32.

    Source: TransNormerLLM section 3.1 (LRPE), released code; cosFormer2.
    """
    angle = _angles(x, theta, positions)
    wide = x.to(angle.dtype)
    return torch.cat([wide * angle.cos(), wide * angle.sin()], dim=-1).to(x.dtype)


def lrpe_rotation(x: Tensor, theta: Tensor, positions: Tensor) -> Tensor:
    """Rotates the pairs (x_2j, x_2j+1) of each head by the angle p theta_j.

    Args:
        x: [B, T, H, K] queries or keys, K even; neighbouring elements form a pair.
        theta: [H, K/2] angular frequencies in radians a token, fp32.
        positions: [T] or [B, T] token positions, integers.

    Returns:
        [B, T, H, K] in the dtype of `x`. Angles, sines and products are computed in at least fp32.
    """
    angle = _angles(x, theta, positions)
    even, odd = x.to(angle.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


def rope(x: Tensor, positions: Tensor, *, base: float = 10000.0) -> Tensor:
    """Rotates the pairs (x_j, x_j+K/2) of each head by the angle p base^(-2j/K), j < K/2 (RoFormer eq. 34).

    Args:
        x: [B, T, H, K] queries or keys, K even; the two halves of a head form the pairs.
        positions: [T] or [B, T] token positions, integers (a shift of all positions changes no score).
        base: the slowest pair turns by about 1 / base radians a token.

    Returns:
        [B, T, H, K] in the dtype of `x`. Angles, sines and products are computed in at least fp32.
    """
    exponent = torch.arange(x.shape[-1] // 2, dtype=torch.float64, device=x.device) * (-2.0 / x.shape[-1])
    angle = _angles(x, base**exponent, positions)
    first, second = x.to(angle.dtype).chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


def rope_reference(x: Tensor, positions: Tensor, *, base: float = 10000.0) -> Tensor:
    """`rope` by its definition, a token and a pair at a time as complex numbers; [T] positions, fp32 or fp64 x."""
    width, pairs = x.shape[-1], []
    for j in range(width // 2):
        turns = torch.stack(
            [torch.polar(x.new_ones(()), x.new_tensor(int(p) * base ** (-2 * j / width))) for p in positions]
        )
        pairs.append(torch.complex(x[..., j], x[..., j + width // 2]) * turns[:, None])
    turned = torch.stack(pairs, dim=-1)
    return torch.cat([turned.real, turned.imag], dim=-1)


def cosine_relpe(x: Tensor, positions: Tensor) -> Tensor:
    """y_i = x_i cos(p 10000^(-i/K)), i < K, of each head: one factor of the sum that RoPE's rotation expands to.

    Unlike the encodings above it depends on where positions start: number the tokens of each document from 0.

    Args:
        x: [B, T, H, K].
        positions: [T] or [B, T] token positions, integers.

    Returns:
        [B, T, H, K] in the dtype of `x`. Angles, cosines and products are computed in at least fp32.

    Source: DenseAttention section 3.2, frequencies of the released code.
    """
    exponent = torch.arange(x.shape[-1], dtype=torch.float64, device=x.device) * (-1.0 / x.shape[-1])
    angle = _angles(x, 10000.0**exponent, positions)
    return (x.to(angle.dtype) * angle.cos()).to(x.dtype)


class DocumentSpans(NamedTuple):
    """Index along T of the first and of the last token of each token's document, [B, T] int64."""

    first: Tensor
    last: Tensor


def document_spans(document_ids: Tensor) -> DocumentSpans:
    """The spans of packed documents, [B, T] ids of which those of a document lie together."""
    last = document_ids.shape[1] - 1
    return DocumentSpans(_first(document_ids), last - _first(document_ids.flip(1)).flip(1))


def num_tokens_in_documents(document_ids: Tensor, valid: Tensor | None) -> Tensor:
    """Number of valid tokens in each token's document: [B, T] ids and bools (None: all) -> [B, T] int64."""
    first, last = document_spans(document_ids)
    counted = torch.ones_like(first) if valid is None else valid.to(first.dtype)
    total = counted.cumsum(1)
    return total.gather(1, last) - (total - counted).gather(1, first)


def _first(document_ids: Tensor) -> Tensor:
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    index = torch.arange(document_ids.shape[1], device=document_ids.device)
    return torch.where(starts, index, 0).cummax(1).values


def _angles(x: Tensor, theta: Tensor, positions: Tensor) -> Tensor:
    """p_t theta_hi as [1 or B, T, H, K'], in the compute dtype: bf16 could not even count the positions."""
    dtype = compute_dtype(x)
    return positions.to(dtype)[..., None, None] * theta.to(dtype)
