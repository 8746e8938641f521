"""Counted parameters of a rank against the sharded module, on a mesh whose collectives send nothing."""

import pytest
import torch

from megalin.model.base import Stage
from megalin.model.language_model import LanguageModel
from megalin.model.presets import load_preset
from megalin.parallel.collectives import Axis
from megalin.parallel.config import ParallelConfig
from megalin.parallel.data_parallel import shard_model
from megalin.parallel.fake_mesh import LocalTensorParallel, fake_mesh
from megalin.parallel.mesh import Mesh
from megalin.parallel.tensor_parallel import TensorParallel, local
from megalin.planner.parameters import stage_parameters
from tests.cases import CASES, HYBRID, Case


def _sharded(model: LanguageModel, mesh: Mesh) -> int:
    shard_model(model, model.block_list(), model.full_precision_modules(), mesh, compute_dtype=torch.bfloat16)
    return sum(local(parameter).numel() for parameter in model.parameters())


def _counted(case: Case, tp: int, shard: int, stage: Stage | None) -> int:
    model = LanguageModel(case.model, LocalTensorParallel(Axis("tp", tp)), stage=stage)
    return stage_parameters(model, shard).shard


@pytest.mark.parametrize(("tp", "data", "shard"), [(1, 1, None), (4, 3, None), (3, 8, 4)])
def test_shards_are_those_of_the_real_module(tp, data, shard):
    with fake_mesh(ParallelConfig(tp=tp, shard=shard), tp * data, tensor_parallel=TensorParallel) as mesh:
        for case in CASES:
            expected = _sharded(LanguageModel(case.model, mesh.tp), mesh)
            assert _counted(case, tp, mesh.config.shard_size(data), None) == expected, case.name


@pytest.mark.parametrize("number", [0, 1])
def test_shards_of_a_stage_are_those_of_the_real_stage(number):
    stage = Stage(number, 2, [range(4), range(4, 8)][number])  # the second block is split over both
    with fake_mesh(ParallelConfig(tp=2, pp=2, zero=1), 2 * 2 * 3, tensor_parallel=TensorParallel) as mesh:
        expected = _sharded(LanguageModel(HYBRID.model, mesh.tp, stage=stage), mesh)
    assert _counted(HYBRID, 2, 3, stage) == expected


def test_a_model_of_175_billion_parameters_is_counted():
    config = load_preset("transnormerllm-175b").model
    counted = stage_parameters(LanguageModel(config, LocalTensorParallel(Axis("tp", 8))), 128)
    whole = LanguageModel(config)
    assert 0.999 < 8 * 128 * counted.shard / whole.num_parameters() < 1.01
    assert len(counted.blocks) == config.num_layers
