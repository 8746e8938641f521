"""A small model with every kind of sharded weight, its AdamW state after two steps, and its full tensors."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megalin.checkpoint.load import load, newest
from megalin.checkpoint.save import save
from megalin.checkpoint.tensors import training_tensors
from megalin.parallel.config import ParallelConfig
from megalin.parallel.data_parallel import shard_model
from megalin.parallel.mesh import Mesh


class Layout(NamedTuple):
    """A mesh, and the number of rows of a matrix that tensor and data parallelism both shard along dim 0."""

    tp: int
    dp: int
    shard: int | None = None
    rows: int = 4

    @property
    def world_size(self) -> int:
        return self.tp * self.dp


class _Weights(nn.Module):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))


def build(layout: Layout, seed: int) -> tuple[nn.Module, torch.optim.AdamW]:
    """The model on this rank of `layout`, with fused AdamW."""
    mesh = Mesh(ParallelConfig(tp=layout.tp, shard=layout.shard), torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, placement: Replicate | Shard) -> torch.Tensor:
        full = torch.randn(shape, generator=generator)
        return distribute_tensor(full, mesh.device_mesh["tp"], [placement], src_data_rank=None)

    block = _Weights(
        {
            "fused": draw(3, 8, 10, placement=Shard(1)),  # [parts, out, in]
            "odd_fused": draw(3, 8, 9, placement=Shard(1)),
            "row": draw(7, 8, placement=Shard(1)),
            "twice_sharded": draw(layout.rows, 7, placement=Shard(0)),
            "norm": draw(7, placement=Replicate()),
            "scalar_like": draw(1, placement=Replicate()),
        }
    )
    model = nn.Module()
    model.embedding = _Weights({"weight": draw(16, 6, placement=Shard(0))})
    model.blocks = nn.ModuleList([block])
    model.head = nn.Module()
    model.head.register_parameter("weight", model.embedding.weight)  # tied
    shard_model(model, [block], [], mesh, compute_dtype=torch.float32)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def step(model: nn.Module, optimizer: torch.optim.AdamW) -> None:
    """Takes a step whose gradient is the weight itself."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()


def full_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, numpy.ndarray]:
    """Full tensors, gathered by DTensor, independently of the checkpoint code."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy().copy()
        for name, tensor in tensors.items()
    }


def save_trained(root: Path, layout: Layout) -> dict[str, numpy.ndarray]:
    """Trains two steps on this rank and saves; returns the full tensors."""
    model, optimizer = build(layout, seed=1)
    step(model, optimizer)
    step(model, optimizer)
    tensors = training_tensors(model, optimizer)
    save(root, step=2, tensors=tensors, state={"samples": 12})
    return full_tensors(tensors)


def load_fresh(root: Path, layout: Layout) -> dict[str, numpy.ndarray]:
    """Loads into a model of another seed without any step, on this rank; returns the full tensors."""
    model, optimizer = build(layout, seed=2)
    checkpoint = newest(root)
    assert checkpoint is not None
    assert checkpoint.state() == {"samples": 12}
    load(checkpoint, training_tensors(model, optimizer))
    return full_tensors(training_tensors(model, optimizer))
