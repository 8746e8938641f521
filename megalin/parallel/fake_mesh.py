"""A rank's view of a mesh without communication: for planning, with meta tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

# Registers the backend "fake", whose collectives send nothing; torch keeps it among its tests.
from torch.testing._internal.distributed import fake_pg  # noqa: F401

from megalin.parallel.async_tensor_parallel import AsyncTPBuffers
from megalin.parallel.collectives import COLLECTIVE_TIMEOUT
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.parallel.symmetric_memory import OpenMemory
from megalin.parallel.tensor_parallel import TensorParallel


class LocalTensorParallel(TensorParallel):
    """The axis with this rank's shard of each parameter as a plain parameter of that size."""

    def parameter(self, *shape: int, shard_dim: int | None) -> nn.Parameter:
        """An fp32 meta parameter: this rank's shard of global `shape`."""
        local_shape = [size // self.size if dim == shard_dim else size for dim, size in enumerate(shape)]
        return nn.Parameter(torch.empty(local_shape, dtype=torch.float32, device="meta"))


def _no_memory(numel: int, dtype: torch.dtype) -> OpenMemory:
    raise AssertionError(f"{numel} elements of {dtype} on a mesh that sends nothing")


@contextmanager
def fake_mesh(
    config: ParallelConfig,
    world_size: int,
    *,
    tensor_parallel: type[TensorParallel] = LocalTensorParallel,
    async_tp: bool = False,
) -> Iterator[Mesh]:
    """The mesh from rank 0's view among `world_size` ranks. No process group may be initialised; that of the mesh ends
    with the body.

    Args:
        async_tp: whether matmuls use async tensor parallelism, as on GPUs of one host; `config.tp_overlap` is not read.

    Raises:
        ConfigError: axes that do not fit the number of ranks.
    """
    assert not dist.is_initialized(), "a fake mesh needs a process without a process group"
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)  # type: ignore[attr-defined]
    try:
        # A mesh on CPUs, which have no copy engines, refuses symmetric memory.
        by_collectives = config.model_copy(update={"tp_overlap": "none"})
        mesh = Mesh(by_collectives, torch.device("cpu"), tensor_parallel=tensor_parallel)
        if async_tp:
            axis = mesh.tp.axis
            mesh.tp.buffers = AsyncTPBuffers(
                axis.group_name, axis.rank, axis.size, _no_memory, mesh.launch_order, timeout=COLLECTIVE_TIMEOUT
            )
        yield mesh
    finally:
        dist.destroy_process_group()
