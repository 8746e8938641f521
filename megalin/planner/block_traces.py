"""Traces of each kind of block, the embedding and the head on one rank of a tensor- and context-parallel mesh."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megalin.layers.mixers.base import MixerContext, SequenceContext
from megalin.model.block import Block
from megalin.model.config import BlockConfig
from megalin.model.language_model import LanguageModel
from megalin.ops.dispatch.backend import assume_kernels
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.linear_cross_entropy import chunk_rows
from megalin.parallel.config import ParallelConfig
from megalin.parallel.fake_mesh import fake_mesh
from megalin.parallel.float8_layers import enable_float8
from megalin.parallel.mesh import Mesh
from megalin.planner.graph_cost import COPY, CollectiveCost
from megalin.planner.hardware import GPUS_PER_HOST
from megalin.planner.tracing import RunCost, materialize, trace, trace_compiled
from megalin.planner.workload import Workload, one_of_each


class LossCost(NamedTuple):
    """Memory of the head's matmul and the loss of a micro-batch."""

    forward_bytes: int
    """Peak in the forward."""
    saved_bytes: int
    """Saved for the backward."""
    backward_bytes: int
    """Peak in the backward, saved bytes included."""


class Trace(NamedTuple):
    """Costs of a micro-batch on one rank; the group of each collective is the name of its axis."""

    blocks: list[RunCost]
    """One block of each entry of `model.layers`."""
    entry: RunCost
    """The embedding and the input layers."""
    exit: RunCost
    """The final norm, and the collective before the head."""
    loss: LossCost
    hidden_bytes: int
    """Bytes of the hidden states."""
    copied_bytes: int = 0
    """Largest tensor [B, T, D] sent by async tensor parallelism; 0 without it."""


def uses_async_tp(parallel: ParallelConfig) -> bool:
    """True where async tensor parallelism runs, as `auto` chooses it: the axis's GPUs share a host."""
    return parallel.may_use_async_tp and parallel.tp <= GPUS_PER_HOST


def trace_model(workload: Workload, parallel: ParallelConfig, micro_batch_size: int) -> Trace:
    """Traces one block of each entry of `layers`, the embedding and the head on meta.

    Args:
        parallel: only tp, cp, their collectives and sequence parallelism are read.
    """
    tp_cp = parallel.model_copy(
        update={"pp": 1, "pp_schedule": "1f1b", "pp_stages_per_rank": 1, "shard": None, "zero": None}
    )
    with fake_mesh(tp_cp, parallel.tp * parallel.cp, async_tp=uses_async_tp(parallel)) as mesh:
        model = LanguageModel(one_of_each(workload.model), mesh.tp, cp=mesh.cp)
        if workload.float8 is not None:
            enable_float8(model, model.block_list(), workload.float8)
        with assume_kernels():
            materialize(model, workload.dtype)
            return _trace(workload, model, mesh, micro_batch_size)


def _trace(workload: Workload, model: LanguageModel, mesh: Mesh, batch: int, *, device: str = "meta") -> Trace:
    """Traces a model in the dtypes of its computation; `device` is another one only in tests."""
    config, dtype, length = workload.model, workload.dtype, workload.length // mesh.cp.size
    tokens = torch.zeros(batch, length, dtype=torch.int64, device=device)

    # One document per sequence: packing adds an id per token, too little to matter. A backward frees the graph of the
    # tensors that mixers share, so each block gets its own context.
    def new_context() -> SequenceContext:
        context = model.context(tokens, mesh.cp.positions(tokens), None, dtype)
        return context._replace(dropout=model.dropout_keys(tokens[:, 0], tokens))

    wide = compute_dtype(torch.empty(0, dtype=dtype)) if config.residual_dtype == "float32" else dtype
    num_shards = mesh.tp.size if mesh.tp.sequence_parallel else 1
    hidden_states = partial(torch.empty, batch, length // num_shards, config.hidden_size, dtype=wide, device=device)
    names = {axis.group_name: axis.name for axis in (mesh.tp.axis, mesh.cp.axis) if axis.size > 1}
    if mesh.tp.buffers is not None:
        names[mesh.tp.buffers.name] = mesh.tp.axis.name
    blocks = []
    for block in model.block_list():
        contexts = block.contexts(new_context())

        def run(x: Tensor, block: Block = block, contexts: list[MixerContext] = contexts) -> Tensor:
            return block(x, contexts, None).x

        cost = trace_compiled(block, run, hidden_states(requires_grad=True)) if workload.compiled else None
        blocks.append(_with_axis_names(cost or trace(block, run, hidden_states(requires_grad=True)), names))
    # The embedding takes tokens; a zero that requires a gradient stands in for a differentiable input.
    entry = trace(
        model,
        lambda zero: model.apply_input_layers(
            model.embedding.embed(tokens) * config.embedding_scale + zero.to(dtype), new_context(), None
        )[0],
        torch.empty(1, requires_grad=True, device=device),
    )
    exit_ = trace(model, lambda x: mesh.tp.enter(model.norm(x).to(dtype)), hidden_states(requires_grad=True))
    table = (model.embedding if model.head is None else model.head).weight
    loss = _loss(table, batch * length)
    numel = batch * (length // num_shards) * config.hidden_size
    copied = [collective.bytes for cost in blocks for collective in cost.forward if collective.name == COPY]
    hidden_bytes = numel * wide.itemsize
    entry, exit_ = _with_axis_names(entry, names), _with_axis_names(exit_, names)
    return Trace(blocks, entry, exit_, loss, hidden_bytes, max(copied, default=0))


def _with_axis_names(cost: RunCost, names: dict[str, str]) -> RunCost:
    def named(collectives: list[CollectiveCost]) -> list[CollectiveCost]:
        return [collective._replace(group=names[collective.group]) for collective in collectives]

    return cost._replace(forward=named(cost.forward), backward=named(cost.backward))


def _loss(table: Tensor, num_tokens: int) -> LossCost:
    """Allocations of `ops.linear_cross_entropy`: the forward holds a chunk of logits and the gradients of tokens and
    table; the backward holds both gradients again, scaled."""
    (vocabulary, width), size = table.shape, table.element_size()
    chunk = chunk_rows(table, num_tokens) * vocabulary * size
    token_gradient, table_gradient = num_tokens * width * size, vocabulary * width * 4
    scaled = token_gradient + vocabulary * width * size
    saved = token_gradient + table_gradient
    return LossCost(saved + chunk, saved, saved + scaled)


def scaled_cost(cost: RunCost, fraction: float) -> RunCost:
    """Cost of the sub-layers of a block with `fraction` of its operations; bytes are taken in proportion."""

    def scaled(collectives: list[CollectiveCost]) -> list[CollectiveCost]:
        return [
            collective._replace(
                bytes=round(fraction * collective.bytes), overlapped_flops=round(fraction * collective.overlapped_flops)
            )
            for collective in collectives
        ]

    return RunCost(
        round(fraction * cost.saved_bytes),
        round(fraction * cost.backward_bytes),
        round(fraction * cost.moved_bytes),
        scaled(cost.forward),
        scaled(cost.backward),
    )


def extrapolate(one: Trace, two: Trace, batch: int) -> Trace:
    """Extrapolates the traces of micro-batches of one and two samples to `batch` samples."""
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
    """Index of each block's entry in `model.layers`."""
    return [index for index, block in enumerate(layers) for _ in range(block.repeat)]
