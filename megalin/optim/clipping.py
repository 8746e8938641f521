"""The global gradient norm, each element counted once over every mesh axis, and clipping to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megalin.parallel.collectives import Axis, all_reduce


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float | None,
    *,
    counted_elsewhere: Collection[nn.Parameter] = (),
    stages: Axis | None = None,
) -> torch.Tensor:
    """Scales the gradients in place by min(1, max_norm / (norm + 1e-6)); returns the norm before that.

    norm = sqrt(sum of g^2 over the elements of all global gradients): slices on a sharded axis add up, copies on a
    replicated axis count once. Gradients are fp32 (fp64 in verification), plain tensors or DTensors without partial
    placements. Every rank of the mesh calls this with the same parameters; one without a gradient has none on any.
    A norm that is not finite is returned as it is, for the caller to stop on.

    Args:
        max_norm: None only measures.
        counted_elsewhere: parameters that another stage of a pipeline holds and counts too.
        stages: the pipeline axis, over whose ranks the parameters of the model are spread.

    Returns:
        A plain 0-dim tensor of the gradients' dtype on their device, equal on every rank.
    """
    copies = {id(parameter) for parameter in counted_elsewhere}
    given = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in given if parameter.grad is not None]
    dtypes = {gradient.dtype for gradient in gradients}
    assert dtypes in ({torch.float32}, {torch.float64}), f"gradients of {dtypes}, want one of fp32, fp64"
    # Plain local tensors from here on: DTensor's own dispatch takes seconds on the first call and warns about each
    # reduction over two axes.
    counted = [gradient for parameter, gradient in zip(given, gradients, strict=True) if id(parameter) not in copies]
    square = _sum_of_squares(counted)
    norm = (square if stages is None else all_reduce(square, stages)).sqrt()
    if max_norm is not None:
        # A norm that is NaN would spoil every gradient, and with that who reports it: it scales nothing.
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).nan_to_num(nan=1.0)
        torch._foreach_mul_([_local(gradient) for gradient in gradients], scale)
    return norm


def _sum_of_squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Sum of g^2 over all global gradients: [], one scalar all-reduce for each set of sharded axes and axis in it."""
    by_axes: defaultdict[tuple[int, ...], list[torch.Tensor]] = defaultdict(list)
    groups: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}
    for gradient in gradients:
        # By number: meshes that are equal may have process groups of their own.
        axes = _sharded_axes(gradient)
        by_axes[axes].append(_local(gradient))
        if isinstance(gradient, DTensor) and axes not in groups:
            groups[axes] = [gradient.device_mesh.get_group(axis) for axis in axes]
    total = torch.zeros((), dtype=gradients[0].dtype, device=_local(gradients[0]).device)
    # In the order of the parameters, which is that of every rank.
    for axes, local_gradients in by_axes.items():
        square = torch.nn.utils.get_total_norm(local_gradients).square()
        for group in groups.get(axes, []):
            dist.all_reduce(square, group=group)
        total = total + square
    return total


def _sharded_axes(gradient: torch.Tensor) -> tuple[int, ...]:
    """The mesh axes over which the elements of `gradient` are spread."""
    if not isinstance(gradient, DTensor):
        return ()
    placements = gradient.placements
    assert not any(placement.is_partial() for placement in placements), f"unreduced gradient: {placements}"
    return tuple(axis for axis, placement in enumerate(placements) if not placement.is_replicate())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
