"""A rank's view of a mesh that nothing runs on: for planning, with tensors that have shapes and no values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

# Registers the backend "fake", whose collectives send nothing; torch keeps it among its tests.
from torch.testing._internal.distributed import fake_pg  # noqa: F401

from megalin.parallel.mesh import Mesh, ParallelConfig
from megalin.parallel.tensor_parallel import TensorParallel


class LocalTensorParallel(TensorParallel):
    """The axis with this rank's part of each parameter as a plain parameter of that size."""

    def parameter(self, *shape: int, shard_dim: int | None) -> nn.Parameter:
        """An fp32 meta parameter: this rank's part of global `shape`."""
        local_shape = [size // self.size if dim == shard_dim else size for dim, size in enumerate(shape)]
        return nn.Parameter(torch.empty(local_shape, dtype=torch.float32, device="meta"))


@contextmanager
def fake_mesh(
    config: ParallelConfig, world_size: int, *, tensor_parallel: type[TensorParallel] = LocalTensorParallel
) -> Iterator[Mesh]:
    """The mesh as rank 0 of `world_size` ranks sees it. No process group may be initialised; that of the mesh ends with
    the body.

    Raises:
        ConfigError: axes that do not fit the number of ranks.
    """
    assert not dist.is_initialized(), "a plan is made before the ranks meet"
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)  # type: ignore[attr-defined]
    try:
        yield Mesh(config, torch.device("cpu"), tensor_parallel=tensor_parallel)
    finally:
        dist.destroy_process_group()
