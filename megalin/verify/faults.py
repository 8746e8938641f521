"""Named faults that the self-test plants, each a realistic mistake of parallel code.

A fault is a subclass that overrides one method of the mesh or of one of its axes, or a change of the initial weights:
the code under test runs unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from megalin.model.block import BlockOutput
from megalin.model.config import EncoderConfig
from megalin.model.language_model import LanguageModel, ModelState
from megalin.ops.scans.transition import DiagonalDecay, ShardDocuments, Transition
from megalin.parallel.collectives import Axis
from megalin.parallel.config import ExchangeName
from megalin.parallel.context_parallel import ContextParallel
from megalin.parallel.float8_matmuls import Float8Matmuls
from megalin.parallel.linear import ColumnParallelLinear
from megalin.parallel.mesh import Mesh
from megalin.parallel.pipeline_parallel import PipelineParallel
from megalin.parallel.tensor_parallel import TOKENS, TensorParallel, assign, full_tensor
from megalin.train.pipeline_model import Pipeline
from megalin.verify.case import Case
from megalin.verify.decoding import Plant


class _SkippedAdjoint(TensorParallel):
    """Omits the all-reduce of gradients where the sharded region begins."""

    def enter(self, x: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return x
        full = super().enter(x.detach())
        local = self.local_slice(full, dim=TOKENS)
        return torch.cat(
            [
                x if rank == self.axis.rank else shard
                for rank, shard in enumerate(full.split(local.shape[TOKENS], TOKENS))
            ],
            dim=TOKENS,
        )

    def all_gather_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(self.enter(x), weight, bias)


class _NormOfOneShard(TensorParallel):
    """Computes the full-width norm from this rank's heads only, scaled as if all ranks had the same."""

    def reduce_tokens(self, x: Tensor) -> Tensor:
        own = x * self.size
        return self.local_slice(own, dim=TOKENS) if self.sequence_parallel else own


class _DroppedPartialGradient(TensorParallel):
    """Omits the all-reduce of a replicated weight's partial gradient on sharded data."""

    def all_reduce_gradient(self, weight: Tensor) -> Tensor:
        return weight


class _OwnScale(TensorParallel):
    """Scales a row of FP8 codes by the maximum of this rank's part of it."""

    def max_over_shards(self, x: Tensor) -> Tensor:
        return x


class _NeighboursScale(TensorParallel):
    """Scales a token's FP8 codes by the magnitude of the token before it."""

    def max_over_shards(self, x: Tensor) -> Tensor:
        return super().max_over_shards(x).roll(1, 0)


class _LocalCount(Mesh):
    """Divides the loss by this rank's own number of labels."""

    def sum_over_data(self, value: Tensor) -> Tensor:
        return value


ExchangeKind = Literal["decay", "state", "halo", "heads", "sum", "neighbours"]
"""Kind of communication between sequence shards: states, with or without decays, and others of `ContextParallel`."""


class Probe(ContextParallel):
    """Records the communication between sequence shards of a model."""

    def __init__(self, axis: Axis | None = None, *, exchange: ExchangeName = "auto") -> None:
        super().__init__(axis, exchange=exchange)
        self.made: set[ExchangeKind] = set()

    def entering(self, state: Tensor, transition: Transition, documents: ShardDocuments) -> Tensor:
        self.made |= {"state", "decay"} if any(x.any() for x in transition.tensors()) else {"state"}
        return super().entering(state, transition, documents)

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


def _undecayed(transition: Transition) -> Transition:
    return DiagonalDecay(*(torch.zeros_like(x) for x in transition.tensors()))


class _DroppedDecay(ContextParallel):
    """Passes a state through a rank's tokens without decay."""

    def entering(self, state: Tensor, transition: Transition, documents: ShardDocuments) -> Tensor:
        return super().entering(state, _undecayed(transition), documents)

    def leaving_gradient(self, gradient: Tensor, transition: Transition, documents: ShardDocuments) -> Tensor:
        return super().leaving_gradient(gradient, _undecayed(transition), documents)


class _WrongNeighbour(ContextParallel):
    """Uses a rank's own state in place of the previous rank's."""

    def entering(self, state: Tensor, transition: Transition, documents: ShardDocuments) -> Tensor:
        return super().entering(state, transition, documents._replace(continues=documents.continues.roll(1, dims=1)))

    def leaving_gradient(self, gradient: Tensor, transition: Transition, documents: ShardDocuments) -> Tensor:
        documents = documents._replace(continues=documents.continues.roll(1, dims=1))
        return super().leaving_gradient(gradient, transition, documents)


class _MissingAdjoint(ContextParallel):
    """Drops the gradient of the entering state to the ranks that it came from."""

    def leaving_gradient(self, gradient: Tensor, transition: Transition, documents: ShardDocuments) -> Tensor:
        return torch.zeros_like(super().leaving_gradient(gradient, transition, documents))


class _MissingHalo(ContextParallel):
    """Starts a convolution or a window at the rank's first token."""

    def halo(self, x: Tensor, documents: ShardDocuments, document_ids: Tensor | None, *, width: int) -> Tensor:
        return torch.zeros_like(super().halo(x, documents, document_ids, width=width))


class _MissingHaloAdjoint(ContextParallel):
    """Drops the gradient of a convolution's or window's halo to the ranks that it came from."""

    def halo(self, x: Tensor, documents: ShardDocuments, document_ids: Tensor | None, *, width: int) -> Tensor:
        return super().halo(x.detach(), documents, document_ids, width=width)


class _SwappedSplitOrder(ContextParallel):
    """Concatenates the ranks' tokens in the wrong order."""

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.cat(x.chunk(self.size, TOKENS)[::-1], TOKENS) for x in super().to_heads(*tensors))


class _MissingExchangeAdjoint(ContextParallel):
    """Drops the gradient of keys and values to the other ranks that they came from."""

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        q, *others = tensors
        return super().to_heads(q, *(x.detach() + 0.0 * x for x in others))


class _LocalSum(ContextParallel):
    """Sums over a rank's own tokens instead of the full sequence."""

    def all_reduce_both(self, x: Tensor) -> Tensor:
        return x * self.size


class _MissingSumAdjoint(ContextParallel):
    """Sums over the full sequence, but with the gradient of a rank's own use only."""

    def all_reduce_both(self, x: Tensor) -> Tensor:
        return super().all_reduce_both(x.detach()) + x - x.detach()


class _MissingNeighbours(ContextParallel):
    """Ends a window at the rank's tokens."""

    def neighbouring_run_sums(self, first: Tensor, last: Tensor, documents: ShardDocuments) -> tuple[Tensor, Tensor]:
        before, after = super().neighbouring_run_sums(first, last, documents)
        return torch.zeros_like(before), torch.zeros_like(after)


class _MissingNeighbourAdjoint(ContextParallel):
    """Drops the gradient of a window's tokens on other ranks."""

    def neighbouring_run_sums(self, first: Tensor, last: Tensor, documents: ShardDocuments) -> tuple[Tensor, Tensor]:
        return super().neighbouring_run_sums(first.detach(), last.detach(), documents)


def _split_across_parts(model: nn.Module, mesh: Mesh) -> None:
    """Shards fused matrices as one long matrix, across their parts."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear) and module.parts > 1:
            pieces = full_tensor(module.weight.detach()).flatten(0, 1).chunk(mesh.tp.size)  # [parts * out / tp, in]
            assign(module.weight, torch.cat([piece.unflatten(0, (module.parts, -1)) for piece in pieces], dim=1))


class _UnsummedCopies(PipelineParallel):
    """Omits the sum of gradients of a parameter with copies on several stages."""

    def sum_copies(self, copies: Sequence[nn.Parameter], holders: Axis) -> None:
        super().sum_copies(copies, Axis("copies"))


class _CountOfOneMicroBatch(Mesh):
    """Divides the loss by the number of labels of one micro-batch."""

    def count_labels(self, counts: Sequence[Tensor]) -> Tensor:
        return super().count_labels(counts[-1:])


def _reverse_blocks(model: nn.Module, mesh: Mesh) -> None:
    """Reverses the order of a stage's blocks."""
    assert isinstance(model, Pipeline), type(model)
    for stage in model.stages():
        blocks = dict(stage.blocks.named_children())
        for name in blocks:
            delattr(stage.blocks, name)
        for name, block in reversed(blocks.items()):
            stage.blocks.add_module(name, block)


def _keep_scales(model: nn.Module, mesh: Mesh) -> None:
    """Keeps the scales of the initial weights."""
    for stage in model.stages() if isinstance(model, Pipeline) else [model]:
        stage.after_optimizer_step = lambda: None  # type: ignore[assignment]


def _transpose_scales(model: nn.Module, mesh: Mesh) -> None:
    """Scales the rows of weights by those of their transposes, and the other way round."""
    for matmuls in model.modules():
        if isinstance(matmuls, Float8Matmuls):
            outputs, inputs = matmuls.out_magnitudes.clone(), matmuls.in_magnitudes.clone()
            repeats = max(len(outputs), len(inputs))
            matmuls.out_magnitudes.copy_(inputs.repeat(repeats)[: len(outputs)])
            matmuls.in_magnitudes.copy_(outputs.repeat(repeats)[: len(inputs)])


def _forget_prompt(model: LanguageModel) -> None:
    """Decodes from an empty state in place of the prompt's."""
    reserve = model.reserve

    def reserve_empty(state: ModelState, num_tokens: int) -> ModelState:
        empty = model.initial_state(len(state.positions))
        return reserve(state._replace(blocks=empty.blocks, inputs=empty.inputs), num_tokens)

    model.reserve = reserve_empty  # type: ignore[method-assign]


def _drop_residual(model: LanguageModel) -> None:
    """Decodes with blocks that do not add to their input."""
    for block in model.block_list():
        block.step = partial(_step_alone, block.step)  # type: ignore[method-assign]


def _step_alone(step: Callable[..., BlockOutput], x: Tensor, *arguments: Any) -> BlockOutput:
    output = step(x, *arguments)
    return output._replace(x=output.x - x)


class Fault(NamedTuple):
    """Description of a mistake and of the way it is planted."""

    name: str
    axis: Literal["tp", "data", "cp", "pp", "any"]
    """Axis that exposes it, with 2 ranks, or 3 for cp, since the state that enters the first of two ranks is zero."""
    tensor_parallel: type[TensorParallel] = TensorParallel
    context_parallel: type[ContextParallel] = ContextParallel
    pipeline_parallel: type[PipelineParallel] = PipelineParallel
    mesh: type[Mesh] = Mesh
    after_init: Callable[[nn.Module, Mesh], None] | None = None
    needs_low_rank: bool = False
    """True if it is visible only with a replicated weight or a norm without a mean on sharded data (softmax attention
    has neither), with a stage of several blocks, or with tied embeddings: the case gets a block with both, and ties."""
    decoder_only: bool = False
    """True if it is in a code path that encoders do not have."""
    float8: bool = False
    """True if it is in FP8 matmuls."""
    exchange: ExchangeKind | None = None
    """Communication between sequence shards that a model must have for the fault to be visible."""
    decoding: Plant | None = None
    """Change of the model that decodes."""


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
    Fault("wrong_part_split", "tp", after_init=_split_across_parts, decoder_only=True),
    Fault("dropped_decay", "cp", context_parallel=_DroppedDecay, exchange="decay"),
    Fault("wrong_neighbour", "cp", context_parallel=_WrongNeighbour, exchange="state"),
    Fault("missing_adjoint", "cp", context_parallel=_MissingAdjoint, exchange="state"),
    Fault("missing_halo", "cp", context_parallel=_MissingHalo, exchange="halo"),
    Fault("missing_halo_adjoint", "cp", context_parallel=_MissingHaloAdjoint, exchange="halo"),
    Fault("swapped_split_order", "cp", context_parallel=_SwappedSplitOrder, exchange="heads"),
    Fault("missing_exchange_adjoint", "cp", context_parallel=_MissingExchangeAdjoint, exchange="heads"),
    Fault("local_sum", "cp", context_parallel=_LocalSum, exchange="sum"),
    Fault("missing_sum_adjoint", "cp", context_parallel=_MissingSumAdjoint, exchange="sum"),
    Fault("missing_neighbours", "cp", context_parallel=_MissingNeighbours, exchange="neighbours"),
    Fault("missing_neighbour_adjoint", "cp", context_parallel=_MissingNeighbourAdjoint, exchange="neighbours"),
    Fault("unsummed_copies", "pp", pipeline_parallel=_UnsummedCopies, needs_low_rank=True),
    Fault("reversed_blocks", "pp", after_init=_reverse_blocks, needs_low_rank=True),
    Fault("count_of_one_micro_batch", "pp", mesh=_CountOfOneMicroBatch),
    Fault("scale_of_one_rank", "tp", tensor_parallel=_OwnScale, float8=True),
    Fault("neighbours_token_scale", "tp", tensor_parallel=_NeighboursScale, float8=True),
    Fault("stale_weight_scale", "any", after_init=_keep_scales, float8=True),
    Fault("transposed_weight_scale", "any", after_init=_transpose_scales, float8=True),
    Fault("forgotten_prompt", "any", decoding=_forget_prompt, decoder_only=True),
    Fault("step_without_residual", "any", decoding=_drop_residual, decoder_only=True),
)


def visible_faults(case: Case, made: set[ExchangeKind]) -> list[Fault]:
    """The faults that are visible on the mesh of `case`, in a model of its kind with the communication `made`."""
    parallel, encoder = case.parallel, isinstance(case.model, EncoderConfig)
    data_size = case.data_size * parallel.cp
    visible = {"tp": parallel.tp > 1, "data": data_size > 1, "cp": parallel.cp > 2, "pp": parallel.pp > 1, "any": True}
    faults = [fault for fault in FAULTS if visible[fault.axis] and not (encoder and fault.decoder_only)]
    faults = [fault for fault in faults if case.float8 is not None or not fault.float8]
    faults = [fault for fault in faults if case.float8 is None or fault.decoding is None]
    return [fault for fault in faults if fault.exchange is None or fault.exchange in made]
