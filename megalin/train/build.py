"""A model and its optimizer on a mesh: built on meta, compiled, sharded, materialised, filled."""

from __future__ import annotations

import torch

from megalin.model.build import Model, make_model
from megalin.model.config import AnyModelConfig
from megalin.parallel.data_parallel import shard_model
from megalin.parallel.initialisation import fill
from megalin.parallel.mesh import Mesh

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The compute dtypes that a run may choose, by their name in its config."""


def build_model(
    config: AnyModelConfig, mesh: Mesh, *, compute_dtype: torch.dtype, recompute: bool, compile_blocks: bool, seed: int
) -> Model:
    """The model on the mesh with its initial weights, which depend on `seed` alone, not on the mesh."""
    model = make_model(config, mesh.tp, cp=mesh.cp, recompute=recompute)
    if compute_dtype == torch.float64:
        model.to(torch.float64)
    if compile_blocks:
        for block in model.block_list():
            block.compile(fullgraph=True, dynamic=False)
    shard_model(model, model.block_list(), model.full_precision_modules(), mesh, compute_dtype=compute_dtype)
    model.to_empty(device=mesh.device)
    fill(model, seed)
    return model
