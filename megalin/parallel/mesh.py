"""The mesh: which ranks form the data, context- and tensor-parallel axes, and the process group they live in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pydantic
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megalin.config import Config
from megalin.errors import ConfigError
from megalin.parallel.collectives import Axis, all_reduce
from megalin.parallel.context import ContextParallel
from megalin.parallel.tensor_parallel import TensorParallel


class ParallelConfig(Config):
    """How the ranks of a run are arranged. The data axis is what tensor parallelism leaves, world / tp ranks. On it
    each cp neighbours share their samples, so that dp = world / (tp cp) groups read different ones."""

    tp: int = pydantic.Field(default=1, ge=1)
    """Ranks that share each layer's weights (tensor parallelism)."""
    cp: int = pydantic.Field(default=1, ge=1)
    """Ranks that share each sample: every one holds a part of its tokens, side by side (context parallelism)."""
    sequence_parallel: bool = False
    """Whether activations between layers are split along the sequence inside the tensor-parallel group."""
    shard: int | None = pydantic.Field(default=None, ge=1)
    """Ranks of the data axis over which weights, gradients and optimizer state are sharded (FSDP2). Left out: all of
    them. 1: every rank keeps a replica. In between: hybrid, sharded inside groups of this size, replicated across."""

    def length_problem(self, length: int) -> str:
        """What keeps a row of `length` tokens from being split over the ranks, and the remedy; empty where nothing."""
        parts, names = self.cp, f"parallel.cp = {self.cp}"
        if self.sequence_parallel and self.tp > 1:
            parts *= self.tp
            of_tp = f"parallel.tp = {self.tp}, as parallel.sequence_parallel needs"
            names = of_tp if self.cp == 1 else f"{names} times {of_tp}"
        return f"is not divisible by {names}; use {length // parts * parts or parts}" if length % parts else ""


class Mesh:
    """The axes of a run as this rank sees them, over an initialised process group.

    Attributes:
        device_mesh: dimensions ("replicate", "shard", "tp").
        data: the data axis, replicate x shard: the ranks that share weights, and sum gradients, losses and counts.
        samples: the part of the data axis whose ranks read different samples, data / cp.
        cp: the context-parallel axis as layers use it: neighbours on the data axis that share their samples.
        tp: the tensor-parallel axis as layers use it.
        device: where this rank computes.
    """

    def __init__(
        self,
        config: ParallelConfig,
        device: torch.device,
        *,
        tensor_parallel: type[TensorParallel] = TensorParallel,
        context_parallel: type[ContextParallel] = ContextParallel,
    ) -> None:
        """Raises ConfigError where the axes do not fit the number of ranks; needs an initialised process group."""
        check_world_size(config, dist.get_world_size())
        data_size = dist.get_world_size() // config.tp
        shard = data_size if config.shard is None else config.shard
        self.config, self.device = config, device
        self.device_mesh = init_device_mesh(
            device.type, (data_size // shard, shard, config.tp), mesh_dim_names=("replicate", "shard", "tp")
        )
        tp_mesh = self.device_mesh["tp"]
        self.data = _axis("data", self.device_mesh["replicate", "shard"]._flatten("data"))
        self.tp = tensor_parallel(_axis("tp", tp_mesh), device_mesh=tp_mesh, sequence_parallel=config.sequence_parallel)
        self.samples, cp = self.data, Axis("cp")
        if config.cp > 1:
            # Weights do not know it: a mesh of its own cuts the same data axis another way.
            split = init_device_mesh(
                device.type, (data_size // config.cp, config.cp, config.tp), mesh_dim_names=("samples", "cp", "tp")
            )
            self.samples, cp = _axis("samples", split["samples"]), _axis("cp", split["cp"])
        self.cp = context_parallel(cp)

    @property
    def data_mesh(self) -> DeviceMesh:
        """The two-dimensional mesh ("replicate", "shard") of sharded data parallelism."""
        return self.device_mesh["replicate", "shard"]

    @property
    def is_first_rank(self) -> bool:
        """Whether this is global rank 0, the one that writes and prints."""
        return dist.get_rank() == 0

    def sum_over_data(self, value: Tensor) -> Tensor:
        """Sum of a tensor over the data axis, on every rank."""
        return all_reduce(value, self.data)


def check_world_size(config: ParallelConfig, world_size: int) -> None:
    """Raises ConfigError where `config` does not fit `world_size` ranks; needs no process group."""
    if world_size % config.tp:
        raise ConfigError(
            f"parallel.tp = {config.tp} does not divide the number of ranks, {world_size}; "
            f"start a multiple of {config.tp} ranks (torchrun --nproc-per-node) or change parallel.tp"
        )
    data_size = world_size // config.tp
    if data_size % config.cp:
        raise ConfigError(
            f"parallel.cp = {config.cp} does not divide the data axis of {data_size} ranks ({world_size} ranks / tp "
            f"{config.tp}); start a multiple of {config.cp * config.tp} ranks (torchrun --nproc-per-node) or change "
            "parallel.cp"
        )
    if config.shard is not None and data_size % config.shard:
        raise ConfigError(
            f"parallel.shard = {config.shard} does not divide the data axis of {data_size} ranks "
            f"({world_size} ranks / tp {config.tp}); use a divisor of {data_size}, or leave it out to shard over all"
        )


def _axis(name: str, mesh: DeviceMesh) -> Axis:
    group = mesh.get_group()
    return Axis(name, mesh.size(), mesh.get_local_rank(), group.group_name)


def whole_axis(mesh: DeviceMesh) -> Axis:
    """The axis of all ranks of a device mesh, which is one-dimensional or holds every rank of the run."""
    if mesh.ndim == 1:
        return _axis("mesh", mesh)
    world = dist.group.WORLD
    assert world is not None, mesh
    assert mesh.size() == world.size(), mesh
    return Axis("world", world.size(), world.rank(), world.group_name)


def launched_world_size() -> int:
    """Number of ranks that the launcher started: WORLD_SIZE, or 1 without a launcher.

    Raises:
        ConfigError: where RANK, WORLD_SIZE or LOCAL_RANK is not a number or out of range.
    """
    world_size = _environment("WORLD_SIZE", 1)
    rank = _environment("RANK", 0)
    _environment("LOCAL_RANK", 0)
    if world_size < 1 or rank >= world_size:
        raise ConfigError(f"RANK = {rank} is not below WORLD_SIZE = {world_size}; start the ranks with torchrun")
    return world_size


def _environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ConfigError(f"environment variable {name} = {text!r} is not a number; start the ranks with torchrun")
    return int(text)


def compute_device() -> torch.device:
    """This rank's device: its local GPU where CUDA is available, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", _environment("LOCAL_RANK", 0))
    return torch.device("cpu")


@contextmanager
def process_group(device: torch.device, *, timeout: timedelta = timedelta(minutes=10)) -> Iterator[None]:
    """The default process group for the body: the launcher's ranks, or this process alone. NCCL on GPUs, else gloo."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if launched_world_size() > 1:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()
