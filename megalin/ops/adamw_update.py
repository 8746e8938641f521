"""AdamW's update of many weights: scales the gradient, updates weight and moments, and writes a copy of the weight.

    g' = scale g                       m' = b1 m + (1 - b1) g'            v' = b2 v + (1 - b2) g'^2
    w' = w - lr wd w - lr / (1 - b1^t) m' / (sqrt(v') / sqrt(1 - b2^t) + eps)

Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2, with the step count t of each weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES
from megalin.ops.dispatch.operands import Case
from megalin.ops.dispatch.self_test import sample

OP = "adamw_update"
_BOUND = 1e-6
"""Largest relative error of the self-test: above fp32 rounding, far below another update rule."""
_BUFFERS = 4
"""Copies of a table under way at most: the host launches few steps ahead of the device."""


class UpdateTensors(NamedTuple):
    """Tensors of the weights to update, in one order: contiguous, of one shape for each weight."""

    weights: list[Tensor]
    gradients: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    """[] each, the number of updates, this one included."""
    copies: list[Tensor | None]
    """Copies of the updated weights, all in one dtype; None: no copy."""


class AdamWOptions(NamedTuple):
    """Hyperparameters of an update."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class UpdateTables:
    """Tables of the kernel's launches on the device, which are copied there again only where an address has changed,
    from pinned buffers that are used in turn: neither a copy nor an allocation makes the host wait for the device."""

    def __init__(self) -> None:
        self._tables: dict[tuple[object, ...], tuple[object, Tensor]] = {}
        self._buffers: dict[torch.Size, list[tuple[Tensor, torch.cuda.Event]]] = {}

    def find(
        self, key: tuple[object, ...], source: object, build: Callable[[], Tensor], device: torch.device
    ) -> Tensor:
        """`build()` on the device, from an earlier call with the same key if its source was equal."""
        known = self._tables.get(key)
        if known is None or known[0] != source:
            table = build()
            known = self._tables[key] = source, self._copy(table, device) if device.type == "cuda" else table
        return known[1]

    def _copy(self, table: Tensor, device: torch.device) -> Tensor:
        buffers = self._buffers.setdefault(table.shape, [])
        if len(buffers) < _BUFFERS:
            pinned, copied = torch.empty_like(table, pin_memory=True), torch.cuda.Event()
        else:
            pinned, copied = buffers.pop(0)
            copied.synchronize()
        pinned.copy_(table)
        result = pinned.to(device, non_blocking=True)
        copied.record()
        buffers.append((pinned, copied))
        return result


def choose_update(weights: Sequence[Tensor], compute_dtype: torch.dtype, backend: Backend = "auto") -> str:
    """Chooses the backend of the updates of these weights: "triton" or "reference", torch's own AdamW.

    Args:
        weights: plain tensors of one device; the kernel takes fp32 alone.
        compute_dtype: dtype of gradients and copies, as far as they are not fp32.

    Raises:
        KernelError: an explicit backend, or one that MEGALIN_KERNELS requests, that cannot run.
    """
    dtypes = {weight.dtype for weight in weights}
    unsupported = "" if dtypes == {torch.float32} else f"weights of {', '.join(sorted(map(str, dtypes))) or 'no'} dtype"
    if not unsupported and compute_dtype not in KERNEL_DTYPES:
        unsupported = f"dtype {compute_dtype}"
    case: Case = (("compute", compute_dtype),)
    return backends.choose(OP, backend, weights[0].device.type if weights else "cpu", unsupported, case=case)


@torch.no_grad()
def adamw_update(
    tensors: UpdateTensors, *, scale: Tensor, skip: Tensor, options: AdamWOptions, tables: UpdateTables
) -> None:
    """Updates weights, moments and copies in place by the kernel, with one launch for each dtype of gradients.

    In fp32, with the operations of torch's fused AdamW on CUDA in their order.

    Args:
        tensors: fp32 weights and moments; gradients and copies in fp32, bf16 or fp16.
        scale: [] fp32, the factor of the gradients; the product is rounded to fp32.
        skip: [] fp32; where it is not 0, nothing is written.
        tables: of the same caller in every step.
    """
    for dtype in sorted({gradient.dtype for gradient in tensors.gradients}, key=str):
        of_dtype = [index for index, gradient in enumerate(tensors.gradients) if gradient.dtype == dtype]
        own = UpdateTensors(*([values[index] for index in of_dtype] for values in tensors))  # type: ignore[arg-type]
        _launch(own, scale, skip, options, tables)


def _launch(tensors: UpdateTensors, scale: Tensor, skip: Tensor, options: AdamWOptions, tables: UpdateTables) -> None:
    """One launch for gradients of one dtype."""
    from megalin._triton import adamw_update as kernels

    weights, gradients, means, squares, steps, copies = tensors
    assert all(x.is_contiguous() for x in (*weights, *gradients, *means, *squares)), [x.stride() for x in gradients]
    device, sizes = weights[0].device, [weight.numel() for weight in weights]
    if not any(sizes):
        return
    addresses = [[x.data_ptr() for x in each] for each in (weights, means, squares, steps)]
    addresses.append([0 if copy is None else copy.data_ptr() for copy in copies])
    addresses.append([gradient.data_ptr() for gradient in gradients])
    dtype = gradients[0].dtype
    kernels.update(
        tables.find(("addresses", dtype), addresses, lambda: torch.tensor([*addresses, sizes]), device),
        tables.find(("chunks", dtype), sizes, lambda: _chunks(sizes, kernels.CHUNK), device),
        options,
        scale,
        skip,
        weights[0],
        gradients[0],
        next((copy for copy in copies if copy is not None), weights[0]),
    )


def _chunks(sizes: Sequence[int], size: int) -> Tensor:
    """[programs, 2] int32, the weight of each program and the number of its chunk of `size` elements."""
    counts = torch.tensor([-(-elements // size) for elements in sizes])
    index = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    first = torch.cat([torch.arange(count) for count in counts.tolist()])
    return torch.stack([index, first], dim=1).int()


@torch.no_grad()
def adamw_update_reference(tensors: UpdateTensors, *, scale: Tensor, skip: Tensor, options: AdamWOptions) -> None:
    """The equations of the module, in the dtype of the weights; arguments as in `adamw_update`."""
    lr, beta1, beta2, eps, weight_decay = options
    for weight, gradient, mean, square, step, copy in zip(*tensors, strict=True):
        g = gradient.to(weight.dtype) * scale.to(weight.dtype)
        t = step.double()
        new_mean, new_square = beta1 * mean + (1 - beta1) * g, beta2 * square + (1 - beta2) * g.square()
        step_size = (lr / (1 - beta1**t)).to(weight.dtype)
        root = new_square.sqrt() / (1 - beta2**t).sqrt().to(weight.dtype)
        new_weight = weight - lr * weight_decay * weight - step_size * new_mean / (root + eps)
        for old, new in ((weight, new_weight), (mean, new_mean), (square, new_square)):
            old.copy_(torch.where(skip == 0, new, old))
        if copy is not None:
            copy.copy_(torch.where(skip == 0, weight.to(copy.dtype), copy))


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    """Weights, moments and copies after two updates, of fp32 gradients and of others, and a skipped one, against the
    reference in fp64: a weight of more than a program's elements, a few elements, and gradients at an odd address."""
    assert backend == "triton", backend
    dtype, tables = case["compute"], UpdateTables()
    start = [sample(*shape, device=device, seed=seed) for seed, shape in enumerate(((5, 3300), (3,), (33, 7)))]
    weights, means, squares = start, [0.1 * x for x in start], [0.01 * x.square() for x in start]
    steps = [torch.full((), 3.0, device=device) for _ in start]
    copies: list[Tensor | None] = [weights[0].to(dtype), None, weights[2].to(dtype)]
    scale, options = torch.tensor(0.3, device=device), AdamWOptions(0.01, 0.9, 0.95, 1e-8, 0.1)
    states = (weights, means, squares)
    truths: list[list[Tensor]] = [[x.double() for x in each] for each in states]
    for number, skipped in enumerate((0.0, 1.0, 0.0)):
        kind = torch.float32 if number == 0 else dtype
        gradients = [sample(x.numel() + 1, device=device, seed=3 + number, dtype=kind)[1:].view_as(x) for x in start]
        gradients[0], skip = gradients[0].clone(), torch.tensor(skipped, device=device)
        for step in steps:
            step.add_(1 - skip)
        own = UpdateTensors(weights, gradients, means, squares, steps, copies)
        adamw_update(own, scale=scale, skip=skip, options=options, tables=tables)
        exact = UpdateTensors(truths[0], gradients, truths[1], truths[2], steps, [None] * len(start))
        adamw_update_reference(exact, scale=scale, skip=skip, options=options)
        for name, found, expected in zip(("weight", "first moment", "second moment"), states, truths, strict=True):
            for x, truth in zip(found, expected, strict=True):
                if not (error := float((x - truth).norm() / truth.norm())) <= _BOUND:
                    return f"self-test: the {name} is off by {error:.1e} (bound {_BOUND:.0e})"
        for x, copy in zip(weights, copies, strict=True):
            if copy is not None and not torch.equal(copy, x.to(dtype)):
                return "self-test: a copy is not the rounded weight"
    return ""


backends.register(OP, ("triton",), _self_test)
