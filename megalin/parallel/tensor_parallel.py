"""Tensor parallelism as layers use it: conjugate collectives around sharded matmuls, and sharded parameters.

A layer writes `leave(f(enter(x)))`. Without sequence parallelism these are Megatron's f (identity forward, all-reduce
backward) and g (all-reduce forward, identity backward). With it the residual stream is [B, T/tp, D], `enter`
all-gathers along T and `leave` reduce-scatters along T. A layer is written once for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megalin.errors import ConfigError
from megalin.ops.decoding.few_rows import few_row_linear
from megalin.parallel.async_tensor_parallel import AsyncTPBuffers, all_gather_matmul, matmul_reduce_scatter
from megalin.parallel.collectives import (
    Axis,
    all_reduce,
    copy_to_axis,
    covering_axes,
    gather_from_axis,
    local_slice,
    reduce_from_axis,
    reduce_scatter_to_axis,
    wait_tensor,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

TOKENS = 1
"""The dimension of [B, T, ...] along which context and sequence parallelism shard."""
_MOST_RANKS = 64
"""The largest axis that an error proposes."""


class TensorParallel:
    """The tensor-parallel axis: its size, its collectives, and the parameters that it shards.

    Args:
        axis: this rank's view of the axis; the default has size 1.
        device_mesh: one-dimensional mesh of the axis. Without one, parameters are plain and unsharded: for one
            process, or, at a larger size, to check on the meta device that a model fits the axis.
        sequence_parallel: whether the residual stream is sharded along T inside the axis.
        buffers: those of async tensor parallelism, which overlaps the collectives around matmuls with them; None
            without it. Needs `sequence_parallel`.
    """

    def __init__(
        self,
        axis: Axis | None = None,
        *,
        device_mesh: DeviceMesh | None = None,
        sequence_parallel: bool = False,
        buffers: AsyncTPBuffers | None = None,
    ) -> None:
        self.axis = Axis("tp") if axis is None else axis
        self.device_mesh = device_mesh
        self.sequence_parallel = sequence_parallel and self.axis.size > 1
        self.buffers = buffers
        assert buffers is None or self.sequence_parallel

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return self.axis.size

    def divide(self, total: int, what: str) -> int:
        """total / tp, the size of this rank's shard of `what`. Raises ConfigError where it does not divide."""
        if total % self.size:
            raise ConfigError(_indivisible([(total, what)], self.size, common=total))
        return total // self.size

    def enter(self, x: Tensor) -> Tensor:
        """The residual stream as the input of sharded weights: [B, T or T/tp, D] -> [B, T, D].

        f: identity forward, all-reduce backward. With sequence parallelism: all-gather along T forward, reduce-scatter
        backward.
        """
        if self.sequence_parallel:
            return gather_from_axis(x, self.axis, dim=TOKENS)
        return copy_to_axis(x, self.axis)

    def leave(self, x: Tensor) -> Tensor:
        """Sums the ranks' partial results into the residual stream: [B, T, D] -> [B, T or T/tp, D].

        g: all-reduce forward, identity backward. With sequence parallelism: reduce-scatter along T forward, all-gather
        backward.
        """
        if self.sequence_parallel:
            return reduce_scatter_to_axis(x, self.axis, dim=TOKENS)
        return reduce_from_axis(x, self.axis)

    def all_gather_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`enter`, then a column-parallel matmul that is the only reader of the residual stream.

        x [B, T or T/tp, D], weight [N/tp, D], bias [N/tp] -> x W^T + b [B, T, N/tp]. Backward as `enter` has it. Async
        tensor parallelism overlaps the all-gather with the matmul.
        """
        if self.buffers is None:
            return few_row_linear(self.enter(x), weight, bias)
        y = all_gather_matmul(x, weight, self.buffers)
        return y if bias is None else y + bias

    def linear_reduce_scatter(self, x: Tensor, weight: Tensor) -> Tensor:
        """A row-parallel matmul, then `leave`: x [B, T, K/tp], weight [D, K/tp] -> x W^T [B, T or T/tp, D].

        Backward as `leave` has it. Async tensor parallelism overlaps the reduce-scatter with the matmul.
        """
        if self.buffers is None:
            return self.leave(few_row_linear(x, weight))
        return matmul_reduce_scatter(x, weight, self.buffers)

    def reduce_tokens(self, x: Tensor) -> Tensor:
        """`leave` for one number a token: [B, T] -> [B, T or T/tp], summed over the axis."""
        return self.leave(x)

    def all_reduce_both(self, x: Tensor) -> Tensor:
        """Sums partial results whose sum every rank uses on its own shard: all-reduce forward, all-reduce backward."""
        return copy_to_axis(reduce_from_axis(x, self.axis), self.axis)

    def all_gather_last_dim(self, x: Tensor) -> Tensor:
        """Concatenates the ranks' shards of the last dimension, for use on every shard: all-gather forward,
        reduce-scatter backward."""
        return gather_from_axis(x, self.axis, dim=x.dim() - 1)

    def all_reduce_forward(self, x: Tensor) -> Tensor:
        """Sums partial results for work that every rank repeats: all-reduce forward, identity backward.

        Each rank then has the full gradient already. A result of that work that meets sharded data again passes
        `all_reduce_gradient`.
        """
        return reduce_from_axis(x, self.axis)

    def all_reduce_gradient(self, weight: Tensor) -> Tensor:
        """A replicated tensor that meets sharded data, so its gradient is a partial sum: identity forward, all-reduce
        backward."""
        return copy_to_axis(weight, self.axis)

    def max_over_shards(self, x: Tensor) -> Tensor:
        """Element-wise maximum over the axis, on every rank, of values of sharded rows. Not differentiable."""
        return wait_tensor(all_reduce(x, self.axis, operation="max"))

    def sequence_parallel_weight(self, weight: Tensor) -> Tensor:
        """A replicated weight of the residual stream: identity forward; backward all-reduce with sequence parallelism,
        where each rank's gradient is that of its own tokens, identity without it."""
        return copy_to_axis(weight, self.axis) if self.sequence_parallel else weight

    def local_slice(self, x: Tensor, *, dim: int) -> Tensor:
        """This rank's shard along `dim` of a tensor that every rank holds in full, a view."""
        return local_slice(x, self.axis, dim=dim)

    def without_sequence_parallel(self) -> TensorParallel:
        """The same axis for work after `pick_tokens`, whose results every rank holds in full."""
        return type(self)(self.axis, device_mesh=self.device_mesh)

    def pick_tokens(self, x: Tensor, index: Tensor) -> Tensor:
        """Selected tokens of the residual stream, for work that every rank repeats.

        x [B, T or T/tp, D] at the positions index [B, P] -> [B, P, D]. With sequence parallelism each rank contributes
        its own tokens to one all-reduce; backward, each rank takes the gradient of its own tokens.
        """
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        if not self.sequence_parallel:
            return x[rows, index]
        index = index - self.axis.rank * x.shape[TOKENS]
        absent = (index < 0) | (index >= x.shape[TOKENS])
        return self.all_reduce_forward(x[rows, index.masked_fill(absent, 0)].masked_fill(absent[..., None], 0.0))

    def weighted_token_sum(self, x: Tensor, weight: Tensor) -> Tensor:
        """sum_t weight[b, t] x[b, t] for work that every rank repeats: x [B, T or T/tp, D], weight [B, T] without a
        gradient -> [B, D]."""
        if not self.sequence_parallel:
            return (x * weight[..., None]).sum(TOKENS)
        return self.all_reduce_forward((x * self.local_slice(weight, dim=TOKENS)[..., None]).sum(TOKENS))

    def parameter(self, *shape: int, shard_dim: int | None) -> nn.Parameter:
        """An fp32 meta parameter of global `shape`, sharded along `shard_dim`, or replicated where it is None."""
        if self.device_mesh is None:
            return nn.Parameter(torch.empty(shape, dtype=torch.float32, device="meta"))
        return _as_parameter(_meta_dtensor(shape, shard_dim, self.device_mesh))

    def fused_parameter(self, parts: int, out: int, inner: int) -> nn.Parameter:
        """`parts` matrices [out, inner] as one parameter [parts, out, inner], each sharded along its outputs."""
        return self.parameter(parts, out, inner, shard_dim=1)


class DividedSizes(TensorParallel):
    """An axis of one rank that records the sizes that layers divide by it, to find the axis sizes that fit them all."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, str]] = []

    def divide(self, total: int, what: str) -> int:
        """Records `total` and returns it."""
        self.sizes.append((total, what))
        return total

    def without_sequence_parallel(self) -> TensorParallel:
        """This axis, so that sizes divided there are recorded as well."""
        return self

    def check(self, size: int) -> None:
        """Raises ConfigError, naming the sizes that `size` ranks do not divide and the numbers of ranks that fit."""
        common = math.gcd(*(total for total, _ in self.sizes))
        fields: dict[tuple[int, str], str] = {}  # the first of equal fields, which most layers have
        for total, what in self.sizes:
            if total % size:
                fields.setdefault((total, what.rpartition(".")[2]), what)
        if fields:
            raise ConfigError(_indivisible([(total, what) for (total, _), what in fields.items()], size, common=common))


def _indivisible(sizes: Sequence[tuple[int, str]], size: int, *, common: int) -> str:
    """The error message, with the axis sizes that divide `common`, the greatest common divisor of all sizes."""
    fits = [n for n in range(1, min(common, _MOST_RANKS) + 1) if common % n == 0]
    *others, last = [f"{what} = {total}" for total, what in sizes]
    named = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    return f"{named} not divisible by parallel.tp = {size}; use tp {', '.join(map(str, fits))}"


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """True for a parameter or gradient that is sharded, or replicated, over a device mesh.

    Only programs with such tensors import torch.distributed.tensor, which takes a third as long as torch itself.
    """
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _meta_dtensor(shape: tuple[int, ...], shard_dim: int | None, mesh: DeviceMesh) -> DTensor:
    """An fp32 meta tensor of global `shape` on a one-dimensional mesh."""
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

    local_shape = list(shape)
    placement: Placement = Replicate()
    if shard_dim is not None:
        assert shape[shard_dim] % mesh.size() == 0, (shape, shard_dim, mesh.size())
        local_shape[shard_dim] //= mesh.size()
        placement = Shard(shard_dim)
    empty = torch.empty(local_shape, dtype=torch.float32, device="meta")
    return DTensor.from_local(empty, mesh, [placement], run_check=False)


def _as_parameter(tensor: DTensor) -> nn.Parameter:
    """A leaf tensor as a parameter, without the DTensor operator `detach` of `nn.Parameter`'s constructor."""
    parameter = cast(nn.Parameter, tensor.requires_grad_())
    parameter._is_param = True  # an instance of nn.Parameter
    return parameter


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a parameter or gradient, as a plain tensor that autograd follows."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def with_layout(shard: Tensor, tensor: Tensor) -> Tensor:
    """`shard` as this rank's shard of a tensor on the mesh of `tensor`, with its shape and placements; a plain tensor
    as it is where `tensor` is one.

    An operator on a DTensor takes some milliseconds at the first call for each shape, in which torch derives the
    placements of its result; by shards, an elementwise one takes microseconds.
    """
    if not is_dtensor(tensor):
        return shard
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@torch.no_grad()
def sharded_zeros_like(tensor: Tensor) -> Tensor:
    """Zeros with the shape, dtype and layout of a tensor."""
    return with_layout(torch.zeros_like(local(tensor)), tensor)


def apply_to_shards(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replaces each parameter and buffer of a module by the function of this rank's shard, which keeps its shape, as
    `module.to` and `to_empty` do by operators on DTensors (`with_layout`)."""
    module._apply(lambda tensor: with_layout(function(local(tensor)), tensor))


def full_tensor(tensor: Tensor) -> Tensor:
    """The full parameter or gradient on every rank; a collective where it is sharded."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


@torch.no_grad()
def assign(parameter: Tensor, full: Tensor) -> None:
    """Sets a parameter from a full tensor that every rank has: each keeps its shard, without a collective."""
    if is_dtensor(parameter):
        from torch.distributed.tensor import distribute_tensor

        full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
    local(parameter).copy_(local(full))


@torch.no_grad()
def largest_magnitudes(weights: Sequence[Tensor]) -> Tensor:
    """max |w| of each full weight, [len(weights)] on every rank in at least fp32: one all-reduce for all, or one for
    each axis of a stage.

    Weights are plain, unsharded tensors, or shards over one axis or mesh, the same for all of them. A collective.
    """
    if not weights:
        return torch.zeros(0)
    shards = [local(weight) for weight in weights]
    # A rank's shard of a weight that data parallelism divides unevenly may be empty.
    largest = torch.stack([shard.abs().max() if shard.numel() else shard.new_zeros(()) for shard in shards])
    largest = largest.to(torch.promote_types(largest.dtype, torch.float32))
    meshes = {weight.device_mesh if is_dtensor(weight) else None for weight in weights}
    assert len(meshes) == 1, meshes
    mesh = meshes.pop()
    for axis in [] if mesh is None else covering_axes(mesh):
        largest = all_reduce(largest, axis, operation="max")
    return largest
