"""Helpers of functions that run on ranks: a mesh, poisoned memory, and results that outlive the rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megalin.parallel.config import ParallelConfig
from megalin.parallel.initialisation import init_weights
from megalin.parallel.mesh import Mesh
from megalin.parallel.tensor_parallel import local

Arrays = dict[str, np.ndarray]


def make_mesh(tp: int, **axes: Any) -> Mesh:
    """The mesh of all ranks, on the CPU; `axes` are other fields of ParallelConfig."""
    return Mesh(ParallelConfig(tp=tp, **axes), torch.device("cpu"))


def materialise(module: nn.Module, seed: int = 0) -> None:
    """Gives a meta module memory full of NaN, then initialises it."""
    module.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            local(tensor).fill_(float("nan"))
    init_weights(module, seed)


def to_arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    """Copies tensors to arrays. The shared memory of a tensor ends with the rank that made it."""
    return {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}


def to_tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Inverse of `to_arrays`."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
