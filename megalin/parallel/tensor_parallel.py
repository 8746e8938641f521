"""The tensor-parallel axis as a layer uses it: what enters and leaves a sharded region, and how a parameter is split.

With Megatron sequence parallelism the residual stream is [B, T/tp, D] instead of [B, T, D]: entering gathers along
T, leaving reduce-scatters along T. A layer is written once for both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

from megalin.errors import ConfigError
from megalin.parallel.collectives import (
    Axis,
    copy_to_axis,
    gather_from_axis,
    local_slice,
    reduce_from_axis,
    reduce_scatter_to_axis,
)
from megalin.parallel.overlapped_products import StreamCopies, all_gather_matmul, matmul_reduce_scatter

TOKENS = 1
"""The dimension of [B, T, ...] along which sequence parallelism splits."""
_MOST_RANKS = 64
"""The largest axis that an error proposes."""


class TensorParallel:
    """The tensor-parallel axis: its size, its collectives, and the parameters it splits.

    Args:
        axis: this rank's view of the axis; the default has size 1.
        device_mesh: one-dimensional mesh of the axis. Without one, parameters are plain and whole: for one process,
            or, at a larger size, to check on the meta device that a model fits the axis.
        sequence_parallel: whether the residual stream is split along T inside the axis.
        copies: how the stream reaches products and leaves them, with sequence parallelism; None: by collectives.
    """

    def __init__(
        self,
        axis: Axis | None = None,
        *,
        device_mesh: DeviceMesh | None = None,
        sequence_parallel: bool = False,
        copies: StreamCopies | None = None,
    ) -> None:
        self.axis = Axis("tp") if axis is None else axis
        self.device_mesh = device_mesh
        self.sequence_parallel = sequence_parallel and self.axis.size > 1
        self.copies = copies
        assert copies is None or self.sequence_parallel

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return self.axis.size

    def divide(self, total: int, what: str) -> int:
        """total / tp, the size of this rank's part of `what`. Raises ConfigError where it does not divide."""
        if total % self.size:
            raise ConfigError(_indivisible(total, what, self.size, common=total))
        return total // self.size

    def enter(self, x: Tensor) -> Tensor:
        """The residual stream as input of sharded weights: [B, T or T/tp, D] -> [B, T, D]."""
        if self.sequence_parallel:
            return gather_from_axis(x, self.axis, dim=TOKENS)
        return copy_to_axis(x, self.axis)

    def leave(self, x: Tensor) -> Tensor:
        """Sums the ranks' partial results into the residual stream: [B, T, D] -> [B, T or T/tp, D]."""
        if self.sequence_parallel:
            return reduce_scatter_to_axis(x, self.axis, dim=TOKENS)
        return reduce_from_axis(x, self.axis)

    def enter_product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The residual stream times sharded weights that alone read it: x [B, T or T/tp, D], weight [N/tp, D], bias
        [N/tp] -> x W^T + b [B, T, N/tp]."""
        if self.copies is None:
            return functional.linear(self.enter(x), weight, bias)
        y = all_gather_matmul(x, weight, self.axis)
        return y if bias is None else y + bias

    def leave_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Sums the ranks' partial products into the residual stream: x [B, T, K/tp], weight [D, K/tp] ->
        [B, T or T/tp, D]."""
        if self.copies is None:
            return self.leave(functional.linear(x, weight))
        return matmul_reduce_scatter(x, weight, self.axis)

    def reduce_tokens(self, x: Tensor) -> Tensor:
        """Sums one number a token over the axis, for the tokens of the residual stream: [B, T] -> [B, T or T/tp]."""
        return self.leave(x)

    def total_of_parts(self, x: Tensor) -> Tensor:
        """Sums what every rank's part contributes, for use on every part: all-reduce forward and backward."""
        return copy_to_axis(reduce_from_axis(x, self.axis), self.axis)

    def join_parts(self, x: Tensor) -> Tensor:
        """Joins what every rank holds of the last dimension, for use on every part: all-gather forward,
        reduce-scatter backward."""
        return gather_from_axis(x, self.axis, dim=x.dim() - 1)

    def sum_of_parts(self, x: Tensor) -> Tensor:
        """Sums what every rank's part contributes, for work that every rank repeats: all-reduce forward only, since
        every rank then has the whole gradient. What leaves that work for sharded data passes `partial_gradient`."""
        return reduce_from_axis(x, self.axis)

    def partial_gradient(self, weight: Tensor) -> Tensor:
        """A replicated tensor used on sharded data: its gradient is a partial sum, so the backward all-reduces it."""
        return copy_to_axis(weight, self.axis)

    def stream_weight(self, weight: Tensor) -> Tensor:
        """A replicated weight used on the residual stream. Its gradient is whole on every rank, but with sequence
        parallelism each rank sees only its own tokens, so the backward all-reduces it."""
        return copy_to_axis(weight, self.axis) if self.sequence_parallel else weight

    def local_slice(self, x: Tensor, *, dim: int) -> Tensor:
        """This rank's part of a buffer that every rank can compute whole."""
        return local_slice(x, self.axis, dim=dim)

    def for_whole_rows(self) -> TensorParallel:
        """The same axis for work after `pick_rows`, whose results every rank holds whole, sequence parallel or not."""
        return type(self)(self.axis, device_mesh=self.device_mesh)

    def pick_rows(self, x: Tensor, index: Tensor) -> Tensor:
        """Some tokens of the residual stream for work that every rank repeats: [B, T or T/tp, D] at the token numbers
        index [B, P] -> [B, P, D]. With sequence parallelism each rank gives those of its own tokens, and one
        all-reduce joins them; every rank then has the whole gradient, and keeps what is its own."""
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        if not self.sequence_parallel:
            return x[rows, index]
        index = index - self.axis.rank * x.shape[TOKENS]
        absent = (index < 0) | (index >= x.shape[TOKENS])
        return self.sum_of_parts(x[rows, index.masked_fill(absent, 0)].masked_fill(absent[..., None], 0.0))

    def sum_of_rows(self, x: Tensor, weight: Tensor) -> Tensor:
        """sum_t weight[b, t] x[b, t] for work that every rank repeats: x [B, T or T/tp, D], weight [B, T] without a
        gradient -> [B, D]."""
        if not self.sequence_parallel:
            return (x * weight[..., None]).sum(TOKENS)
        return self.sum_of_parts((x * self.local_slice(weight, dim=TOKENS)[..., None]).sum(TOKENS))

    def parameter(self, *shape: int, shard_dim: int | None) -> nn.Parameter:
        """An fp32 meta parameter of global `shape`, split along `shard_dim`, or replicated where it is None."""
        if self.device_mesh is None:
            return nn.Parameter(torch.empty(shape, dtype=torch.float32, device="meta"))
        local_shape = list(shape)
        placement: Placement = Replicate()
        if shard_dim is not None:
            assert shape[shard_dim] % self.size == 0, (shape, shard_dim, self.size)
            local_shape[shard_dim] //= self.size
            placement = Shard(shard_dim)
        empty = torch.empty(local_shape, dtype=torch.float32, device="meta")
        return nn.Parameter(DTensor.from_local(empty, self.device_mesh, [placement], run_check=False))

    def fused_parameter(self, parts: int, out: int, inner: int) -> nn.Parameter:
        """`parts` matrices [out, inner] as one parameter [parts, out, inner], each part split along its outputs."""
        return self.parameter(parts, out, inner, shard_dim=1)


class DividedSizes(TensorParallel):
    """An axis of one rank that keeps what layers divide by it, to tell which sizes of the axis fit all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, str]] = []

    def divide(self, total: int, what: str) -> int:
        """All of `total`, which is kept."""
        self.sizes.append((total, what))
        return total

    def for_whole_rows(self) -> TensorParallel:
        """This axis: what is divided there counts as well."""
        return self

    def check(self, size: int) -> None:
        """Raises ConfigError where an axis of `size` ranks does not divide all that was kept, with those that do."""
        common = math.gcd(*(total for total, _ in self.sizes))
        for total, what in self.sizes:
            if total % size:
                raise ConfigError(_indivisible(total, what, size, common=common))


def _indivisible(total: int, what: str, size: int, *, common: int) -> str:
    """What is wrong, and the sizes of the axis that divide `common`, of all that must be divided."""
    fits = [n for n in range(1, min(common, _MOST_RANKS) + 1) if common % n == 0]
    return f"{what} = {total} is not divisible by parallel.tp = {size}; use tp {', '.join(map(str, fits))}"


def local(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter, as a plain tensor that autograd follows."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a parameter or gradient, on every rank; a collective where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def assign(parameter: Tensor, full: Tensor) -> None:
    """Sets a parameter from a whole tensor that every rank has: each keeps its slice, nothing is sent."""
    if isinstance(parameter, DTensor):
        full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
    local(parameter).copy_(local(full))
