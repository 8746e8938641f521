"""The table [parallel] of a run: the arrangement of its ranks."""

from __future__ import annotations

from importlib.metadata import version
from typing import ClassVar, Literal, Self

import pydantic

from megalin.config import Change, Config

ExchangeName = Literal["auto", "all_gather", "ring"]
ScheduleName = Literal["1f1b", "interleaved", "zero_bubble"]
PPTransferName = Literal["auto", "symmetric_memory", "p2p"]
TPOverlapName = Literal["auto", "symmetric_memory", "none"]


class ParallelConfig(Config):
    """Arrangement of the ranks of a run. The data axis has the world / (pp tp) ranks that pipeline and tensor
    parallelism leave. On it each cp neighbours share their samples, so that dp = world / (pp tp cp) groups read
    different ones."""

    on_change: ClassVar[Change | None] = "reported"
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
        elif tuple(map(int, (torch_version := version("torch")).split(".")[:2])) < (2, 13):
            reason = f"torch {torch_version} loses gradients of weights there (2.13 does not)"
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
