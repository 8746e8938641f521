"""Choice of the layers of a model that multiply in FP8, and the magnitudes of their weights after each update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalin.errors import ConfigError
from megalin.ops.choices import ALIGNMENT
from megalin.ops.scaled_linear import LOWEST_CAPABILITY, finite_or_inf, raise_to_magnitudes
from megalin.parallel.collectives import all_reduce, covering_axes, wait_tensor
from megalin.parallel.float8_matmuls import Float8Matmuls
from megalin.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalin.parallel.tensor_parallel import is_dtensor, local

MIN_WIDTH = 256
"""Input and output width from which a linear layer multiplies in FP8; below, its casts take as long as FP8 saves."""

Linear = ColumnParallelLinear | RowParallelLinear
_ENABLED = "_float8_linears"
"""Attribute of a model with its FP8 layers: a search through all modules took 0.1 to 0.6 ms in every step."""


class Float8Settings(NamedTuple):
    """Choice of the FP8 matmuls in the blocks of a model."""

    min_width: int = MIN_WIDTH
    """Smallest input and output width, over all ranks, of a layer that multiplies in FP8."""
    weight_gradient: bool = False
    """True: gradients of weights in FP8 too. Their scales depend on the tokens of this rank's micro-batch."""


class Float8Layers(NamedTuple):
    """The linear layers of a model's blocks by the dtype of their matmuls, by name."""

    float8: list[str]
    narrow: list[str]
    """Narrower than `Float8Settings.min_width`, so in the compute dtype. Maps that are no layer (low-rank ones, the
    head) are in neither list."""


def find_layers(model: nn.Module, blocks: Iterable[nn.Module], settings: Float8Settings) -> Float8Layers:
    """The linear layers of the blocks by the dtype of their matmuls, the same on every mesh.

    Raises:
        ConfigError: a wide layer whose shard on the tensor-parallel axis has a size that is no multiple of 16; no wide
            layer.
    """
    layers = list(_linears(model, blocks))
    wide = [(name, linear) for name, linear in layers if _width(linear) >= settings.min_width]
    for name, linear in wide:
        outputs, inputs = _local_sizes(linear)
        if outputs % ALIGNMENT or inputs % ALIGNMENT:
            raise ConfigError(
                f'train.matmul_dtype = "float8" needs sizes that are multiples of {ALIGNMENT}, but with parallel.tp = '
                f"{linear.tp.size} the matrix of {name} on a rank has {outputs} outputs and {inputs} inputs; use "
                f"widths that are multiples of {ALIGNMENT} times tp, another tp, or leave matmul_dtype out"
            )
    if not wide:
        widest = max((_width(linear) for _, linear in layers), default=0)
        raise ConfigError(
            f'train.matmul_dtype = "float8", but no linear layer of the blocks has at least {settings.min_width} '
            f"inputs and outputs (the widest has {widest} of both); use a wider model, or leave matmul_dtype out"
        )
    names = [name for name, _ in wide]
    return Float8Layers(names, [name for name, _ in layers if name not in names])


def enable_float8(model: nn.Module, blocks: Sequence[nn.Module], settings: Float8Settings) -> None:
    """Makes the wide linear layers of the blocks multiply in FP8. The model's weights may be on the meta device; after
    they are set, and after each change, `update_weight_magnitudes` is called."""
    wide = [(name, linear) for name, linear in _linears(model, blocks) if _width(linear) >= settings.min_width]
    for _, linear in wide:
        linear.float8 = Float8Matmuls(
            *_local_sizes(linear),
            tp=linear.tp,
            splits_inputs=isinstance(linear, RowParallelLinear),
            weight_gradient=settings.weight_gradient,
            device=linear.weight.device,
        )
    setattr(model, _ENABLED, wide)


def wide_linears(module: nn.Module, settings: Float8Settings) -> list[Linear]:
    """The linear layers of a block or mixer that multiply in FP8 with these settings."""
    return [linear for linear in _linears_of(module) if _width(linear) >= settings.min_width]


def float8_linears(model: nn.Module) -> list[tuple[str, Linear]]:
    """The layers of a model, or of a stage, for which `enable_float8` was called, with their names."""
    return getattr(model, _ENABLED, [])


@torch.no_grad()
def update_weight_magnitudes(model: nn.Module) -> None:
    """Sets the magnitudes of all weights that are multiplied in FP8 from the weights, which may be sharded over the
    mesh in any way; one all-reduce (max) for all of them, or one for each axis of a pipeline stage. A collective, with
    the same layers on every rank; nothing without such layers.

    Magnitudes are those of the fp32 weights. Rounding to the compute dtype is monotone and keeps 448 times a power of
    two, so no rounded weight exceeds its row's largest code.
    """
    linears = [linear for _, linear in float8_linears(model)]
    if not linears:
        return
    weight = linears[0].weight
    sizes = [size for linear in linears for size in _global_sizes(linear)]
    largest = torch.zeros(sum(sizes), device=weight.device)
    vectors = iter(largest.split(sizes))
    for linear in linears:
        _write_own_magnitudes(linear, next(vectors), next(vectors))
    largest = finite_or_inf(largest)
    for axis in covering_axes(weight.device_mesh) if is_dtensor(weight) else []:
        largest = all_reduce(largest, axis, operation="max")
    vectors = iter(wait_tensor(largest).split(sizes))
    own = [vector for linear in linears for vector in _own_slices(linear, next(vectors), next(vectors))]
    torch._foreach_copy_([buffer for linear in linears for buffer in _magnitude_buffers(linear)], own)


def check_capability(name: str, capability: tuple[int, int]) -> None:
    """Raises ConfigError for a GPU that cannot multiply FP8 numbers."""
    if capability < LOWEST_CAPABILITY:
        raise ConfigError(
            f'train.matmul_dtype = "float8" needs a GPU of compute capability {_version(LOWEST_CAPABILITY)} or above '
            f"(Ada, Hopper, Blackwell), but {name} has {_version(capability)}; leave matmul_dtype out"
        )


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _linears(model: nn.Module, blocks: Iterable[nn.Module]) -> Iterator[tuple[str, Linear]]:
    names = {id(module): name for name, module in model.named_modules()}
    for block in blocks:
        yield from ((names[id(linear)], linear) for linear in _linears_of(block))


def _linears_of(module: nn.Module) -> Iterator[Linear]:
    return (each for each in module.modules() if isinstance(each, ColumnParallelLinear | RowParallelLinear))


def _width(linear: Linear) -> int:
    """The smaller of a layer's input and output widths, one part of its outputs."""
    return min(linear.in_features, linear.out_features)


def _global_sizes(linear: Linear) -> tuple[int, int]:
    """Rows of the full weight, all parts, and of its transpose."""
    parts = linear.parts if isinstance(linear, ColumnParallelLinear) else 1
    return parts * linear.out_features, linear.in_features


def _local_sizes(linear: Linear) -> tuple[int, int]:
    """Outputs, all parts, and inputs of this rank."""
    outputs, inputs = _global_sizes(linear)
    if isinstance(linear, ColumnParallelLinear):
        return outputs // linear.tp.size, inputs
    return outputs, inputs // linear.tp.size


def _write_own_magnitudes(linear: Linear, outputs: Tensor, inputs: Tensor) -> None:
    """Writes the magnitudes of this rank's shard of the weight to their places in the vectors of the full weight and of
    its transpose."""
    shard, start = local(linear.weight.detach()), _shard_start(linear)
    if shard.dim() == 2:  # row-parallel
        shard, start = shard[None], [0, *start]
    if shard.numel():
        parts, out, inner = (slice(first, first + size) for first, size in zip(start, shard.shape, strict=True))
        rows = outputs.view(-1, linear.out_features)[parts, out]
        own = rows.flatten()  # a copy where other ranks hold rows between them
        raise_to_magnitudes(shard.flatten(0, 1), own, inputs[inner])
        if own.data_ptr() != rows.data_ptr():
            rows.copy_(own.view_as(rows))


def _own_slices(linear: Linear, outputs: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's magnitudes of the rows of the weight and of its transpose, from those of the full ones."""
    if isinstance(linear, ColumnParallelLinear):
        return linear.tp.local_slice(outputs.view(linear.parts, -1), dim=1).flatten(), inputs
    return outputs, linear.tp.local_slice(inputs, dim=0)


def _magnitude_buffers(linear: Linear) -> tuple[Tensor, Tensor]:
    assert linear.float8 is not None
    return linear.float8.out_magnitudes, linear.float8.in_magnitudes


def _shard_start(linear: Linear) -> list[int]:
    """Index of the first element of this rank's shard in the full weight: tensor parallelism shards dimension 1, and
    data parallelism one dimension of that shard."""
    weight: Tensor = linear.weight
    shape = [*weight.shape]
    shape[1] //= linear.tp.size
    start = [0] * len(shape)
    start[1] = linear.tp.axis.rank * shape[1]
    if is_dtensor(weight) and "shard" in (names := weight.device_mesh.mesh_dim_names or ()):
        rank, ranks = weight.device_mesh.get_local_rank("shard"), weight.device_mesh.size(names.index("shard"))
        for dim, (size, found) in enumerate(zip(shape, local(weight).shape, strict=True)):
            if found != size:
                start[dim] += rank * -(-size // ranks)
    return start
