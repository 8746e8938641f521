"""Gradients, losses and norm of a step by the fixed tree of `train.reduction = "tree"` (docs/adr/0023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalin.data.batch import AnyBatch
from megalin.errors import ConfigError
from megalin.model.build import Model
from megalin.parallel.collectives import wait_tensor
from megalin.parallel.data_parallel import prepare_backward, set_gradients, take_gradients
from megalin.parallel.mesh import Mesh
from megalin.parallel.tree_reduction import (
    TreeSum,
    flatten,
    gather_slices,
    leaf_order,
    norm_of_slices,
    sum_of_losses,
    sum_over_ranks,
)
from megalin.train.reduction import OTHERWISE, TREE


def check_tree_threads(device: torch.device) -> None:
    """Raises ConfigError for a CPU device on which this process computes in several threads: torch divides sums and
    matmuls by their number, and a rank of many has another number than a rank alone."""
    if device.type == "cpu" and (threads := torch.get_num_threads()) != 1:
        raise ConfigError(
            f"{TREE} with {threads} CPU threads a rank, on whose number the bits of a matmul depend; set "
            f"OMP_NUM_THREADS=1, {OTHERWISE}"
        )


class TreeStep(NamedTuple):
    """Result of `accumulate_by_tree`; every value has the same bits on every rank and every number of ranks."""

    losses: Tensor
    """[terms] fp64, the mean loss of each term, nats a label."""
    counts: Tensor
    """[terms] int64, its valid labels."""
    norm: Tensor
    """[] L2 norm of the whole gradient, of a float16 run with its loss scale."""


def accumulate_by_tree(
    model: Model, batches: Sequence[AnyBatch], mesh: Mesh, loss_scale: Tensor | None = None
) -> TreeStep:
    """As `accumulate_gradients`, with sums in the order of `megalin.parallel.tree_reduction`.

    The gradient of each micro-batch is taken unsharded in the compute dtype and added in fp32 (fp64 for a model in
    fp64). The model was built without reductions (`shard_model`), and the ranks form a data axis alone.

    Args:
        batches: this rank's micro-batches, 2^n, in the loader's order.
        loss_scale: [], multiplies the gradients but not the losses.
    """
    counts = mesh.count_labels([batch.label_counts() for batch in batches])  # integers: exact in any order
    losses, gradients = TreeSum(), TreeSum()
    shapes: dict[str, torch.Size] = {}
    for number, index in enumerate(leaf_order(len(batches))):
        prepare_backward(model, mesh, last=number == len(batches) - 1, reduces=False)
        sums = model.loss_sums(batches[index].inputs())
        counts = wait_tensor(counts)
        terms = sums / counts.clamp(min=1)
        loss = terms.sum()
        (loss if loss_scale is None else loss * loss_scale).backward()
        losses.add(terms.detach().double())
        del sums, terms, loss  # before the next forward, which needs the memory
        taken = take_gradients(model)
        found = {name: gradient.shape for name, gradient in taken.items()}
        assert not shapes or found == shapes, f"micro-batches give gradients to {len(shapes)} and {len(found)} weights"
        shapes = found
        gradients.add(_flat(taken, mesh))
        del taken
    own = sum_over_ranks(gradients.total(), mesh.data)
    norm = norm_of_slices(own, mesh.data)
    set_gradients(model, _by_name(gather_slices(own, mesh.data), shapes), mesh)
    return TreeStep(sum_of_losses(losses.total(), mesh.data), counts, norm)


def _flat(gradients: Mapping[str, Tensor], mesh: Mesh) -> Tensor:
    """All gradients of a micro-batch as one tensor, in at least fp32."""
    dtypes = [gradient.dtype for gradient in gradients.values()]
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    return flatten(list(gradients.values()), num_ranks=mesh.data.size, dtype=dtype)


def _by_name(flat: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Views of the tensors in the result of `flatten`."""
    found, start = {}, 0
    for name, shape in shapes.items():
        found[name] = flat[start : start + shape.numel()].view(shape)
        start += shape.numel()
    return found
