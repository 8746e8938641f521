"""What the parts of a model cost on one rank of a tensor- and context-parallel mesh: each kind of block once."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megalin.layers.mixers.base import SequenceContext
from megalin.model.block import Block
from megalin.model.config import BlockConfig
from megalin.model.language_model import LanguageModel
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.linear_cross_entropy import chunk_rows
from megalin.parallel.fake_mesh import fake_mesh
from megalin.parallel.mesh import Mesh, ParallelConfig
from megalin.planner.graph_cost import COPY, CollectiveCost
from megalin.planner.hardware import GPUS_PER_HOST
from megalin.planner.tracing import RunCost, take_shape, trace, trace_compiled, without_values
from megalin.planner.workload import Workload, one_of_each


class LossCost(NamedTuple):
    """The head's product and the loss of a micro-batch."""

    forward_bytes: int
    """Most that they hold in the forward."""
    saved_bytes: int
    """What they keep for the backward."""
    backward_bytes: int
    """Most that they hold in the backward, what they kept included."""


class Trace(NamedTuple):
    """Costs of a micro-batch on one rank; exchanges carry the name of their axis as their group."""

    blocks: list[RunCost]
    """Of each entry of `model.layers`, one of its blocks."""
    entry: RunCost
    """The embedding and the input layers."""
    exit: RunCost
    """The last norm, and the way into the head."""
    loss: LossCost
    hidden_bytes: int
    """The residual stream."""
    copied_bytes: int = 0
    """The largest tensor [B, T, D] that copies bring to products; 0 where collectives do."""


def uses_async_tp(parallel: ParallelConfig) -> bool:
    """Whether products run beside copies of the stream: as `auto` chooses where the axis's GPUs share a host."""
    return parallel.may_use_async_tp and parallel.tp <= GPUS_PER_HOST


def trace_model(workload: Workload, parallel: ParallelConfig, micro_batch_size: int) -> Trace:
    """Runs one block of each entry without values, and what stands around the blocks.

    Args:
        parallel: of which tp, cp, how they exchange and sequence parallelism are read.
    """
    alone = parallel.model_copy(
        update={"pp": 1, "pp_schedule": "1f1b", "pp_stages_per_rank": 1, "shard": None, "zero": None}
    )
    with fake_mesh(alone, parallel.tp * parallel.cp, async_tp=uses_async_tp(parallel)) as mesh:
        model = LanguageModel(one_of_each(workload.model), mesh.tp, cp=mesh.cp)
        with without_values():
            take_shape(model, workload.dtype)
            return _trace(workload, model, mesh, micro_batch_size)


def _trace(workload: Workload, model: LanguageModel, mesh: Mesh, batch: int) -> Trace:
    config, dtype, length = workload.model, workload.dtype, workload.length // mesh.cp.size
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    # One document a row: what packed rows cost beside, an id a token, no figure shows. A backward frees the graph of
    # what mixers share, so each has a context of its own.
    new_context = partial(model.context, tokens, mesh.cp.positions(tokens), None, dtype)
    wide = compute_dtype(torch.empty(0, dtype=dtype)) if config.residual_dtype == "float32" else dtype
    split = mesh.tp.size if mesh.tp.sequence_parallel else 1
    stream = partial(torch.empty, batch, length // split, config.hidden_size, dtype=wide)
    names = {axis.group_name: axis.name for axis in (mesh.tp.axis, mesh.cp.axis) if axis.size > 1}
    blocks = []
    for block in model.block_list():
        contexts = block.contexts(new_context())

        def run(x: Tensor, block: Block = block, contexts: list[SequenceContext] = contexts) -> Tensor:
            return block(x, contexts, None).x

        cost = trace_compiled(block, run, stream(requires_grad=True)) if workload.compiled else None
        blocks.append(_named(cost or trace(block, run, stream(requires_grad=True)), names))
    # The embedding takes tokens: a zero that wants a gradient stands for them.
    entry = trace(
        model,
        lambda zero: model.apply_input_layers(
            model.embedding.embed(tokens) * config.embedding_scale + zero.to(dtype), new_context(), None
        )[0],
        torch.empty(1, requires_grad=True),
    )
    exit_ = trace(model, lambda x: mesh.tp.enter(model.norm(x).to(dtype)), stream(requires_grad=True))
    table = (model.embedding if model.head is None else model.head).weight
    loss = _loss(table, batch * length)
    numel = batch * (length // split) * config.hidden_size
    copied = [exchange.bytes for cost in blocks for exchange in cost.forward if exchange.collective == COPY]
    hidden_bytes = numel * wide.itemsize
    return Trace(blocks, _named(entry, names), _named(exit_, names), loss, hidden_bytes, max(copied, default=0))


def _named(cost: RunCost, names: dict[str, str]) -> RunCost:
    def named(exchanges: list[CollectiveCost]) -> list[CollectiveCost]:
        return [exchange._replace(group=names[exchange.group]) for exchange in exchanges]

    return cost._replace(forward=named(cost.forward), backward=named(cost.backward))


def _loss(table: Tensor, rows: int) -> LossCost:
    """As `ops.linear_cross_entropy` allocates: gradients of rows and table with the loss, chunks of logits between,
    and both gradients once more, scaled."""
    (vocabulary, width), size = table.shape, table.element_size()
    chunk = chunk_rows(table, rows) * vocabulary * size
    row_gradient, table_gradient = rows * width * size, vocabulary * width * 4
    scaled = row_gradient + vocabulary * width * size
    kept = row_gradient + table_gradient
    return LossCost(kept + chunk, kept, kept + scaled)


def part_of(cost: RunCost, share: float) -> RunCost:
    """The cost of sub-layers of a block that are worth `share` of its operations, as if all else went with them."""

    def scaled(exchanges: list[CollectiveCost]) -> list[CollectiveCost]:
        return [
            exchange._replace(
                bytes=round(share * exchange.bytes), overlapped_flops=round(share * exchange.overlapped_flops)
            )
            for exchange in exchanges
        ]

    return RunCost(
        round(share * cost.saved_bytes),
        round(share * cost.backward_bytes),
        round(share * cost.moved_bytes),
        scaled(cost.forward),
        scaled(cost.backward),
    )


def stretched(one: Trace, two: Trace, batch: int) -> Trace:
    """The trace of a micro-batch of `batch` samples, of those of one and of two."""
    more = batch - 1

    def number(a: int, b: int) -> int:
        return a + more * (b - a)

    def all_of(a: list[CollectiveCost], b: list[CollectiveCost]) -> list[CollectiveCost]:
        return [
            x._replace(bytes=number(x.bytes, y.bytes), overlapped_flops=number(x.overlapped_flops, y.overlapped_flops))
            for x, y in zip(a, b, strict=True)
        ]

    def cost(a: RunCost, b: RunCost) -> RunCost:
        return RunCost(
            number(a.saved_bytes, b.saved_bytes),
            number(a.backward_bytes, b.backward_bytes),
            number(a.moved_bytes, b.moved_bytes),
            all_of(a.forward, b.forward),
            all_of(a.backward, b.backward),
        )

    return Trace(
        [cost(a, b) for a, b in zip(one.blocks, two.blocks, strict=True)],
        cost(one.entry, two.entry),
        cost(one.exit, two.exit),
        LossCost(*(number(a, b) for a, b in zip(one.loss, two.loss, strict=True))),
        number(one.hidden_bytes, two.hidden_bytes),
        number(one.copied_bytes, two.copied_bytes),
    )


def kinds(layers: list[BlockConfig]) -> list[int]:
    """For each block of the model, the index of its entry in `model.layers`."""
    return [index for index, block in enumerate(layers) for _ in range(block.repeat)]
