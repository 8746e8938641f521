"""Position encodings (LRPE in cosine and rotation form, RoPE, Cosine RelPE), and positions in packed documents."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megalin.errors import OperandError
from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.custom_op import custom_op
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES, compute_dtype
from megalin.ops.dispatch.operands import Case, check_operands
from megalin.ops.dispatch.self_test import compare, few, sample


def lrpe_cosine(x: Tensor, theta: Tensor, positions: Tensor) -> Tensor:
    """LRPE, cosine form: y_t = [x_t cos(p_t theta) | x_t sin(p_t theta)], so that
    y_s . y_t = sum_i x_si x_ti cos(theta_i (s - t)).

    Args:
        x: [B, T, H, K] queries or keys.
        theta: [H, K] angular frequencies in radians a token, fp32.
        positions: [T] or [B, T] token positions, integers (a shift of all positions changes nothing).

    Returns:
        [B, T, H, 2K] in the dtype of `x`. Angles, sines and products are computed in at least fp32.

    Raises:
        OperandError: tensors with incompatible shapes, dtypes or devices.

    Source: TransNormerLLM section 3.1 (LRPE), released code; cosFormer2.
    """
    _check("lrpe_cosine", x, positions, theta=(theta, "HK"))
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

    Raises:
        OperandError: tensors with incompatible shapes, dtypes or devices.
    """
    _check("lrpe_rotation", x, positions, theta=(theta, "HJ"))
    check_pairs("lrpe_rotation", theta, x.shape[3])
    angle = _angles(x, theta, positions)
    even, odd = x.to(angle.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


class RopeScaling(NamedTuple):
    """Division of RoPE's frequencies for texts longer than those of a model's first training.

    linear: all by `factor` (Chen et al. 2023). llama3: those of more than `original_length / low_frequency_factor`
    tokens a turn; those of less than `original_length / high_frequency_factor` are kept, and between the two the
    frequency is interpolated linearly in the turns per `original_length` tokens (LLaMA 3.1).
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192


def rope(
    x: Tensor,
    positions: Tensor,
    *,
    base: float = 10000.0,
    scaling: RopeScaling | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Rotates the pairs (x_j, x_j+K/2) of each head by the angle p base^(-2j/K), j < K/2 (RoFormer eq. 34).

    Args:
        x: [B, T, H, K] queries or keys, K even; a pair is one channel of each half of a head.
        positions: [T] or [B, T] token positions, integers (a shift of all positions changes no score).
        base: the slowest pair rotates by about 1 / base radians a token.
        scaling: changes the frequencies base^(-2j/K); None: does not.
        backend: implementation to run; compiled ones take fp32, bf16 and fp16.

    Returns:
        [B, T, H, K] in the dtype of `x`. Angles, sines and products are computed in at least fp32.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: tensors with incompatible shapes, dtypes or devices.
    """
    case = _check("rope", x, positions)
    if x.shape[3] % 2:
        raise OperandError(f"rope: head dimension {x.shape[3]} is odd, but channels rotate in pairs; use an even one")
    choice = backends.choose("rope", backend, x.device.type, _unsupported(x), case=case)
    if choice == "reference":
        return rope_reference(x, positions, base=base, scaling=scaling)
    return _rotate(x, _scaled(_frequencies(x, base), scaling).float(), positions, False)


def rope_reference(
    x: Tensor, positions: Tensor, *, base: float = 10000.0, scaling: RopeScaling | None = None
) -> Tensor:
    """Reference of `rope` in plain PyTorch: tests the kernel and runs on CPUs."""
    angle = _angles(x, _scaled(_frequencies(x, base), scaling), positions)
    first, second = x.to(angle.dtype).chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


def _frequencies(x: Tensor, base: float) -> Tensor:
    """Angular frequencies base^(-2j/K), j < K/2, fp64."""
    exponent = torch.arange(x.shape[-1] // 2, dtype=torch.float64, device=x.device) * (-2.0 / x.shape[-1])
    return base**exponent


def _scaled(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:
    """Frequencies after `scaling`."""
    if scaling is None:
        return frequencies
    divided = frequencies / scaling.factor
    if scaling.kind == "linear":
        return divided
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = frequencies * (scaling.original_length / (2 * math.pi))
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return torch.lerp(divided, frequencies, kept)


def cosine_relpe(x: Tensor, positions: Tensor) -> Tensor:
    """Cosine RelPE: y_i = x_i cos(p 10000^(-i/K)), i < K, of each head, one factor of the sum that RoPE expands to.

    Unlike the encodings above it depends on absolute positions: number the tokens of each document from 0.

    Args:
        x: [B, T, H, K].
        positions: [T] or [B, T] token positions, integers.

    Returns:
        [B, T, H, K] in the dtype of `x`. Angles, cosines and products are computed in at least fp32.

    Raises:
        OperandError: tensors with incompatible shapes, dtypes or devices.

    Source: DenseAttention section 3.2, frequencies of the released code.
    """
    _check("cosine_relpe", x, positions)
    exponent = torch.arange(x.shape[-1], dtype=torch.float64, device=x.device) * (-1.0 / x.shape[-1])
    angle = _angles(x, 10000.0**exponent, positions)
    return (x.to(angle.dtype) * angle.cos()).to(x.dtype)


class DocumentSpans(NamedTuple):
    """Index along T of the first and of the last token of each token's document, [B, T] int64."""

    first: Tensor
    last: Tensor


def document_spans(document_ids: Tensor) -> DocumentSpans:
    """Spans of packed documents; in document_ids [B, T] the ids of a document are contiguous. Raises OperandError."""
    check_operands("document_spans", {"document_ids": (document_ids, "BT int")})
    last = document_ids.shape[1] - 1
    return DocumentSpans(_first(document_ids), last - _first(document_ids.flip(1)).flip(1))


def num_tokens_in_documents(document_ids: Tensor, valid: Tensor | None) -> Tensor:
    """Number of valid tokens in each token's document: [B, T] ids and bools (None: all) -> [B, T] int64. Raises
    OperandError."""
    operands = {"document_ids": (document_ids, "BT int"), "valid": (valid, "BT bool")}
    check_operands("num_tokens_in_documents", operands)
    first, last = document_spans(document_ids)
    counted = torch.ones_like(first) if valid is None else valid.to(first.dtype)
    total = counted.cumsum(1)
    return total.gather(1, last) - (total - counted).gather(1, first)


def _check(op: str, x: Tensor, positions: Tensor, **others: tuple[Tensor | None, str]) -> Case:
    places = "T int" if positions.dim() == 1 else "bT int"
    return check_operands(op, {"x": (x, "BTHK"), "positions": (positions, places), **others}, "HK")


def check_pairs(op: str, theta: Tensor, head_dim: int) -> None:
    """Raises OperandError unless theta [H, K/2] has a frequency for each pair of the head's channels."""
    if 2 * theta.shape[1] != head_dim:
        raise OperandError(
            f"{op}: theta has {theta.shape[1]} frequencies per head, for {2 * theta.shape[1]} channels, but the head "
            f"dimension is {head_dim}; they must be equal"
        )


def _first(document_ids: Tensor) -> Tensor:
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    index = torch.arange(document_ids.shape[1], device=document_ids.device)
    return torch.where(starts, index, 0).cummax(1).values


def _angles(x: Tensor, theta: Tensor, positions: Tensor) -> Tensor:
    """Angles p_t theta_hi, [1 or B, T, H, K'], in the compute dtype: bf16 cannot even represent the positions."""
    dtype = compute_dtype(x)
    return positions.to(dtype)[..., None, None] * theta.to(dtype)


def _unsupported(x: Tensor) -> str:
    if x.dtype not in KERNEL_DTYPES:
        return f"dtype {x.dtype}"
    return "an empty tensor" if x.numel() == 0 else ""


@custom_op("rope", lambda x, *_: x.new_empty(x.shape))
def _rotate(x: Tensor, theta: Tensor, positions: Tensor, inverse: bool) -> Tensor:
    from megalin._triton.positions import rope as kernels

    return kernels.rotate(_rows(x), theta, positions.flatten().contiguous(), inverse=inverse).view(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, theta, positions, ctx.inverse = inputs
    ctx.save_for_backward(theta, positions)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
    theta, positions = ctx.saved_tensors
    return _rotate(dy, theta, positions, not ctx.inverse), None, None, None


torch.library.register_autograd(_rotate, _differentiate, setup_context=_save)


def _rows(x: Tensor) -> Tensor:
    """[B, T, H, K] as [B T, H, K] with contiguous rows; a view where the strides allow."""
    batch, length, heads, key = x.shape
    whole = x.stride(3) == 1 and x.stride(2) == key and (batch == 1 or x.stride(0) == length * x.stride(1))
    return x.as_strided((batch * length, heads, key), (x.stride(1), key, 1)) if whole else x.flatten(0, 1).contiguous()


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    x = sample(2, 16, few(case["H"]), case["K"], device=device, dtype=case["x"])
    positions = torch.arange(16, device=device, dtype=case["positions"]) ** 3
    return compare(
        lambda x: _rotate(x, _frequencies(x, 10000.0).float(), positions, False),
        lambda x: rope_reference(x, positions),
        [x],
    )


backends.register("rope", ("triton",), _self_test)
