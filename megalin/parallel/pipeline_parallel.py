"""The pipeline axis: stages of layers on neighbouring ranks, the schedule of micro-batches, and what stages share.

Stage s runs on rank s % pp of the axis, so that with several stages a rank (interleaved) the model passes the ranks
as often. Only activations and their gradients travel between stages; every rank reads the same samples. A parameter
that several stages hold (a tied table, bounds of all layers) is equal on them by construction: its gradients are
summed over its holders after the last micro-batch, it counts once in the norm, and is saved once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

from megalin.errors import ConfigError
from megalin.parallel.collectives import COLLECTIVE_TIMEOUT, Axis, all_reduce
from megalin.parallel.p2p_copies import P2PChannels, open_channels
from megalin.parallel.process_group import open_groups
from megalin.parallel.tensor_parallel import local

ScheduleName = Literal["1f1b", "interleaved", "zero_bubble"]
PPTransferName = Literal["auto", "symmetric_memory", "p2p"]

LOSS_DTYPE = torch.float64
"""Dtype of the loss sum that the last stage gives."""


class PipelineParallel:
    """The pipeline axis: its size, the stages of this rank, and sums over stages. The default has size 1.

    Args:
        axis: this rank's view of the axis.
        group: the process group of the axis; none at size 1.
        stages_per_rank: stages that each rank runs.
    """

    def __init__(
        self, axis: Axis | None = None, *, group: dist.ProcessGroup | None = None, stages_per_rank: int = 1
    ) -> None:
        self.axis = Axis("pp") if axis is None else axis
        self.group = group
        self.num_stages = self.size * stages_per_rank

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return self.axis.size

    def own_stages(self) -> list[int]:
        """The stages of this rank, in the order of the forward."""
        return list(range(self.axis.rank, self.num_stages, self.size))

    def own(self, plan: Sequence[range]) -> list[range]:
        """The part of each stage of this rank, of a plan for all stages."""
        return [plan[stage] for stage in self.own_stages()]

    def sum(self, value: Tensor) -> Tensor:
        """Sum of a tensor over the axis, on every rank."""
        return all_reduce(value, self.axis)

    def axis_of_holders(self, stages: Sequence[int]) -> Axis:
        """The axis of the ranks that run any of `stages`; on other ranks one of size 1. A collective of all ranks of
        the run where these ranks are neither one nor all of the pipeline axis."""
        ranks = sorted({stage % self.size for stage in stages})
        if len(ranks) == 1:
            return Axis("copies")
        if len(ranks) == self.size:
            return self.axis
        apart = dist.get_world_size() // self.size  # pp is the outermost dimension of the mesh
        group = open_groups("copies", [[column + rank * apart for rank in ranks] for column in range(apart)])
        if group is None:
            return Axis("copies")
        return Axis("copies", group.size(), group.rank(), group.group_name)

    @torch.no_grad()
    def sum_copies(self, copies: Sequence[nn.Parameter], holders: Axis) -> None:
        """Sums the gradients of a parameter's copies: those of this rank's stages, then over its holders. The first
        of this rank gets the sum, the others none."""
        gradients = [local(copy.grad) for copy in copies if copy.grad is not None]
        assert len(gradients) == len(copies), f"{len(gradients)} gradients of {len(copies)} copies"
        gradients[0].copy_(all_reduce(torch.stack(gradients).sum(0), holders))
        for copy in copies[1:]:
            copy.grad = None


class _Received(dict[int, Any]):
    """What a stage receives, by micro-batch, without the memory that the engine takes for all of them beforehand."""

    def __setitem__(self, micro_batch: int, infos: Any) -> None:
        super().__setitem__(micro_batch, infos)
        self.move(micro_batch, "meta")

    def move(self, micro_batch: int, device: torch.device | str) -> None:
        """Gives a micro-batch's tensors memory on the device, with nothing in it; none on "meta"."""
        for info in self[micro_batch]:
            buffer = getattr(info, "buffer", None)  # none for what the first stage is given
            if buffer is not None:
                info.buffer = torch.empty_like(buffer, device=device).requires_grad_(buffer.requires_grad)


class _Stage(PipelineStage):
    """A stage that has memory for what it receives from the request to its use, so that no more micro-batches take some
    than are on their way."""

    args_recv_info: _Received
    grad_recv_info: _Received

    def __init__(
        self, module: nn.Module, index: int, pp: PipelineParallel, device: torch.device, given: Tensor, gives: Tensor
    ) -> None:
        """The stage of a number, which takes such a tensor as `given` and returns one as `gives`."""
        super().__init__(module, index, pp.num_stages, device, input_args=given, output_args=gives, group=pp.group)
        self.args_recv_info, self.grad_recv_info = _Received(), _Received()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self.args_recv_info.move(fwd_chunk_id, self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self.grad_recv_info.move(bwd_chunk_id, self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        self.args_recv_info.move(fwd_chunk_id, "meta")  # the backward's input keeps its memory
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self.grad_recv_info.move(bwd_chunk_id, "meta")
        if loss is not None:
            loss.detach_()  # the engine keeps losses to the end of the step, and with them what they were computed from


class _CopyingStage(_Stage):
    """A stage whose neighbours' copy engines write into its memory: the engine is given nothing to send or receive.

    A stage's lines are numbered by what it receives: twice its index among the rank's, for activations, and the next
    number for gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        pp: PipelineParallel,
        device: torch.device,
        given: Tensor,
        gives: Tensor,
        copies: P2PChannels,
    ) -> None:
        super().__init__(module, index, pp, device, given, gives)
        own, before, after = (2 * (stage // pp.size) for stage in (index, index - 1, index + 1))
        if not self.is_first:
            peer = (index - 1) % pp.size
            self._activations_in, self._gradients_out = copies.receiver(peer, own), copies.sender(peer, before + 1)
        if not self.is_last:
            peer = (index + 1) % pp.size
            self._activations_out, self._gradients_in = copies.sender(peer, after), copies.receiver(peer, own + 1)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        for op in super().get_fwd_send_ops(fwd_chunk_id):
            self._activations_out.send(op.tensor)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        for op in super().get_bwd_send_ops(bwd_chunk_id):
            self._gradients_out.send(op.tensor)
        return []

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        for op in super().get_fwd_recv_ops(fwd_chunk_id):
            self._activations_in.receive(op.tensor)
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        for op in super().get_bwd_recv_ops(bwd_chunk_id):
            self._gradients_in.receive(op.tensor)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)


class HiddenStatesShape(NamedTuple):
    """The activations that travel between stages."""

    shape: tuple[int, ...]
    """[B, T/cp or T/(cp tp), D]"""
    dtype: torch.dtype

    def empty(self, device: torch.device | str) -> Tensor:
        """Such a tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def make_schedule(
    name: ScheduleName,
    pp: PipelineParallel,
    modules: Sequence[nn.Module],
    stream: HiddenStatesShape,
    *,
    tokens: Tensor,
    num_micro_batches: int,
    loss: Callable[[Tensor, Tensor], Tensor],
    transfer: PPTransferName,
) -> Schedule1F1B | ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble:
    """The engine's schedule of one step of this rank's stages. Losses are summed: nothing is divided by the number of
    micro-batches.

    Args:
        modules: this rank's stages in order: tokens or stream in, stream or the last stage's loss sum out.
        stream: what travels for one micro-batch. Told beforehand, the engine need not run the model to learn it.
        tokens: [B, T/cp] of one micro-batch, for its shape.
        loss: of the last stage's output and a micro-batch's labels.
        transfer: how the stream travels.

    Raises:
        ConfigError: `transfer` "symmetric_memory" where that is not possible.
    """
    # The first operation of a NCCL group must not be one of neighbours only.
    pp.sum(torch.zeros(1, device=tokens.device))
    template = stream.empty("meta").requires_grad_()
    last = torch.empty(1, dtype=LOSS_DTYPE, device="meta", requires_grad=True)
    copies = _open_lines(pp, stream, tokens.device, transfer)
    stages = []
    for index, module in zip(pp.own_stages(), modules, strict=True):
        given = torch.empty_like(tokens, device="meta") if index == 0 else template
        gives = last if index == pp.num_stages - 1 else template
        if copies is None:
            stages.append(_Stage(module, index, pp, tokens.device, given, gives))
        else:
            stages.append(_CopyingStage(module, index, pp, tokens.device, given, gives, copies))
    options: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
    if name == "1f1b":
        return Schedule1F1B(stages[0], num_micro_batches, **options)
    cls = ScheduleInterleaved1F1B if name == "interleaved" else ScheduleInterleavedZeroBubble
    return cls(list(stages), num_micro_batches, **options)


def _open_lines(
    pp: PipelineParallel, stream: HiddenStatesShape, device: torch.device, transfer: PPTransferName
) -> P2PChannels | None:
    """Two lines into each stage; None where the process group sends."""
    if transfer == "p2p":
        return None
    assert pp.group is not None
    num_lines = 2 * pp.num_stages // pp.size
    copies = open_channels(num_lines, *stream, device, group=pp.group, timeout=COLLECTIVE_TIMEOUT)
    if isinstance(copies, P2PChannels):
        return copies
    if transfer == "symmetric_memory":
        raise ConfigError(f'parallel.pp_transfer = "symmetric_memory", but {copies}; use "auto" or "p2p"')
    return None


@torch.no_grad()
def forward_through(
    pp: PipelineParallel,
    modules: Sequence[nn.Module],
    stream: HiddenStatesShape,
    tokens: Tensor,
    options: Mapping[str, Any],
) -> Any:
    """One forward without a backward of this rank's stages, each after what it waits for; a rank whose stages are done
    goes on, so that batches follow each other through the stages.

    Args:
        tokens: [B, T/cp].
        options: what each stage takes beside its first argument.

    Returns:
        What the last stage returns; None where another rank has it.
    """
    output = None
    for index, module in zip(pp.own_stages(), modules, strict=True):
        x = tokens
        if index > 0:
            x = stream.empty(tokens.device)
            dist.recv(x, group=pp.group, group_src=(index - 1) % pp.size)
        output = module(x, **options)
        if index < pp.num_stages - 1:
            dist.send(output.contiguous(), group=pp.group, group_dst=(index + 1) % pp.size)
            output = None
    return output
