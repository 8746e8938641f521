"""The global gradient norm, each element counted once over every mesh axis, and clipping to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalin.parallel.collectives import Axis, all_reduce


class GradientNorms(NamedTuple):
    """L2 norms of gradients before clipping, of their dtype and on their device."""

    whole: Tensor
    """[], of all global gradients; equal on every rank."""
    parts: Tensor
    """[P], of what this rank holds of each parameter's gradient, in the order of the parameters that have one."""


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float | None,
    *,
    counted_elsewhere: Collection[nn.Parameter] = (),
    stages: Axis | None = None,
) -> GradientNorms:
    """Scales the gradients in place by min(1, max_norm / (norm + 1e-6)); returns the norms before that.

    norm = sqrt(sum of g^2 over the elements of all global gradients): slices on a sharded axis add up, copies on a
    replicated axis count once. Gradients are fp32 (fp64 in verification), plain tensors or DTensors without partial
    placements. Every rank of the mesh calls this with the same parameters; one without a gradient has none on any.
    A norm that is not finite is returned as it is, for the caller to stop on.

    Args:
        max_norm: None only measures.
        counted_elsewhere: parameters that another stage of a pipeline holds and counts too.
        stages: the pipeline axis, over whose ranks the parameters of the model are spread.
    """
    copies = {id(parameter) for parameter in counted_elsewhere}
    given = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in given if parameter.grad is not None]
    dtypes = {gradient.dtype for gradient in gradients}
    assert dtypes in ({torch.float32}, {torch.float64}), f"gradients of {dtypes}, want one of fp32, fp64"
    # Plain local tensors from here on: DTensor's own dispatch takes seconds on the first call and warns about each
    # reduction over two axes.
    local_gradients = [_local(gradient) for gradient in gradients]
    parts = torch.stack(torch._foreach_norm(local_gradients))
    square = _sum_of_squares(gradients, parts, [id(parameter) not in copies for parameter in given])
    norm = (square if stages is None else all_reduce(square, stages)).sqrt()
    if max_norm is not None:
        # A norm that is NaN would spoil every gradient, and with that who reports it: it scales nothing.
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).nan_to_num(nan=1.0)
        torch._foreach_mul_(local_gradients, scale)
    return GradientNorms(norm, parts)


def _sum_of_squares(gradients: list[Tensor], parts: Tensor, counted: list[bool]) -> Tensor:
    """Sum of g^2 over all global gradients that are counted, of the norms of what this rank holds of each: [], one
    scalar all-reduce for each set of sharded axes and axis in it."""
    by_axes: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    groups: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}
    for index, gradient in enumerate(gradients):
        if not counted[index]:
            continue
        # By number: meshes that are equal may have process groups of their own.
        axes = _sharded_axes(gradient)
        by_axes[axes].append(index)
        if isinstance(gradient, DTensor) and axes not in groups:
            groups[axes] = [gradient.device_mesh.get_group(axis) for axis in axes]
    total = parts.new_zeros(())
    norms = parts.unbind()
    # In the order of the parameters, which is that of every rank.
    for axes, indices in by_axes.items():
        square = torch.linalg.vector_norm(torch.stack([norms[index] for index in indices])).square()
        for group in groups.get(axes, []):
            dist.all_reduce(square, group=group)
        total = total + square
    return total


def _sharded_axes(gradient: Tensor) -> tuple[int, ...]:
    """The mesh axes over which the elements of `gradient` are spread."""
    if not isinstance(gradient, DTensor):
        return ()
    placements = gradient.placements
    assert not any(placement.is_partial() for placement in placements), f"unreduced gradient: {placements}"
    return tuple(axis for axis, placement in enumerate(placements) if not placement.is_replicate())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
