"""The mesh: the pipeline, data, context- and tensor-parallel axes that the ranks of a run form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

import pydantic
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megalin.config import Config
from megalin.errors import ConfigError
from megalin.parallel.async_tensor_parallel import AsyncTPBuffers, TPOverlapName, open_async_tp_buffers
from megalin.parallel.collectives import Axis, all_reduce
from megalin.parallel.context_parallel import ContextParallel, ExchangeName
from megalin.parallel.heartbeats import Heartbeat, current
from megalin.parallel.launch_order import LaunchOrder
from megalin.parallel.pipeline_parallel import PipelineParallel, PPTransferName, ScheduleName
from megalin.parallel.process_group import open_group
from megalin.parallel.rank_failures import default_rendezvous
from megalin.parallel.tensor_parallel import TensorParallel


class ParallelConfig(Config):
    """Arrangement of the ranks of a run. The data axis has the world / (pp tp) ranks that pipeline and tensor
    parallelism leave. On it each cp neighbours share their samples, so that dp = world / (pp tp cp) groups read
    different ones."""

    tp: int = pydantic.Field(default=1, ge=1)
    """Ranks over which each layer's weights are sharded (tensor parallelism)."""
    cp: int = pydantic.Field(default=1, ge=1)
    """Ranks over which each sample is sharded: every one holds a run of neighbouring tokens (context parallelism)."""
    cp_exchange: ExchangeName = "auto"
    """Method of the state exchange, where cp > 1. all_gather: every rank gathers all states and sums them. ring: states
    go from rank to rank, each adding its own; less to send, and cp - 1 waits. Both give the same up to rounding. auto:
    all_gather."""
    pp: int = pydantic.Field(default=1, ge=1)
    """Ranks over which the layers are divided, each with neighbouring ones (pipeline parallelism)."""
    pp_schedule: ScheduleName = "1f1b"
    """Schedule of a step's micro-batches, where pp > 1. 1f1b: one stage a rank, forwards and backwards alternate.
    interleaved: pp_stages_per_rank stages a rank, which shortens the bubble (the wait at both ends of a step) and sends
    more. zero_bubble: as these, with gradients of weights deferred into the bubble; needs memory for the deferred
    work."""
    pp_stages_per_rank: int = pydantic.Field(default=1, ge=1)
    """Stages that a rank runs: 1 for 1f1b, at least 2 for interleaved, any for zero_bubble."""
    pp_transfer: PPTransferName = "auto"
    """Transfer of activations and their gradients between neighbouring stages, where pp > 1. symmetric_memory: copy
    engines write them into the neighbour's memory, and no multiprocessor waits for them; needs the axis's GPUs on one
    host, and memory for four activations a stage. p2p: the process group's sends and receives. auto: symmetric_memory
    where it is possible."""
    sequence_parallel: bool = False
    """Shard activations between layers along the sequence inside the tensor-parallel group."""
    tp_overlap: TPOverlapName = "auto"
    """Overlap of matmuls with the all-gathers and reduce-scatters of sequence_parallel (async tensor parallelism).
    symmetric_memory: copy engines write activations into the other ranks' memory while the matmul runs in chunks; needs
    the axis's GPUs on one host, and memory for two activations. none: the process group's collectives, before and after
    the matmul. auto: symmetric_memory where it is possible."""
    shard: int | None = pydantic.Field(default=None, ge=1)
    """Ranks of the data axis over which weights, gradients and optimizer state are sharded (FSDP2). Left out: all of
    them. 1: every rank keeps a replica. In between: hybrid, sharded inside groups of this size, replicated across."""
    zero: Literal[0, 1, 2, 3] | None = None
    """ZeRO stage: the tensors that those ranks keep unsharded during a step; less memory against more communication. 0:
    all, as with shard = 1. 1: weights in the compute dtype, gathered once a step, and gradients in fp32, reduced once a
    step. 2: weights alone; gradients are reduced after every micro-batch. 3: none; each block's weights are gathered
    for its forward and its backward. Left out: 3; with pp > 1, where micro-batches share a stage's gathered weights,
    1."""

    @pydantic.model_validator(mode="after")
    def _zero_fits_the_other_axes(self) -> Self:
        if self.zero == 0 and self.shard is not None and self.shard > 1:
            raise ValueError(
                f"zero = 0 shards nothing, but shard = {self.shard}; use zero 1, 2 or 3, or leave one of them out"
            )
        if self.zero and self.shard == 1:
            raise ValueError(
                f"zero = {self.zero} with shard = 1, which keeps a replica on every rank; leave out shard or zero"
            )
        if self.zero in (2, 3) and self.pp > 1:
            raise ValueError(
                f"zero = {self.zero} with pp = {self.pp} would gather weights or reduce gradients of a stage in every "
                "micro-batch; use zero = 0 or 1"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _tp_overlap_fits_the_other_axes(self) -> Self:
        if self.tp_overlap != "symmetric_memory" or self.tp == 1:
            return self
        if not self.sequence_parallel:
            raise ValueError(
                'tp_overlap = "symmetric_memory" without sequence_parallel, whose all-gathers and reduce-scatters it '
                'overlaps; set sequence_parallel = true, or tp_overlap = "auto"'
            )
        if not self.may_use_async_tp:
            raise ValueError(
                'tp_overlap = "symmetric_memory" with pp_schedule = "zero_bubble", which computes the gradients of '
                'weights and of activations separately, but the overlapped matmul gives both; use "auto" or "none"'
            )
        return self

    @property
    def may_use_async_tp(self) -> bool:
        """True where the settings allow async tensor parallelism; the device and the hosts may still rule it out."""
        zero_bubble = self.pp > 1 and self.pp_schedule == "zero_bubble"
        return self.tp > 1 and self.sequence_parallel and self.tp_overlap != "none" and not zero_bubble

    @pydantic.model_validator(mode="after")
    def _stages_fit_the_schedule(self) -> Self:
        if self.pp_schedule == "1f1b" and self.pp_stages_per_rank > 1:
            raise ValueError(
                f'pp_stages_per_rank = {self.pp_stages_per_rank} with pp_schedule = "1f1b", which runs one stage '
                'a rank; use 1, or pp_schedule = "interleaved"'
            )
        if self.pp_schedule == "interleaved" and self.pp_stages_per_rank == 1:
            raise ValueError(
                'pp_stages_per_rank = 1 with pp_schedule = "interleaved", which runs several stages a rank; use 2, or '
                'pp_schedule = "1f1b"'
            )
        return self

    def shard_size(self, data_size: int) -> int:
        """Ranks of a data axis of `data_size` over which weights, gradients and optimizer state are sharded."""
        if self.zero == 0:
            return 1
        return data_size if self.shard is None else self.shard

    def zero_stage(self, data_size: int) -> int:
        """The ZeRO stage on a data axis of `data_size` ranks; 0 where nothing is sharded."""
        if self.shard_size(data_size) == 1:
            return 0
        return (3 if self.pp == 1 else 1) if self.zero is None else self.zero

    def micro_batches_problem(self, count: int) -> str:
        """The reason why the schedule cannot run `count` micro-batches a step; empty where it can."""
        if self.pp == 1 or count % self.pp == 0:
            return ""
        if self.pp_schedule == "1f1b" and count > self.pp:
            return ""
        rule = "at least" if self.pp_schedule == "1f1b" else "a multiple of"
        return (
            f'pp_schedule = "{self.pp_schedule}" of parallel.pp = {self.pp} needs {rule} {self.pp} micro-batches a '
            f"step, not {count}"
        )

    def split_backward_problem(self, *, recompute: bool, compiled: bool) -> str:
        """The reason why the schedule cannot split the backward, and the remedy; empty where it can."""
        if self.pp == 1 or self.pp_schedule != "zero_bubble":
            return ""
        if recompute:
            reason = "recomputation would run each block's forward, collectives included, once more for its weights"
        elif compiled:
            reason = "a compiled block has one backward, for its input and its weights together"
        elif tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
            reason = f"torch {torch.__version__} loses gradients of weights there (2.13 does not)"
        else:
            return ""
        return (
            'pp_schedule = "zero_bubble" computes the gradients of weights apart from those of activations, but '
            f'{reason}; use pp_schedule = "interleaved" or "1f1b"'
        )

    def length_problem(self, length: int) -> str:
        """The reason why a sequence of `length` tokens cannot be sharded, and the remedy; empty where it can."""
        num_shards, names = self.cp, f"parallel.cp = {self.cp}"
        if self.sequence_parallel and self.tp > 1:
            num_shards *= self.tp
            of_tp = f"parallel.tp = {self.tp}, as parallel.sequence_parallel needs"
            names = of_tp if self.cp == 1 else f"{names} times {of_tp}"
        if length % num_shards == 0:
            return ""
        below = length // num_shards * num_shards
        return f"is not divisible by {names}; use {f'{below} or ' if below else ''}{below + num_shards}"


class Mesh:
    """The axes of a run from this rank's view, over an initialised process group.

    Attributes:
        device_mesh: dimensions ("replicate", "shard", "tp"): the ranks of this rank's stages.
        data: the data axis, replicate x shard: the ranks that share weights, and sum gradients, losses and counts.
        data_group: its process group.
        samples: the sub-axis of data whose ranks read different samples, data / cp.
        zero: the ZeRO stage of the shard axis; 0 where it has one rank.
        cp: the context-parallel axis for layers: neighbours on the data axis that share their samples.
        tp: the tensor-parallel axis for layers.
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
        tp_mesh = self._root["tp"]
        self.data_group = open_group("data", self._root.mesh, -3, -2)
        self.data = _axis("data", self.data_group)
        self.tp = tensor_parallel(
            _axis("tp", tp_mesh.get_group()),
            device_mesh=tp_mesh,
            sequence_parallel=config.sequence_parallel,
            buffers=_async_tp_buffers(config, device, tp_mesh.get_group(), self.launches),
        )
        self.launch_order = LaunchOrder(self.launches, "tp") if self.tp.buffers is None else self.tp.buffers.order
        self.device_mesh, self.pp = self._root, pipeline_parallel()
        if config.pp > 1:
            self.device_mesh = self._root["replicate", "shard", "tp"]
            group = self._root["pp"].get_group()
            self.pp = pipeline_parallel(
                _axis("pp", group),
                group=group,
                stages_per_rank=config.pp_stages_per_rank,
                launches=self.launches,
            )
        self.samples, cp = self.data, Axis("cp")
        if config.cp > 1:
            # Weights are not sharded over cp: a mesh of its own divides the same data axis another way.
            sample_mesh = _stage_mesh(config, device, samples=data_size // config.cp, cp=config.cp, tp=config.tp)
            self.samples, cp = (_axis(name, sample_mesh[name].get_group()) for name in ("samples", "cp"))
        self.cp = context_parallel(cp, exchange=config.cp_exchange)

    @property
    def data_mesh(self) -> DeviceMesh:
        """The two-dimensional mesh ("replicate", "shard") of sharded data parallelism."""
        return self._root["replicate", "shard"]

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """The process group of the tensor-parallel axis."""
        return self._root["tp"].get_group()

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


def _axis(name: str, group: dist.ProcessGroup) -> Axis:
    return Axis(name, group.size(), group.rank(), group.group_name)


def covering_axes(mesh: DeviceMesh) -> list[Axis]:
    """Axes over which successive reductions cover all ranks of a device mesh: one where these are all of the run, else
    one a dimension."""
    world = dist.group.WORLD
    assert world is not None, mesh
    groups = [world] if mesh.size() == world.size() else mesh.get_all_groups()
    return [_axis("mesh", group) for group in groups]
