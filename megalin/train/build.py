"""Construction of a model on a mesh: built on meta, compiled, sharded, materialised, initialised."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megalin.model.base import Stage
from megalin.model.build import Model, make_model
from megalin.model.config import AnyModelConfig, ModelConfig
from megalin.model.pipeline_stages import DecoderStage, plan_stages
from megalin.parallel.data_parallel import shard_model
from megalin.parallel.float8_layers import Float8Settings, enable_float8, update_weight_magnitudes
from megalin.parallel.initialisation import init_weights
from megalin.parallel.mesh import Mesh
from megalin.parallel.tensor_parallel import apply_to_shards
from megalin.train.pipeline_model import Pipeline

OVERLAP_OPTIONS = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
}
"""Inductor options that start each collective of a block as early, and wait for it as late, as its dependencies allow:
in the backward it overlaps the gradients of weights. The kernels are the same; the collectives of a block keep the
order of its trace, which is the same on every rank."""

_PLANNED_LENGTH = 4096
"""Default tokens per sequence for the partition of layers into stages."""

TrainedModel = Model | Pipeline
"""A model that a rank trains: whole, or this rank's stages of it."""


def build_model(
    config: AnyModelConfig,
    mesh: Mesh,
    *,
    compute_dtype: torch.dtype,
    recompute: bool,
    compile_blocks: bool,
    seed: int,
    length: int = _PLANNED_LENGTH,
    overlap: bool = False,
    max_label_fraction: float = 1.0,
    float8: Float8Settings | None = None,
    accumulates: bool = True,
    reduces: bool = True,
) -> TrainedModel:
    """Builds the model on the mesh with its initial weights, which depend on `seed` alone, not on the mesh.

    Args:
        length: tokens per sequence, for which layers are partitioned into the stages of a pipeline.
        overlap: whether compiled blocks overlap their collectives with computation, which shortens steps of tensor
            parallelism if the host launches that computation in time.
        max_label_fraction: largest fraction of a micro-batch's tokens that have a label (`TrainConfig`).
        float8: the FP8 matmuls of the blocks; None: all in `compute_dtype`.
        accumulates: False where every step has one micro-batch (`shard_model`); of no effect in a pipeline.
        reduces: False where FSDP reduces no gradient (`shard_model`).
    """
    options = _Options(compute_dtype, compile_blocks, overlap, seed, float8, accumulates or mesh.pp.size > 1, reduces)
    if mesh.pp.size == 1:
        model = make_model(config, mesh.tp, cp=mesh.cp, recompute=recompute, max_label_fraction=max_label_fraction)
        _materialise(model, mesh, options)
        return model
    plan = plan_stages(config, mesh.pp.num_stages, num_ranks=mesh.pp.size, length=length)
    assert isinstance(config, ModelConfig), type(config)
    stages = [
        DecoderStage(
            config,
            mesh.tp,
            cp=mesh.cp,
            recompute=recompute,
            stage=Stage(number, mesh.pp.num_stages, sublayers),
            compute_dtype=compute_dtype,
            max_label_fraction=max_label_fraction,
        )
        for number, sublayers in zip(mesh.pp.own_stages(), mesh.pp.own(plan.sublayers), strict=True)
    ]
    for stage in stages:
        _materialise(stage, mesh, options)
    return Pipeline(config, plan, stages, mesh)


class _Options(NamedTuple):
    """The options of `build_model` for a materialised model or stage."""

    compute_dtype: torch.dtype
    compile_blocks: bool
    overlap: bool
    seed: int
    float8: Float8Settings | None
    accumulates: bool
    reduces: bool


def _materialise(model: Model, mesh: Mesh, options: _Options) -> None:
    """Compiles the blocks if asked, shards the model, materialises and initialises it."""
    if options.compute_dtype == torch.float64:
        apply_to_shards(model, lambda x: x.double() if x.is_floating_point() else x)
    if options.float8 is not None:
        enable_float8(model, model.block_list(), options.float8)
    if options.compile_blocks:
        # For sequence parallelism by collectives the effect was not measured.
        by_collectives = mesh.tp.sequence_parallel and mesh.tp.buffers is None
        inductor = OVERLAP_OPTIONS if options.overlap and not by_collectives else None
        for block in model.block_list():
            block.compile(fullgraph=True, dynamic=False, options=inductor)
    blocks, precise = model.block_list(), model.full_precision_modules()
    shard_model(
        model,
        blocks,
        precise,
        mesh,
        compute_dtype=options.compute_dtype,
        head=model.head,
        accumulates=options.accumulates,
        reduces=options.reduces,
    )
    apply_to_shards(model, lambda x: torch.empty_like(x, device=mesh.device))
    init_weights(model, options.seed)
    update_weight_magnitudes(model)
