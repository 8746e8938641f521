"""Schedules of micro-batches through a pipeline's stages, and forwards without a backward.

The engine, torch.distributed.pipelining, imports torch._dynamo and DTensor; only programs that run a pipeline need it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

from megalin.errors import ConfigError
from megalin.parallel.config import PPTransferName, ScheduleName
from megalin.parallel.p2p_copies import P2PChannels, open_channels
from megalin.parallel.pipeline_parallel import LOSS_DTYPE, PipelineParallel
from megalin.parallel.rank_failures import default_rendezvous


class _Received(dict[int, Any]):
    """Receive buffers of a stage by micro-batch, without the memory that the engine allocates for all beforehand."""

    def __setitem__(self, micro_batch: int, infos: Any) -> None:
        super().__setitem__(micro_batch, infos)
        self.move(micro_batch, "meta")

    def move(self, micro_batch: int, device: torch.device | str) -> None:
        """Replaces a micro-batch's buffers by uninitialised ones on `device`; "meta" frees their memory."""
        for info in self[micro_batch]:
            buffer = getattr(info, "buffer", None)  # None for the input of the first stage
            if buffer is not None:
                info.buffer = torch.empty_like(buffer, device=device).requires_grad_(buffer.requires_grad)


class _Stage(PipelineStage):
    """A stage whose receive buffers have memory only from the receive's start to their use, so only for micro-batches
    in flight."""

    args_recv_info: _Received
    grad_recv_info: _Received

    def __init__(
        self, module: nn.Module, index: int, pp: PipelineParallel, device: torch.device, inputs: Tensor, outputs: Tensor
    ) -> None:
        """Stage `index`, with meta tensors of the shapes of its `inputs` and `outputs`."""
        super().__init__(module, index, pp.num_stages, device, input_args=inputs, output_args=outputs, group=pp.group)
        self.args_recv_info, self.grad_recv_info = _Received(), _Received()
        self._launches = pp.launches

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self.args_recv_info.move(fwd_chunk_id, self.device)
        return self._recorded(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self.grad_recv_info.move(bwd_chunk_id, self.device)
        return self._recorded(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._recorded(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._recorded(super().get_bwd_send_ops(bwd_chunk_id))

    def _recorded(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """Records in the heartbeat the transfers that the engine launches next."""
        for op in ops:
            name = "receive from" if op.op is dist.irecv else "send to"
            self._launches.record(f"{name} rank {op.peer}", "pp", op.tensor.shape)
        return ops

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
            loss.detach_()  # the engine keeps losses to the end of the step, which would keep their graphs alive


class _CopyingStage(_Stage):
    """A stage whose neighbours' copy engines write into its memory: the engine gets nothing to send or receive.

    The n-th stage of a rank receives activations on the rank's channel 2 n, and gradients on channel 2 n + 1.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        pp: PipelineParallel,
        device: torch.device,
        inputs: Tensor,
        outputs: Tensor,
        channels: P2PChannels,
    ) -> None:
        super().__init__(module, index, pp, device, inputs, outputs)
        own, before, after = (2 * (stage // pp.size) for stage in (index, index - 1, index + 1))
        if not self.is_first:
            peer = (index - 1) % pp.size
            self._activations_in, self._gradients_out = channels.receiver(peer, own), channels.sender(peer, before + 1)
        if not self.is_last:
            peer = (index + 1) % pp.size
            self._activations_out, self._gradients_in = channels.sender(peer, after), channels.receiver(peer, own + 1)

    def _recorded(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        return ops  # the channels record them

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
    """Shape and dtype of the activations sent between stages."""

    shape: tuple[int, ...]
    """[B, T/cp or T/(cp tp), D]"""
    dtype: torch.dtype

    def empty(self, device: torch.device | str) -> Tensor:
        """An uninitialised tensor of this shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def make_schedule(
    name: ScheduleName,
    pp: PipelineParallel,
    modules: Sequence[nn.Module],
    hidden_states: HiddenStatesShape,
    *,
    tokens: Tensor,
    num_micro_batches: int,
    loss: Callable[[Tensor, Tensor], Tensor],
    transfer: PPTransferName,
) -> Schedule1F1B | ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble:
    """The schedule of one step of this rank's stages, run by torch.distributed.pipelining (the engine). Losses are
    summed: nothing is divided by the number of micro-batches.

    Args:
        modules: this rank's stages in order: tokens or hidden states in, hidden states or the last stage's loss sum
            out.
        hidden_states: of one micro-batch. Given in advance, the engine does not run the model to infer it.
        tokens: [B, T/cp] of one micro-batch, for its shape.
        loss: of the last stage's output and a micro-batch's labels.
        transfer: transport of the hidden states.

    Raises:
        ConfigError: `transfer` "symmetric_memory" where that is not possible.
    """
    # The first operation of a NCCL group must not be one of neighbours only.
    pp.sum(torch.zeros(1, device=tokens.device))
    template = hidden_states.empty("meta").requires_grad_()
    last = torch.empty(1, dtype=LOSS_DTYPE, device="meta", requires_grad=True)
    channels = _open_stage_channels(pp, hidden_states, tokens.device, transfer)
    stages = []
    for index, module in zip(pp.own_stages(), modules, strict=True):
        inputs = torch.empty_like(tokens, device="meta") if index == 0 else template
        outputs = last if index == pp.num_stages - 1 else template
        if channels is None:
            stages.append(_Stage(module, index, pp, tokens.device, inputs, outputs))
        else:
            stages.append(_CopyingStage(module, index, pp, tokens.device, inputs, outputs, channels))
    options: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
    if name == "1f1b":
        return Schedule1F1B(stages[0], num_micro_batches, **options)
    cls = ScheduleInterleaved1F1B if name == "interleaved" else ScheduleInterleavedZeroBubble
    return cls(list(stages), num_micro_batches, **options)


def _open_stage_channels(
    pp: PipelineParallel, hidden_states: HiddenStatesShape, device: torch.device, transfer: PPTransferName
) -> P2PChannels | None:
    """Opens two channels into each stage; None where the process group sends."""
    if transfer == "p2p":
        return None
    assert pp.group is not None
    num_channels = 2 * pp.num_stages // pp.size
    channels = open_channels(
        num_channels,
        *hidden_states,
        device,
        group=pp.group,
        timeout=default_rendezvous().timeout,
        launches=pp.launches,
    )
    if isinstance(channels, P2PChannels):
        return channels
    if transfer == "symmetric_memory":
        raise ConfigError(f'parallel.pp_transfer = "symmetric_memory", but {channels}; use "auto" or "p2p"')
    return None


@torch.no_grad()
def forward_through(
    pp: PipelineParallel,
    modules: Sequence[nn.Module],
    hidden_states: HiddenStatesShape,
    tokens: Tensor,
    options: Mapping[str, Any],
) -> Any:
    """Runs one forward without a backward of this rank's stages, each once its input has arrived. A rank does not wait
    for later stages, so that batches follow each other through the pipeline.

    Args:
        tokens: [B, T/cp].
        options: keyword arguments of each stage.

    Returns:
        The last stage's result; None on ranks that do not run it.
    """
    output = None
    for index, module in zip(pp.own_stages(), modules, strict=True):
        x = tokens
        if index > 0:
            x = hidden_states.empty(tokens.device)
            with pp.launches.waiting(f"receive for stage {index}", "pp", x.shape):
                dist.recv(x, group=pp.group, group_src=(index - 1) % pp.size)
        output = module(x, **options)
        if index < pp.num_stages - 1:
            with pp.launches.waiting(f"send of stage {index}", "pp", output.shape):
                dist.send(output.contiguous(), group=pp.group, group_dst=(index + 1) % pp.size)
            output = None
    return output
