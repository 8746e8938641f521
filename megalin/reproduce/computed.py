"""Our numbers that need no training: counts of a row's model, and its memory by the planner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch

from megalin.config import apply_overrides
from megalin.generation.prefill import state_tensors
from megalin.model.build import Model, make_model
from megalin.model.config import AnyModelConfig, ModelConfig, parse_model
from megalin.model.language_model import LanguageModel
from megalin.model.presets import preset_table
from megalin.parallel.config import ParallelConfig
from megalin.planner.estimate import Estimator
from megalin.planner.hardware import HARDWARE
from megalin.planner.workload import ParallelLayout, Workload
from megalin.reproduce.papers import Column, Row

DEFAULT_LENGTH = 8192
"""Tokens per sequence where neither row nor column has a length."""
PLANNED = "planned_bytes"
"""Measure of the planner's memory of a rank."""
PLANNED_GPUS, PLANNED_BATCH = 8, 2
"""GPUs (A100) and samples a rank of the planned memory, those of TransNormerLLM's Table 12."""


def row_model(row: Row) -> AnyModelConfig | None:
    """The model of a row, or None where we have none."""
    return None if row.preset is None else _config(row.preset, tuple(row.overrides))


def computed(column: Column, row: Row) -> float:
    """Our number for a cell whose measure is in MEASURES, in the column's unit."""
    assert row.preset is not None
    assert column.measure is not None
    model, length = _model(row.preset, tuple(row.overrides)), row.length or column.length or DEFAULT_LENGTH
    if column.measure == PLANNED:
        value = _planned_bytes(row, length)
    else:
        value = MEASURES[column.measure](model, length)
    if column.baseline is not None:
        value /= MEASURES[column.measure](_model(column.baseline, ()), length)
    return value * column.tokens / column.scale


@cache
def _config(preset: str, overrides: tuple[str, ...]) -> AnyModelConfig:
    changes = [f"model.{override}" for override in overrides]
    return parse_model(apply_overrides({"model": preset_table(preset)}, changes)["model"], f"preset {preset}")


@cache
def _model(preset: str, overrides: tuple[str, ...]) -> Model:
    return make_model(_config(preset, overrides))


def _non_embedding_parameters(model: Model, _length: int) -> float:
    return model.num_parameters() - model.num_embedding_parameters()


def _sublayer_number(model: Model, index: int, key: str) -> int:
    """A number of a sub-layer of the first block."""
    return int(model.config.layers[0].sublayers[index].model_dump()[key])


def _cache_bytes(model: Model, length: int) -> float:
    """Bytes of the decoding state after `length` tokens, two a number; numbers of the documents are not counted."""
    assert isinstance(model, LanguageModel)
    state = model.reserve(model.initial_state(1), length)
    return sum(2 * tensor.numel() for tensor in state_tensors(state) if tensor.dim() > 2)


def _state_ratio(model: Model, _length: int) -> float:
    """Numbers of the first block's recurrent state, over the hidden size."""
    assert isinstance(model, LanguageModel)
    state = model.initial_state(1).blocks[0][0]
    return max(tensor.numel() for tensor in state) / model.config.hidden_size


def _planned_bytes(row: Row, length: int) -> float:
    """Memory of a rank with `tp` ranks a tensor-parallel group, ZeRO 3 over the others, eager blocks in bf16."""
    assert row.preset is not None
    model = _config(row.preset, tuple(row.overrides))
    assert isinstance(model, ModelConfig)
    dp = PLANNED_GPUS // row.tp
    workload = Workload(model, length, PLANNED_BATCH * dp, torch.bfloat16, compiled=False)
    parallel = ParallelConfig(tp=row.tp, zero=3 if dp > 1 else None)
    layout = ParallelLayout(parallel, dp, PLANNED_BATCH, 1, False)
    return Estimator(workload, HARDWARE["a100"]).estimate(layout, refined=True).memory.total


MEASURES: Mapping[str, Callable[[Model, int], float]] = {
    "parameters": lambda model, _: model.num_parameters(),
    "non_embedding_parameters": _non_embedding_parameters,
    "blocks": lambda model, _: model.config.num_layers,
    "width": lambda model, _: model.config.hidden_size,
    "heads": lambda model, _: _sublayer_number(model, 0, "num_heads"),
    "head_width": lambda model, _: model.config.hidden_size / _sublayer_number(model, 0, "num_heads"),
    "channel_width": lambda model, _: _sublayer_number(model, -1, "intermediate_size"),
    "training_flops": lambda model, length: model.training_flops(length),
    "training_flops_of_blocks": lambda model, length: 3 * model.stack_flops(length),
    "forward_flops": lambda model, length: model.forward_flops(length),
    "forward_flops_of_blocks": lambda model, length: model.stack_flops(length),
    "cache_bytes": _cache_bytes,
    "state_ratio": _state_ratio,
}
"""Measures of a model at a number of tokens a sequence, by name; PLANNED needs a mesh too."""
