"""The short convolution of Rodimus and Mamba: depthwise, causal, a few tokens wide, within one document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megalin.errors import OperandError
from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.custom_op import custom_op
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES, compute_dtype
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.dispatch.self_test import bound_of, compare, sample

MAX_TAPS = 8
"""Largest W of the kernels, which keep two windows of W tokens in registers."""


MAX_STEP = 2**24
"""Largest stride between tokens in the kernels, in elements."""


class ShortConvOutput(NamedTuple):
    """Result of a short convolution."""

    output: Tensor
    """[B, T, D] in the dtype of the input."""
    state: Tensor
    """[B, W - 1, D], the last inputs of the last token's document, oldest first, zero before its start; at least
    fp32."""


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    state: Tensor | None = None,
    document_ids: Tensor | None = None,
    activation: Literal["none", "silu"] = "silu",
    backend: Backend = "auto",
) -> ShortConvOutput:
    """y_t = act(bias + sum over j = 0 .. W-1 of weight_j * x_{t-W+1+j}) in each channel.

    Args:
        x: [B, T, D].
        weight: [D, W], the newest input last.
        bias: [D], or None for zero.
        state: [B, W - 1, D], the inputs before the first token, of its document; None for zeros.
        document_ids: [B, T] integers; None if each sequence is one document. Inputs of other documents count as zero.
        activation: after the sum.
        backend: implementation to run; compiled ones take fp32, bf16 and fp16, and 2 to 8 taps.

    Returns:
        ShortConvOutput. Products and the sum are computed in at least fp32; the backward saves only x, and accumulates
        the gradients of weight and bias in fp32, always in the same order.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: mismatched shapes, kinds or devices.

    Source: Mamba; Rodimus section 3.
    """
    operands = {"x": (x, "BTD"), "weight": (weight, "DW"), "bias": (bias, "D"), "state": (state, "BPD")}
    case = check_operands("short_conv", operands | {"document_ids": (document_ids, "BT int")}, "DW")
    case = (*case, ("activation", activation))
    if state is not None and state.shape[1] != weight.shape[1] - 1:
        raise OperandError(
            f"short_conv: state has shape {tuple(state.shape)}; with {weight.shape[1]} taps, give it "
            f"[B, {weight.shape[1] - 1}, D]"
        )
    choice = backends.choose("short_conv", backend, x.device.type, _unsupported(x, weight, bias, state), case=case)
    if choice == "reference":
        return short_conv_reference(x, weight, bias, state=state, document_ids=document_ids, activation=activation)
    return _compiled_conv(x, weight, bias, state, document_ids, activation)


def _compiled_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    document_ids: Tensor | None,
    activation: Literal["none", "silu"],
) -> ShortConvOutput:
    """`short_conv` by the kernels."""
    documents = None if document_ids is None else document_ids.to(torch.int32).contiguous()
    before = None if state is None else state.float().contiguous()
    bias = None if bias is None else bias.contiguous()
    return ShortConvOutput(
        *short_conv_forward(_rows(x), weight.contiguous(), bias, before, documents, activation == "silu")
    )


def short_conv_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    state: Tensor | None = None,
    document_ids: Tensor | None = None,
    activation: Literal["none", "silu"] = "silu",
) -> ShortConvOutput:
    """`short_conv` in plain PyTorch: the reference of the kernels, and the CPU backend."""
    wide, length, past = compute_dtype(x), x.shape[1], weight.shape[1] - 1
    before = x.new_zeros(x.shape[0], past, x.shape[2], dtype=wide) if state is None else state.to(wide)
    inputs = torch.cat([before, x.to(wide)], dim=1)  # [B, W - 1 + T, D]
    taps = [inputs[:, j : j + length] for j in range(past + 1)]
    next_state = inputs[:, length:]
    if document_ids is not None:
        known = torch.cat([document_ids[:, :1].expand(-1, past), document_ids], dim=1)  # [B, W - 1 + T]
        taps = [_hide(tap, known[:, j : j + length] != document_ids) for j, tap in enumerate(taps[:-1])] + taps[-1:]
        next_state = _hide(next_state, known[:, length:] != document_ids[:, -1:])
    wide_weight = weight.to(wide)
    y = taps[0] * wide_weight[:, 0]
    for j in range(1, past + 1):
        y = y + taps[j] * wide_weight[:, j]
    if bias is not None:
        y = y + bias.to(wide)
    if activation == "silu":
        y = functional.silu(y)
    return ShortConvOutput(y.to(x.dtype), next_state.clone())


def short_conv_recurrent(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    state: Tensor | None = None,
    document_ids: Tensor | None = None,
    activation: Literal["none", "silu"] = "silu",
) -> ShortConvOutput:
    """`short_conv` token by token, over a window of W inputs that is cleared at the start of a document."""
    wide, past = compute_dtype(x), weight.shape[1] - 1
    window = x.new_zeros(x.shape[0], past, x.shape[2], dtype=wide) if state is None else state.to(wide)
    outputs = []
    for t in range(x.shape[1]):
        if document_ids is not None and t > 0:
            window = _hide(window, (document_ids[:, t] != document_ids[:, t - 1])[:, None])
        window = torch.cat([window, x[:, t : t + 1].to(wide)], dim=1)  # [B, W, D]
        y = (window * weight.to(wide).T).sum(1)
        y = y if bias is None else y + bias.to(wide)
        outputs.append(functional.silu(y) if activation == "silu" else y)
        window = window[:, 1:]
    return ShortConvOutput(torch.stack(outputs, dim=1).to(x.dtype), window)


def _hide(x: Tensor, hidden: Tensor) -> Tensor:
    """x [B, W, D], zero where hidden [B, W or 1] is true."""
    return x.masked_fill(hidden[..., None], 0.0)


def _unsupported(x: Tensor, weight: Tensor, *others: Tensor | None) -> str:
    for tensor in (x, weight, *others):
        if tensor is not None and tensor.dtype not in KERNEL_DTYPES:
            return f"dtype {tensor.dtype}"
    if not 2 <= weight.shape[1] <= MAX_TAPS:
        return f"{weight.shape[1]} taps, outside 2 to {MAX_TAPS}"
    return "an empty tensor" if x.numel() == 0 else ""


def _rows(x: Tensor) -> Tensor:
    """`x`, or a copy if its last dimension is not contiguous or its tokens are more than MAX_STEP apart: kernels index
    within a tile in 32 bits."""
    return x if x.stride(-1) == 1 and x.stride(1) <= MAX_STEP else x.contiguous()


def _fake_forward(x: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    batch, _, width = x.shape
    return x.new_empty(x.shape), x.new_empty(batch, weight.shape[1] - 1, width, dtype=torch.float32)


@custom_op("short_conv", _fake_forward)
def short_conv_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, document_ids: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    from megalin._triton.scans import short_conv as kernels

    return kernels.forward(x, weight, bias, state, document_ids, silu=silu)


def _fake_backward(
    dy: Tensor, dstate: Any, x: Tensor, weight: Tensor, bias: Any, state: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dinitial = x.new_empty(0, dtype=torch.float32) if state is None else torch.empty_like(state)
    return x.new_empty(x.shape), torch.empty_like(weight), weight.new_empty(x.shape[2]), dinitial


@custom_op("short_conv_backward", _fake_backward)
def _backward(
    dy: Tensor,
    dstate: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    document_ids: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias and the initial state; the last is empty if there is no state."""
    from megalin._triton.scans import short_conv_gradient as kernels

    dstate = None if dstate is None else dstate.contiguous()
    return kernels.backward(_rows(dy), dstate, x, weight, bias, state, document_ids, silu=silu)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, state, document_ids = ctx.saved_tensors
    dy = x.new_zeros(x.shape) if dy is None else dy
    dx, dweight, dbias, dinitial = _backward(dy, dstate, x, weight, bias, state, document_ids, ctx.silu)
    return dx, dweight, None if bias is None else dbias.to(bias.dtype), None if state is None else dinitial, None, None


torch.library.register_autograd(short_conv_forward, _differentiate, setup_context=_save)


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    """Two tiles of tokens, and if the call has documents, starts of them in and before each tile."""
    length, taps = 144, case["W"]
    sizes = {"x": (2, length, case["D"]), "weight": (case["D"], taps), "bias": (case["D"],)}
    sizes["state"] = (2, taps - 1, case["D"])
    given = [name for name in sizes if case[name] is not None]
    inputs = [sample(*sizes[name], device=device, seed=seed, dtype=case[name]) for seed, name in enumerate(given)]
    documents = None
    if (dtype := case["document_ids"]) is not None:
        starts = torch.zeros(2, length, dtype=dtype, device=device)
        starts[0, 2], starts[0, 128], starts[1, 129], starts[1, 130] = 1, 1, 1, 1
        documents = starts.cumsum(1, dtype=dtype)

    def kernel(*x: Tensor) -> ShortConvOutput:
        named = dict(zip(given, x, strict=True))
        state, activation = named.get("state"), case["activation"]
        return _compiled_conv(named["x"], named["weight"], named.get("bias"), state, documents, activation)

    def reference(*x: Tensor) -> ShortConvOutput:
        named = dict(zip(given, x, strict=True))
        state = named.get("state")
        return short_conv_reference(
            named["x"],
            named["weight"],
            named.get("bias"),
            state=state,
            document_ids=documents,
            activation=case["activation"],
        )

    return compare(kernel, reference, inputs, bound=max(bound_of(x.dtype) for x in inputs), differentiable=1)


backends.register("short_conv", ("triton",), _self_test)
