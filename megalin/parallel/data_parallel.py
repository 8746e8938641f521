"""Sharded data parallelism: FSDP2 wraps every model at every size, and owns weights, casts and reductions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor, Shard

from megalin.parallel.collectives import SYNCHRONOUS_DEVICES, wait_tensor
from megalin.parallel.compute_waits import ComputeWaits, measuring_cuda_stream
from megalin.parallel.embedding import VocabParallelEmbedding
from megalin.parallel.heartbeats import current
from megalin.parallel.mesh import Mesh
from megalin.parallel.observers import CollectiveObserver
from megalin.parallel.shard_dim import shard_dim
from megalin.parallel.tensor_parallel import local

_ONE_BACKWARD = "_one_backward"
"""Attribute of a model whose gradients would be added in the compute dtype, so that a step may have one backward."""


def shard_model(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    full_precision: Sequence[nn.Module],
    mesh: Mesh,
    *,
    compute_dtype: torch.dtype,
    head: VocabParallelEmbedding | None = None,
    accumulates: bool = True,
    reduces: bool = True,
) -> None:
    """Shards `model` in place over the data axis. FSDP units are each block, the head, and the rest as one.

    Weights and optimizer state stay in fp32, computation is in `compute_dtype`, gradients are reduced in fp32
    (everything in fp64 for a model in fp64). Gradients are summed, not averaged: the loss carries its own global
    denominator. `mesh.zero` decides which tensors stay unsharded between their uses.

    Args:
        blocks: the model's blocks, in the order of the forward.
        full_precision: submodules whose parameters feed exponentials or positions; they compute in fp32.
        head: the table of the logits, if it is not shared: its gather and the reduction of its gradient overlap with
            the blocks.
        accumulates: False: every step has one micro-batch. Then on a data axis of one rank gradients stay in the
            compute dtype until `finish_backward`: nothing is added to them.
        reduces: False: gradients stay unsharded, in the compute dtype, for `take_gradients` and `set_gradients`.
    """
    reduce_dtype = torch.promote_types(compute_dtype, torch.float32)
    kept = reduces and not accumulates and mesh.data_mesh.size() == 1
    setattr(model, _ONE_BACKWARD, kept)
    of_low = reduce_dtype if reduces and not kept else compute_dtype
    low = MixedPrecisionPolicy(compute_dtype, of_low, cast_forward_inputs=False)
    full = MixedPrecisionPolicy(reduce_dtype, reduce_dtype, cast_forward_inputs=False)
    data_mesh = mesh.data_mesh

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(shard_dim(tuple(local(parameter).shape), data_mesh.size(1)))

    def wrap(module: nn.Module | list[nn.Module], policy: MixedPrecisionPolicy, reshard: bool) -> None:
        fully_shard(
            module, mesh=data_mesh, mp_policy=policy, reshard_after_forward=reshard, shard_placement_fn=placement
        )

    if full_precision:
        wrap(list(full_precision), full, False)
    # At stage 0 the backward would cast the weights a second time. In a pipeline, which has stage 1 at most, the
    # engine's split backward finds only gradients of unsharded weights, and each micro-batch would gather them twice.
    for block in blocks:
        wrap(block, low, mesh.zero == 3)
    if head is not None:
        wrap(head, low, False)
        for method in ("logits", "loss_sum", "token_scores"):
            register_fsdp_forward_method(head, method)
    wrap(model, low, False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if data_mesh.size() > 1:  # the engine divides by one in a pass of its own
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
            module.set_custom_all_gather(_RecordedAllGather())
            module.set_custom_reduce_scatter(_SumOfOneRank() if data_mesh.size(1) == 1 else _RecordedReduceScatter())


class _RecordedAllGather(DefaultAllGather):
    """All-gather of a unit's weights, which the heartbeat records."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gathers; waits for the other ranks on synchronous devices without `async_op`."""
        with _recorded("all_gather of weights", input_tensor, async_op):
            return super().__call__(output_tensor, input_tensor, group, async_op)


class _RecordedReduceScatter(DefaultReduceScatter):
    """Reduce-scatter of a unit's gradients, which the heartbeat records."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work:
        """Reduces; waits for the other ranks on synchronous devices without `async_op`."""
        with _recorded("reduce_scatter of gradients", input_tensor, async_op):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)


def _recorded(op: str, x: Tensor, async_op: bool) -> AbstractContextManager[None]:
    """Records a collective of the body, in which the host waits for other ranks on synchronous devices."""
    heartbeat = current()
    if x.device.type in SYNCHRONOUS_DEVICES and not async_op:
        return heartbeat.waiting(op, "shard", x.shape)
    heartbeat.record(op, "shard", x.shape)
    if heartbeat.observer is None or async_op:
        return nullcontext()
    return heartbeat.observer.collective(op, "shard", x.shape)


class _SumOfOneRank(DefaultReduceScatter):
    """Reduce-scatter on a shard axis of one rank. FSDP allocates memory for a unit's gradients, then for their sum over
    ranks, and copies the first into the second; given the same tensor twice, it has nothing to copy."""

    def __init__(self) -> None:
        self._collected: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of `size`, the same at each second call as at the call before."""
        if self._collected is None:
            self._collected = super().allocate(size, dtype=dtype, device=device)
            return self._collected
        collected, self._collected = self._collected, None
        assert (*collected.shape, collected.dtype) == (*size, dtype), (collected.shape, size)
        return collected


def reshard(model: nn.Module) -> None:
    """Frees the weights that a forward without a backward left gathered; parameters are shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def prepare_backward(model: nn.Module, mesh: Mesh, *, last: bool, reduces: bool = True) -> None:
    """Configures the reductions and resharding of the next micro-batch's backward by `mesh.zero`.

    Gradients are reduced over the shard axis in each backward (2, 3), or accumulated unsharded until the `last` one of
    a step (0, 1), which alone sums them over replicas; weights stay gathered until the last one (0, 1, 2) or are freed
    (3). On a data axis of one rank gradients stay unsharded; `finish_backward` takes them after the last one.

    Args:
        reduces: False: FSDP reduces no gradient, and keeps weights gathered after the last backward too, until
            `set_gradients`.
    """
    assert isinstance(model, FSDPModule), type(model)
    assert last or not getattr(model, _ONE_BACKWARD, False), "the model was built for steps of one micro-batch"
    reduce = reduces and mesh.data_mesh.size() > 1 and (last or mesh.zero >= 2)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(reduce, recurse=False)
            module.set_requires_all_reduce(last, recurse=False)
            module.set_reshard_after_backward(reduces and (last or mesh.zero == 3), recurse=False)
    model.set_is_last_backward(last)


def finish_backward(model: nn.Module, mesh: Mesh) -> None:
    """Sets the weights' gradients after the last micro-batch's backward on a data axis of one rank, or adds to those
    there, in fp32 or the weight's `grad_dtype`. FSDP's reduction would have cast each unit's gradients into one buffer,
    by a table that the host sends to the device."""
    if mesh.data_mesh.size() > 1:
        return
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for weight in [] if group is None else group.fsdp_params:
            full = weight._unsharded_param
            gradient = full.grad if weight.unsharded_accumulated_grad is None else weight.unsharded_accumulated_grad
            if gradient is not None:
                shard = weight.sharded_param
                # Of a replicated weight it may be the pending result of a collective, which has no address.
                gradient = weight.to_sharded_dtensor(wait_tensor(local(gradient)).to(shard.grad_dtype))
                shard.grad = gradient if shard.grad is None else shard.grad + gradient
            full.grad, weight.unsharded_accumulated_grad = None, None


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Takes the unsharded gradients of a micro-batch out of a model that does not reduce them: plain tensors in the
    compute dtype of their unit, by name of the weight; weights without one are left out."""
    found = {}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            found[name], weight.grad = wait_tensor(local(weight.grad)), None
    return found


def set_gradients(model: nn.Module, gradients: Mapping[str, Tensor], mesh: Mesh) -> None:
    """Frees the gathered weights, and sets the gradient of each weight's shard from a whole one, equal on every rank of
    the data axis."""
    reshard(model)
    size, rank = mesh.data_mesh.size(1), mesh.data_mesh.get_local_rank(1)
    weights = dict(model.named_parameters())
    for name, whole in gradients.items():
        weight = weights[name]
        assert isinstance(weight, DTensor), name
        dim = shard_dim(tuple(whole.shape), size)
        chunks = whole.chunk(size, dim)  # as FSDP shards: of uneven lengths, the last ranks have less or nothing
        own = chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)
        assert own.shape == local(weight).shape, (name, own.shape, local(weight).shape)
        if weight.grad_dtype != own.dtype:
            weight.grad_dtype = own.dtype
        weight.grad = DTensor.from_local(
            own if size == 1 else own.clone(memory_format=torch.contiguous_format),  # which frees the whole one
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )


def measure_waits(model: nn.Module, waits: ComputeWaits) -> None:
    """Measures from now on the compute stream's waits for FSDP's collectives, of a model that has run on a GPU.

    FSDP records an event after each collective on its stream: of an all-gather of weights, a reduce-scatter or
    all-reduce of gradients. The compute stream waits for it before the unit's forward or backward, before the next
    unit's gradients take the memory of the collective, and at the end of the last backward.
    """
    assert isinstance(model, FSDPModule), type(model)
    context = model._get_fsdp_state()._comm_ctx
    for name in ("all_gather_stream", "reduce_scatter_stream", "all_reduce_stream"):
        setattr(context, name, measuring_cuda_stream(getattr(context, name), waits))


class _AllReduceStream(torch.cuda.Stream):
    """FSDP's CUDA stream of all-reduces over replicas, with an observer: before each one it waits for another stream,
    and after it records an event."""

    observer: CollectiveObserver
    plain: torch.cuda.Stream
    observed: AbstractContextManager[None] = nullcontext()

    def wait_event(self, event: Any) -> None:
        """Waits for an event, which `wait_stream` records on another CUDA stream."""
        super().wait_event(event)
        with torch.cuda.stream(self):
            self.observed = self.observer.collective("all_reduce of gradients", "replicate", ())
            self.observed.__enter__()

    def record_event(self, event: Any = None) -> Any:
        """Records `event`, or a new one of the plain stream."""
        with torch.cuda.stream(self):
            self.observed.__exit__(None, None, None)
        self.observed = nullcontext()
        return self.plain.record_event(event)


@contextmanager
def _observed_all_reduces(context: Any, observer: CollectiveObserver | None) -> Iterator[None]:
    """Observes the all-reduces over replicas that FSDP launches in the body.

    Args:
        context: FSDP's, with its CUDA streams.
    """
    if observer is None:
        yield
        return
    plain = context.all_reduce_stream
    found = _AllReduceStream(stream_id=plain.stream_id, device_index=plain.device_index, device_type=plain.device_type)
    found.observer, found.plain = observer, plain
    name = "all_reduce_stream"
    setattr(context, name, found)
    try:
        yield
    finally:
        setattr(context, name, plain)


@contextmanager
def ordered_cuda_streams(model: nn.Module) -> Iterator[None]:
    """Orders FSDP's CUDA streams of a model that has run, which gather weights and reduce gradients, after the current
    stream's work before the body, and before its work after the body: a CUDA graph that is captured of the body then
    contains all of their work, and ends with it. The heartbeat's observer observes all-reduces too."""
    assert isinstance(model, FSDPModule), type(model)
    context = model._get_fsdp_state()._comm_ctx
    outside = context.device_handle.current_stream()
    streams = [
        context.all_gather_copy_in_stream,
        context.all_gather_stream,
        context.reduce_scatter_stream,
        context.all_reduce_stream,
    ]
    for stream in streams:
        stream.wait_stream(outside)
    with _observed_all_reduces(context, current().observer):
        yield
    for stream in streams:
        outside.wait_stream(stream)
