"""The short convolution of one part of a projection: its backward joins the gradients of both parts.

Autograd would concatenate the parts' gradients for the projection's matmul, a pass that reads and writes all of them.
Here the reader of the other part writes its gradient into a tensor of the projection's size (`ProjectionPart`), and the
convolution's backward writes the rest of that tensor, with the other gradients of its input added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.custom_op import custom_op
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.dispatch.projection_part import ProjectionPart, tensor_of
from megalin.ops.dispatch.self_test import bound_of, compare, sample
from megalin.ops.scans.short_conv import MAX_TAPS, short_conv, short_conv_forward

MOST_READERS = 2
"""Largest number of other readers of the convolved part whose gradients the kernel adds."""


class ProjectedConv(NamedTuple):
    """Result of `projected_conv`."""

    output: Tensor
    """[B, T, D], silu of the convolution."""
    inputs: tuple[Tensor, ...]
    """The convolved part [B, T, D] once for each other reader, which must read it through this alone."""
    other: Tensor | ProjectionPart
    """The part [B, T, D] that is not convolved."""


def projected_conv(
    projection: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    part: int,
    readers: int = 0,
    document_ids: Tensor | None = None,
    backend: Backend = "auto",
) -> ProjectedConv:
    """`short_conv` of one of the two parts of a projection, from zeros before the first token, with silu.

    The only reader of the projection. The backward passes on one gradient of both parts, to which no pass but that of
    the convolution and that of the other part's reader has contributed.

    Args:
        projection: [B, T, 2 D].
        weight: [D, W], the newest input last.
        bias: [D].
        part: 0 to convolve the first D channels, 1 for the others.
        readers: number of other readers of the convolved part, 0 to 2; their gradients are summed in fp32.
        document_ids: [B, T] integers; None if each sequence is one document.
        backend: as in `short_conv`.

    Returns:
        ProjectedConv, in the dtype of the projection.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: mismatched shapes, kinds or devices.
    """
    assert part in (0, 1), part
    assert 0 <= readers <= MOST_READERS, readers
    parts = projection.unflatten(-1, (2, -1))  # [B, T, 2, D]
    operands = {"projection": (parts, "BTPD"), "weight": (weight, "DW"), "bias": (bias, "D")}
    case = check_operands("projected_conv", operands | {"document_ids": (document_ids, "BT int")}, "DW")
    case = (*case, ("readers", readers))
    reason = _unsupported(projection, weight, bias)
    if backends.choose("projected_conv", backend, projection.device.type, reason, case=case) == "reference":
        # Autograd concatenates; the convolution alone may have a kernel.
        return _split(parts, weight, bias, document_ids, part, readers, backend)
    return _compiled(parts, weight, bias, document_ids, part, readers)


def projected_conv_reference(
    parts: Tensor, weight: Tensor, bias: Tensor, *, part: int, readers: int, document_ids: Tensor | None = None
) -> ProjectedConv:
    """Reference of `projected_conv` in plain PyTorch, of the projection as [B, T, 2, D]."""
    return _split(parts, weight, bias, document_ids, part, readers, "reference")


def _split(
    parts: Tensor,
    weight: Tensor,
    bias: Tensor,
    document_ids: Tensor | None,
    part: int,
    readers: int,
    backend: Backend,
) -> ProjectedConv:
    x, other = parts.unbind(-2)[:: -1 if part else 1]
    conv = short_conv(x, weight, bias, document_ids=document_ids, backend=backend)
    return ProjectedConv(conv.output, (x,) * readers, other)


def _compiled(
    parts: Tensor, weight: Tensor, bias: Tensor, document_ids: Tensor | None, part: int, readers: int
) -> ProjectedConv:
    """`projected_conv` by the kernels."""
    documents = None if document_ids is None else document_ids.to(torch.int32).contiguous()
    weight, bias = weight.contiguous(), bias.contiguous()
    y, whole, *inputs = _Projected.apply(parts.contiguous(), weight, bias, documents, part, readers)
    return ProjectedConv(y, tuple(inputs), ProjectionPart(whole, 1 - part))


def _unsupported(projection: Tensor, weight: Tensor, bias: Tensor) -> str:
    for tensor in (projection, weight, bias):
        if tensor.dtype not in KERNEL_DTYPES:
            return f"dtype {tensor.dtype}"
    if not 2 <= weight.shape[1] <= MAX_TAPS:
        return f"{weight.shape[1]} taps, outside 2 to {MAX_TAPS}"
    return "an empty tensor" if projection.numel() == 0 else ""


class _Projected(torch.autograd.Function):
    """Autograd function around the custom ops, as only it can return the parts as views."""

    @staticmethod
    def forward(
        ctx: Any, parts: Tensor, weight: Tensor, bias: Tensor, documents: Tensor | None, part: int, readers: int
    ) -> tuple[Tensor, ...]:
        ctx.part = part
        ctx.save_for_backward(parts, weight, bias, documents)
        y, _ = short_conv_forward(parts.select(2, part), weight, bias, None, documents, True)
        return y, parts.view(parts.shape), *(parts.select(2, part) for _ in range(readers))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dy, joined, *addends = gradients
        # The other part's gradient is in place: `ProjectionPart` readers return memory of their own.
        dweight, dbias = _backward(joined, dy, addends, *ctx.saved_tensors, ctx.part)
        return joined, dweight, dbias, None, None, None


def _fake_backward(
    _joined: Tensor, _dy: Tensor, _addends: Any, _parts: Tensor, weight: Tensor, bias: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weight), torch.empty_like(bias)


@custom_op("projected_conv_backward", _fake_backward, mutates=("joined",))
def _backward(
    joined: Tensor,
    dy: Tensor,
    addends: list[Tensor],
    parts: Tensor,
    weight: Tensor,
    bias: Tensor,
    documents: Tensor | None,
    part: int,
) -> tuple[Tensor, Tensor]:
    """Writes the gradient of the convolved part into `joined` [B, T, 2, D]; returns those of weight and bias."""
    from megalin._triton.scans import short_conv_gradient as kernels

    _, dweight, dbias, _ = kernels.backward(
        dy.contiguous(),
        None,
        parts.select(2, part),
        weight,
        bias,
        None,
        documents,
        silu=True,
        into=joined.select(2, part),
        addends=[addend.contiguous() for addend in addends],
    )
    return dweight, dbias.to(bias.dtype)


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    """Two tiles of tokens, and if the call has documents, starts of them in and before each tile."""
    length, width = 144, case["D"]
    sizes = {"projection": (2, length, 2, width), "weight": (width, case["W"]), "bias": (width,)}
    inputs = [
        sample(*size, device=device, seed=seed, dtype=case[name]) for seed, (name, size) in enumerate(sizes.items())
    ]
    documents = None
    if (dtype := case["document_ids"]) is not None:
        starts = torch.zeros(2, length, dtype=dtype, device=device)
        starts[0, 2], starts[0, 128], starts[1, 129], starts[1, 130] = 1, 1, 1, 1
        documents = starts.cumsum(1, dtype=dtype)

    def kernel(parts: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        return _flat(_compiled(parts, weight, bias, documents, 0, case["readers"]))

    def reference(parts: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        given = {"part": 0, "readers": case["readers"], "document_ids": documents}
        return _flat(projected_conv_reference(parts, weight, bias, **given))

    return compare(kernel, reference, inputs, bound=max(bound_of(x.dtype) for x in inputs))


def _flat(result: ProjectedConv) -> list[Tensor]:
    """The outputs, the input of all readers scaled, so that its gradients differ."""
    scaled = [x * (2.0 + reader) for reader, x in enumerate(result.inputs)]
    return [result.output, tensor_of(result.other) * 1.0, *scaled]


backends.register("projected_conv", ("triton",), _self_test)
