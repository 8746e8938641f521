"""The mesh: the pipeline, data, context- and tensor-parallel axes that the ranks of a run form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megalin.errors import ConfigError
from megalin.parallel.async_tensor_parallel import AsyncTPBuffers, open_async_tp_buffers
from megalin.parallel.collectives import Axis, all_reduce, axis_of, covering_axes
from megalin.parallel.config import ParallelConfig
from megalin.parallel.context_parallel import ContextParallel
from megalin.parallel.heartbeats import Heartbeat, current
from megalin.parallel.launch_order import LaunchOrder
from megalin.parallel.pipeline_parallel import PipelineParallel
from megalin.parallel.process_group import open_group
from megalin.parallel.rank_failures import default_rendezvous
from megalin.parallel.tensor_parallel import TensorParallel


class Mesh:
    """The axes of a run from this rank's view, over an initialised process group.

    Attributes:
        device_mesh: dimensions ("replicate", "shard", "tp"): the ranks of this rank's stages.
        data_mesh: dimensions ("replicate", "shard"), for sharded data parallelism.
        data: the data axis, replicate x shard: the ranks that share weights, and sum gradients, losses and counts.
        data_group: its process group.
        samples: the sub-axis of data whose ranks read different samples, data / cp.
        zero: the ZeRO stage of the shard axis; 0 where it has one rank.
        cp: the context-parallel axis for layers: neighbours on the data axis that share their samples.
        tp: the tensor-parallel axis for layers.
        tp_group: its process group.
        pp: the pipeline axis: ranks that have other layers and read the same samples.
        launches: this rank's heartbeat, which records its launches.
        launch_order: those of async tensor parallelism, which the ranks of the tensor-parallel axis compare.
        device: this rank's device.
    """

    def __init__(
        self,
        config: ParallelConfig,
        device: torch.device,
        *,
        tensor_parallel: type[TensorParallel] = TensorParallel,
        context_parallel: type[ContextParallel] = ContextParallel,
        pipeline_parallel: type[PipelineParallel] = PipelineParallel,
    ) -> None:
        """Raises ConfigError where the axes do not fit the number of ranks, or a transfer the devices; needs an
        initialised process group."""
        check_world_size(config, dist.get_world_size())
        check_device(config, device.type)
        data_size = dist.get_world_size() // (config.tp * config.pp)
        shard = config.shard_size(data_size)
        self.zero = config.zero_stage(data_size)
        self.config, self.device, self.launches = config, device, current()
        self._root = _stage_mesh(config, device, replicate=data_size // shard, shard=shard, tp=config.tp)
        # Each slice of a mesh takes about a millisecond: these two are read in every step.
        self.data_mesh, tp_mesh = self._root["replicate", "shard"], self._root["tp"]
        self.tp_group = tp_mesh.get_group()
        self.data_group = open_group("data", self._root.mesh, -3, -2)
        self.data = axis_of("data", self.data_group)
        self.tp = tensor_parallel(
            axis_of("tp", self.tp_group),
            device_mesh=tp_mesh,
            sequence_parallel=config.sequence_parallel,
            buffers=_async_tp_buffers(config, device, self.tp_group, self.launches),
        )
        self.launch_order = LaunchOrder(self.launches, "tp") if self.tp.buffers is None else self.tp.buffers.order
        self.device_mesh, self.pp = self._root, pipeline_parallel()
        if config.pp > 1:
            self.device_mesh = self._root["replicate", "shard", "tp"]
            group = self._root["pp"].get_group()
            self.pp = pipeline_parallel(
                axis_of("pp", group),
                group=group,
                stages_per_rank=config.pp_stages_per_rank,
                launches=self.launches,
            )
        self.samples, cp = self.data, Axis("cp")
        if config.cp > 1:
            # Weights are not sharded over cp: a mesh of its own divides the same data axis another way.
            sample_mesh = _stage_mesh(config, device, samples=data_size // config.cp, cp=config.cp, tp=config.tp)
            self.samples, cp = (axis_of(name, sample_mesh[name].get_group()) for name in ("samples", "cp"))
        self.cp = context_parallel(cp, exchange=config.cp_exchange)

    @property
    def is_first_rank(self) -> bool:
        """True on global rank 0, which writes and prints."""
        return dist.get_rank() == 0

    def sum_over_data(self, value: Tensor) -> Tensor:
        """Sum of a tensor over the data axis, on every rank."""
        return all_reduce(value, self.data)

    def is_true_anywhere(self, flag: Tensor) -> Tensor:
        """True on every rank where the bool `flag` is true on any rank of the run."""
        found = flag.to(torch.float32)
        for axis in covering_axes(self._root):
            found = all_reduce(found, axis, operation="max")
        return found > 0

    def count_labels(self, counts: Sequence[Tensor]) -> Tensor:
        """Valid labels of a step, of this rank's counts [terms] a micro-batch: [terms], equal on every rank."""
        return self.sum_over_data(torch.stack(list(counts)).sum(0))


def check_world_size(config: ParallelConfig, world_size: int) -> None:
    """Raises ConfigError where `config` does not fit `world_size` ranks; needs no process group."""
    layers = config.pp * config.tp
    divided = f"{world_size} ranks / tp {config.tp}" + (f" / pp {config.pp}" if config.pp > 1 else "")
    if world_size % layers:
        name = "parallel.tp" if config.pp == 1 else "parallel.pp times parallel.tp"
        raise ConfigError(
            f"{name} = {layers} does not divide the number of ranks, {world_size}; "
            f"start a multiple of {layers} ranks (torchrun --nproc-per-node) or change {name}"
        )
    data_size = world_size // layers
    if data_size % config.cp:
        raise ConfigError(
            f"parallel.cp = {config.cp} does not divide the data axis of {data_size} ranks ({divided}); start a "
            f"multiple of {config.cp * layers} ranks (torchrun --nproc-per-node) or change parallel.cp"
        )
    if config.shard is not None and data_size % config.shard:
        raise ConfigError(
            f"parallel.shard = {config.shard} does not divide the data axis of {data_size} ranks ({divided}); use a "
            f"divisor of {data_size}, or leave it out to shard over all"
        )


def check_device(config: ParallelConfig, device_type: str) -> None:
    """Raises ConfigError where `config` needs another kind of device than that of the ranks."""
    if config.pp > 1 and config.pp_transfer == "symmetric_memory" and device_type != "cuda":
        raise ConfigError(
            'parallel.pp_transfer = "symmetric_memory" needs the copy engines of GPUs, but the ranks compute on '
            f'{device_type}; use "auto" or "p2p"'
        )
    if config.tp > 1 and config.tp_overlap == "symmetric_memory" and device_type != "cuda":
        raise ConfigError(
            'parallel.tp_overlap = "symmetric_memory" needs the copy engines of GPUs, but the ranks compute on '
            f'{device_type}; use "auto" or "none"'
        )


def _async_tp_buffers(
    config: ParallelConfig, device: torch.device, group: dist.ProcessGroup, launches: Heartbeat
) -> AsyncTPBuffers | None:
    """The buffers of async tensor parallelism in the tensor-parallel group; None where it is not used."""
    if not config.may_use_async_tp:
        return None
    buffers = open_async_tp_buffers(device, group=group, timeout=default_rendezvous().timeout, launches=launches)
    if isinstance(buffers, AsyncTPBuffers):
        return buffers
    if config.tp_overlap == "symmetric_memory":
        raise ConfigError(f'parallel.tp_overlap = "symmetric_memory", but {buffers}; use "auto" or "none"')
    return None


def _stage_mesh(config: ParallelConfig, device: torch.device, **sizes: int) -> DeviceMesh:
    """A mesh of these dimensions over the ranks of each stage, with "pp" before them where there are several."""
    dims = {"pp": config.pp, **sizes} if config.pp > 1 else sizes
    ranks = torch.arange(dist.get_world_size(), device="cpu").view(*dims.values())
    groups = [open_group(name, ranks, dim) for dim, name in enumerate(dims)]
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=tuple(dims))
