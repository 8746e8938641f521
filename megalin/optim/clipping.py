"""Clipping by the global gradient norm, with each element counted once over every mesh axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalin.parallel.collectives import Axis, all_reduce
from megalin.parallel.heartbeats import current
from megalin.parallel.tensor_parallel import local


class GradientNorms(NamedTuple):
    """L2 norms of gradients before clipping, in their dtype and on their device."""

    global_norm: Tensor
    """[], of all global gradients; equal on every rank."""
    local_norms: Tensor
    """[P], of this rank's shard of each gradient, in the order of the parameters that have one."""
    scale: Tensor | None = None
    """[], the factor that the update must apply to the gradients; None: none, they were scaled in place."""


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float | None,
    *,
    counted_elsewhere: Collection[nn.Parameter] = (),
    stages: Axis | None = None,
    loss_scale: Tensor | None = None,
    in_place: bool = True,
    global_norm: Tensor | None = None,
) -> GradientNorms:
    """Scales the gradients in place by min(1, max_norm / (norm + 1e-6)); returns the norms before that.

    norm = sqrt(sum of g^2 over the elements of all global gradients): shards add up over a sharded axis, replicas on a
    replicated axis count once. Gradients are plain tensors or DTensors without partial placements, in fp32 (fp64 in
    verification), or not `in_place` in fp32, bf16 and fp16. Every rank of the mesh calls this with the same parameters;
    one without a gradient has none on any rank. A non-finite norm is returned unchanged, for the caller to raise.

    Args:
        max_norm: None measures without scaling.
        counted_elsewhere: parameters that another pipeline stage holds too and counts.
        stages: the pipeline axis, over whose ranks the model's parameters are distributed.
        loss_scale: [], the factor of the gradients in float16: both norms and gradients are divided by it.
        in_place: False leaves the gradients as they are and returns the factor, for an update that applies it.
        global_norm: [], of the gradients as they are, if it is known; None: it is computed.
    """
    copies = {id(parameter) for parameter in counted_elsewhere}
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in with_gradient if parameter.grad is not None]
    dtypes = {gradient.dtype for gradient in gradients}
    wide = dtypes in ({torch.float32}, {torch.float64})
    assert wide or not (in_place or torch.float64 in dtypes), f"gradients of {dtypes}, not all fp32 or all fp64"
    # Plain local tensors from here on: DTensor's own dispatch takes seconds on the first call and warns about each
    # reduction over two axes.
    local_gradients = [local(gradient) for gradient in gradients]
    local_norms = torch.stack(_norms(local_gradients))
    if loss_scale is not None:
        local_norms = local_norms / loss_scale
    if global_norm is None:
        square = _sum_of_squares(gradients, local_norms, [id(parameter) not in copies for parameter in with_gradient])
        norm = (square if stages is None else all_reduce(square, stages)).sqrt()
    else:
        norm = global_norm if loss_scale is None else global_norm / loss_scale
    scale = None if loss_scale is None else loss_scale.reciprocal()
    if max_norm is not None:
        # A NaN norm would make every gradient NaN and hide the parameter at fault: it scales nothing.
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).nan_to_num(nan=1.0)
        scale = scale if loss_scale is None else scale / loss_scale
    if scale is None or not in_place:
        return GradientNorms(norm, local_norms, scale)
    torch._foreach_mul_(local_gradients, scale)
    return GradientNorms(norm, local_norms)


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    """The L2 norm [] of each gradient in fp32, or in fp64. One call for each dtype: with several in a call,
    torch._foreach_norm would launch a kernel for each gradient."""
    found: dict[int, Tensor] = {}
    for dtype in sorted({gradient.dtype for gradient in gradients}, key=str):
        indices = [index for index, gradient in enumerate(gradients) if gradient.dtype == dtype]
        own = [gradients[index] for index in indices]
        norms = torch._foreach_norm(own, 2, torch.promote_types(dtype, torch.float32))
        found |= dict(zip(indices, norms, strict=True))
    return [found[index] for index in range(len(gradients))]


def _sum_of_squares(gradients: list[Tensor], local_norms: Tensor, counted: list[bool]) -> Tensor:
    """Sum of g^2 [] over all counted global gradients, from the norms of this rank's shards: one scalar all-reduce for
    each axis of several ranks in each set of sharded axes."""
    by_axes: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    groups: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}
    for index, gradient in enumerate(gradients):
        if not counted[index]:
            continue
        # By axis number: equal meshes may have different process groups.
        axes = _sharded_axes(gradient)
        by_axes[axes].append(index)
        if isinstance(gradient, DTensor) and axes not in groups:
            mesh = gradient.device_mesh
            groups[axes] = [mesh.get_group(axis) for axis in axes if mesh.size(axis) > 1]
    total = local_norms.new_zeros(())
    norms = local_norms.unbind()
    # In the order of the parameters, which is the same on every rank.
    for axes, indices in by_axes.items():
        square = torch.linalg.vector_norm(torch.stack([norms[index] for index in indices])).square()
        for group in groups.get(axes, []):
            with current().waiting("all_reduce of a norm", "shard"), current().measure_wait():
                dist.all_reduce(square, group=group)
        total = total + square
    return total


def _sharded_axes(gradient: Tensor) -> tuple[int, ...]:
    """The mesh axes over which `gradient` is sharded."""
    if not isinstance(gradient, DTensor):
        return ()
    placements = gradient.placements
    assert not any(placement.is_partial() for placement in placements), f"unreduced gradient: {placements}"
    return tuple(axis for axis, placement in enumerate(placements) if not placement.is_replicate())
