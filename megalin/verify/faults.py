"""Named faults that the self-test plants, each a mistake that parallel code really makes.

A fault is a subclass that overrides one method of the mesh or of one of its axes, or a change of the filled weights:
the code under test runs unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from megalin.model.config import EncoderConfig
from megalin.ops.scans.context_parallel import ShardDocuments
from megalin.parallel.collectives import Axis
from megalin.parallel.context_parallel import ContextParallel, ExchangeName
from megalin.parallel.linear import ColumnParallelLinear
from megalin.parallel.mesh import Mesh
from megalin.parallel.pipeline_parallel import PipelineParallel
from megalin.parallel.tensor_parallel import TOKENS, TensorParallel, assign, full_tensor
from megalin.train.pipeline_model import Pipeline
from megalin.verify.case import Case


class _SkippedAdjoint(TensorParallel):
    """Entering the sharded region forgets to sum the ranks' gradients."""

    def enter(self, x: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return x
        whole = super().enter(x.detach())
        mine = self.local_slice(whole, dim=TOKENS)
        return torch.cat(
            [
                x if rank == self.axis.rank else part
                for rank, part in enumerate(whole.split(mine.shape[TOKENS], TOKENS))
            ],
            dim=TOKENS,
        )

    def all_gather_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(self.enter(x), weight, bias)


class _NormOfOneShard(TensorParallel):
    """The full-width norm uses this rank's heads only, scaled as if all were alike."""

    def reduce_tokens(self, x: Tensor) -> Tensor:
        own = x * self.size
        return self.local_slice(own, dim=TOKENS) if self.sequence_parallel else own


class _DroppedPartialGradient(TensorParallel):
    """A replicated weight on sharded data keeps its partial gradient."""

    def all_reduce_gradient(self, weight: Tensor) -> Tensor:
        return weight


class _LocalCount(Mesh):
    """The loss is divided by this rank's own number of labels."""

    def sum_over_data(self, value: Tensor) -> Tensor:
        return value


ExchangeKind = Literal["decay", "fold", "halo", "heads", "sum", "neighbours"]
"""What crosses from shard to shard: states, with decays among them or without; and `ContextParallel`'s other ways."""


class Probe(ContextParallel):
    """Notes which exchanges a model makes."""

    def __init__(self, axis: Axis | None = None, *, exchange: ExchangeName = "auto") -> None:
        super().__init__(axis, exchange=exchange)
        self.made: set[ExchangeKind] = set()

    def entering(self, state: Tensor, log_decay: Tensor, documents: ShardDocuments) -> Tensor:
        self.made |= {"fold", "decay"} if log_decay.any() else {"fold"}
        return super().entering(state, log_decay, documents)

    def halo(self, x: Tensor, documents: ShardDocuments, document_ids: Tensor | None, *, width: int) -> Tensor:
        self.made.add("halo")
        return super().halo(x, documents, document_ids, width=width)

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.made.add("heads")
        return super().to_heads(*tensors)

    def all_reduce_both(self, x: Tensor) -> Tensor:
        self.made.add("sum")
        return super().all_reduce_both(x)

    def neighbouring_run_sums(self, first: Tensor, last: Tensor, documents: ShardDocuments) -> tuple[Tensor, Tensor]:
        self.made.add("neighbours")
        return super().neighbouring_run_sums(first, last, documents)


class _DroppedDecay(ContextParallel):
    """A state passes through a rank's tokens as if they forgot nothing."""

    def entering(self, state: Tensor, log_decay: Tensor, documents: ShardDocuments) -> Tensor:
        return super().entering(state, torch.zeros_like(log_decay), documents)

    def leaving_gradient(self, gradient: Tensor, log_decay: Tensor, documents: ShardDocuments) -> Tensor:
        return super().leaving_gradient(gradient, torch.zeros_like(log_decay), documents)


class _WrongNeighbour(ContextParallel):
    """A rank takes its own tokens' state for that of the rank before."""

    def entering(self, state: Tensor, log_decay: Tensor, documents: ShardDocuments) -> Tensor:
        return super().entering(state, log_decay, documents._replace(continues=documents.continues.roll(1, dims=1)))

    def leaving_gradient(self, gradient: Tensor, log_decay: Tensor, documents: ShardDocuments) -> Tensor:
        documents = documents._replace(continues=documents.continues.roll(1, dims=1))
        return super().leaving_gradient(gradient, log_decay, documents)


class _MissingAdjoint(ContextParallel):
    """The state that enters gives no gradient to the ranks it came from."""

    def leaving_gradient(self, gradient: Tensor, log_decay: Tensor, documents: ShardDocuments) -> Tensor:
        return torch.zeros_like(super().leaving_gradient(gradient, log_decay, documents))


class _MissingHalo(ContextParallel):
    """A convolution or a window starts with the rank's first token."""

    def halo(self, x: Tensor, documents: ShardDocuments, document_ids: Tensor | None, *, width: int) -> Tensor:
        return torch.zeros_like(super().halo(x, documents, document_ids, width=width))


class _MissingHaloAdjoint(ContextParallel):
    """The inputs that a convolution or a window borrows give no gradient to the ranks they came from."""

    def halo(self, x: Tensor, documents: ShardDocuments, document_ids: Tensor | None, *, width: int) -> Tensor:
        return super().halo(x.detach(), documents, document_ids, width=width)


class _SwappedSplitOrder(ContextParallel):
    """The ranks' tokens are joined in another order."""

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.cat(x.chunk(self.size, TOKENS)[::-1], TOKENS) for x in super().to_heads(*tensors))


class _MissingExchangeAdjoint(ContextParallel):
    """Tokens of other ranks give their keys and values, and get no gradient for them."""

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        q, *others = tensors
        return super().to_heads(q, *(x.detach() + 0.0 * x for x in others))


class _LocalSum(ContextParallel):
    """A sum over the row is that over a rank's own tokens."""

    def all_reduce_both(self, x: Tensor) -> Tensor:
        return x * self.size


class _MissingSumAdjoint(ContextParallel):
    """A sum over the row is whole, and its gradient that of a rank's own use."""

    def all_reduce_both(self, x: Tensor) -> Tensor:
        return super().all_reduce_both(x.detach()) + x - x.detach()


class _MissingNeighbours(ContextParallel):
    """A window ends with the rank's tokens."""

    def neighbouring_run_sums(self, first: Tensor, last: Tensor, documents: ShardDocuments) -> tuple[Tensor, Tensor]:
        before, after = super().neighbouring_run_sums(first, last, documents)
        return torch.zeros_like(before), torch.zeros_like(after)


class _MissingNeighbourAdjoint(ContextParallel):
    """What a window's other tokens add gives no gradient to the ranks it came from."""

    def neighbouring_run_sums(self, first: Tensor, last: Tensor, documents: ShardDocuments) -> tuple[Tensor, Tensor]:
        return super().neighbouring_run_sums(first.detach(), last.detach(), documents)


def _split_across_parts(model: nn.Module, mesh: Mesh) -> None:
    """Fused matrices are cut as one long matrix, across their parts."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear) and module.parts > 1:
            pieces = full_tensor(module.weight.detach()).flatten(0, 1).chunk(mesh.tp.size)  # [parts * out / tp, in]
            assign(module.weight, torch.cat([piece.unflatten(0, (module.parts, -1)) for piece in pieces], dim=1))


class _UnsummedCopies(PipelineParallel):
    """A parameter that several stages hold keeps the gradient of each stage's own use."""

    def sum_copies(self, copies: Sequence[nn.Parameter], holders: Axis) -> None:
        super().sum_copies(copies, Axis("copies"))


class _CountOfOneMicroBatch(Mesh):
    """The loss is divided by the number of labels of one micro-batch."""

    def count_labels(self, counts: Sequence[Tensor]) -> Tensor:
        return super().count_labels(counts[-1:])


def _reverse_blocks(model: nn.Module, mesh: Mesh) -> None:
    """A stage runs its blocks last to first."""
    assert isinstance(model, Pipeline), type(model)
    for stage in model.stages():
        blocks = dict(stage.blocks.named_children())
        for name in blocks:
            delattr(stage.blocks, name)
        for name, block in reversed(blocks.items()):
            stage.blocks.add_module(name, block)


class Fault(NamedTuple):
    """A mistake, and how it is planted."""

    name: str
    axis: Literal["tp", "data", "cp", "pp"]
    """The axis that shows it: of 2 ranks, of cp 3, since the state that enters the first of two is zero."""
    tensor_parallel: type[TensorParallel] = TensorParallel
    context_parallel: type[ContextParallel] = ContextParallel
    pipeline_parallel: type[PipelineParallel] = PipelineParallel
    mesh: type[Mesh] = Mesh
    after_fill: Callable[[nn.Module, Mesh], None] | None = None
    needs_low_rank: bool = False
    """Only visible with a replicated weight, or a norm without a mean, on sharded data, of which softmax attention has
    neither, or with a stage of several blocks or a tied table: the case gets a block more that has both, and ties."""
    decoder_only: bool = False
    """In a code path that encoders do not have."""
    exchange: ExchangeKind | None = None
    """Of context parallelism: what only models that make it can show."""


FAULTS = (
    Fault("skipped_adjoint", "tp", tensor_parallel=_SkippedAdjoint),
    Fault("norm_of_one_shard", "tp", tensor_parallel=_NormOfOneShard, needs_low_rank=True, decoder_only=True),
    Fault(
        "dropped_partial_gradient",
        "tp",
        tensor_parallel=_DroppedPartialGradient,
        needs_low_rank=True,
        decoder_only=True,
    ),
    Fault("local_count", "data", mesh=_LocalCount),
    Fault("wrong_part_split", "tp", after_fill=_split_across_parts, decoder_only=True),
    Fault("dropped_decay", "cp", context_parallel=_DroppedDecay, exchange="decay"),
    Fault("wrong_neighbour", "cp", context_parallel=_WrongNeighbour, exchange="fold"),
    Fault("missing_adjoint", "cp", context_parallel=_MissingAdjoint, exchange="fold"),
    Fault("missing_halo", "cp", context_parallel=_MissingHalo, exchange="halo"),
    Fault("missing_halo_adjoint", "cp", context_parallel=_MissingHaloAdjoint, exchange="halo"),
    Fault("swapped_split_order", "cp", context_parallel=_SwappedSplitOrder, exchange="heads"),
    Fault("missing_exchange_adjoint", "cp", context_parallel=_MissingExchangeAdjoint, exchange="heads"),
    Fault("local_sum", "cp", context_parallel=_LocalSum, exchange="sum"),
    Fault("missing_sum_adjoint", "cp", context_parallel=_MissingSumAdjoint, exchange="sum"),
    Fault("missing_neighbours", "cp", context_parallel=_MissingNeighbours, exchange="neighbours"),
    Fault("missing_neighbour_adjoint", "cp", context_parallel=_MissingNeighbourAdjoint, exchange="neighbours"),
    Fault("unsummed_copies", "pp", pipeline_parallel=_UnsummedCopies, needs_low_rank=True),
    Fault("reversed_blocks", "pp", after_fill=_reverse_blocks, needs_low_rank=True),
    Fault("count_of_one_micro_batch", "pp", mesh=_CountOfOneMicroBatch),
)


def visible_faults(case: Case, made: set[ExchangeKind]) -> list[Fault]:
    """Those that the mesh of `case` shows in a model of its kind that makes these exchanges."""
    parallel, encoder = case.parallel, isinstance(case.model, EncoderConfig)
    data_size = case.data_size * parallel.cp
    shown = {"tp": parallel.tp > 1, "data": data_size > 1, "cp": parallel.cp > 2, "pp": parallel.pp > 1}
    faults = [fault for fault in FAULTS if shown[fault.axis] and not (encoder and fault.decoder_only)]
    return [fault for fault in faults if fault.exchange is None or fault.exchange in made]
