"""A model and its optimizer on a mesh: built on meta, compiled, sharded, materialised, filled."""

from __future__ import annotations

import torch

from megalin.model.base import Stage
from megalin.model.build import Model, make_model
from megalin.model.config import AnyModelConfig, ModelConfig
from megalin.model.pipeline_stages import DecoderStage, plan_stages
from megalin.parallel.data_parallel import shard_model
from megalin.parallel.initialisation import init_weights
from megalin.parallel.mesh import Mesh
from megalin.train.pipeline_model import Pipeline

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The compute dtypes that a run may choose, by their name in its config."""

EARLY_COLLECTIVES = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
}
"""Inductor's options by which each collective of a block starts as early, and is waited for as late, as what it needs
and what needs it allow: in the backward beside gradients of weights. The same kernels; the collectives of a block stay
in their order, which is that of its trace and the same on every rank."""

_PLANNED_LENGTH = 4096
"""Tokens a sequence for which layers are shared out where the caller tells none."""

TrainedModel = Model | Pipeline
"""What a rank trains: a whole model, or its stages of one."""


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
) -> TrainedModel:
    """The model on the mesh with its initial weights, which depend on `seed` alone, not on the mesh.

    Args:
        length: tokens a sequence, by which the layers are shared out over the stages of a pipeline.
        overlap: whether compiled blocks start the all-reduces of tensor parallelism early, which pays where the host is
            in time to start what they travel beside. Exchanges of context parallelism start early in any case.
    """
    if mesh.pp.size == 1:
        model = make_model(config, mesh.tp, cp=mesh.cp, recompute=recompute)
        _materialise(
            model, mesh, compute_dtype=compute_dtype, compile_blocks=compile_blocks, overlap=overlap, seed=seed
        )
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
        )
        for number, sublayers in zip(mesh.pp.own_stages(), mesh.pp.own(plan.sublayers), strict=True)
    ]
    for stage in stages:
        _materialise(
            stage, mesh, compute_dtype=compute_dtype, compile_blocks=compile_blocks, overlap=overlap, seed=seed
        )
    return Pipeline(config, plan, stages, mesh)


def _materialise(
    model: Model, mesh: Mesh, *, compute_dtype: torch.dtype, compile_blocks: bool, overlap: bool, seed: int
) -> None:
    """Compiles the blocks where asked, shards the model and fills it."""
    if compute_dtype == torch.float64:
        model.to(torch.float64)
    if compile_blocks:
        # An exchange of cp's states waits for the slowest rank; gradients of weights fit beside that.
        # Where sequence parallelism goes by collectives nobody measured what it changes.
        by_collectives = mesh.tp.sequence_parallel and mesh.tp.buffers is None
        early = (overlap or mesh.cp.size > 1) and not by_collectives
        options = EARLY_COLLECTIVES if early else None
        for block in model.block_list():
            block.compile(fullgraph=True, dynamic=False, options=options)
    blocks, precise = model.block_list(), model.full_precision_modules()
    shard_model(model, blocks, precise, mesh, compute_dtype=compute_dtype, head=model.head)
    model.to_empty(device=mesh.device)
    init_weights(model, seed)
