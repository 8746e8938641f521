"""Traces of blocks on meta against torch.compile's own graphs and against eager blocks on CPU tensors."""

import pytest
import torch

from megalin.model.presets import load_preset
from megalin.parallel.config import ParallelConfig
from megalin.parallel.float8_layers import Float8Settings
from megalin.planner.block_traces import trace_model
from megalin.planner.workload import Workload
from tests.planner.compile_front_end import front_end_trace

CASES = {"transformerpp-350m": ParallelConfig(), "rodimus-1.3b": ParallelConfig(cp=3)}
"""Copies and equal operations; a checkpoint in a mixer, and a convolution that reads the former rank's tokens."""
PRESETS = (
    "tnl-1b",
    "transnormerllm-1b-mix",
    "hgrn2-1b",
    "llama-1b-gqa",
    "mamba2-1b",
    "mamba1-1.4b",
    "rodimus_plus-1.3b",
    "cosformer2-1b",
    "gla-1.3b",
    "retnet-1.3b",
)
LAYOUTS = (
    ParallelConfig(),
    ParallelConfig(tp=2, sequence_parallel=True),
    ParallelConfig(tp=2),
    ParallelConfig(cp=4),
    ParallelConfig(tp=2, cp=2, sequence_parallel=True, tp_overlap="none"),
)


def _workload(preset: str, float8: Float8Settings | None = None) -> Workload:
    return Workload(load_preset(preset).model, 6144, 64, torch.bfloat16, True, float8=float8)


def _assert_equal(workload: Workload, parallel: ParallelConfig, batch: int) -> None:
    for each in (workload, workload._replace(compiled=False)):
        assert trace_model(each, parallel, batch) == front_end_trace(each, parallel, batch)


@pytest.mark.parametrize("preset", CASES)
def test_traces_on_meta_equal_those_of_torch_compile(preset):
    _assert_equal(_workload(preset), CASES[preset], 2)


def test_an_op_that_writes_an_argument_is_recorded():
    """The backward of Mamba-2's convolution writes into the projection's gradient."""
    workload = _workload("mamba2-tiny")
    compiled, eager = (trace_model(each, ParallelConfig(), 1) for each in (workload, workload._replace(compiled=False)))
    assert 0 < compiled.blocks[0].backward_bytes < eager.blocks[0].backward_bytes


@pytest.mark.slow
@pytest.mark.parametrize("parallel", LAYOUTS, ids=lambda each: f"tp{each.tp}cp{each.cp}{each.sequence_parallel}")
@pytest.mark.parametrize("preset", PRESETS)
def test_traces_of_other_mixers_and_meshes_equal_those_of_torch_compile(preset, parallel):
    _assert_equal(_workload(preset), parallel, 3)


@pytest.mark.slow
@pytest.mark.parametrize("weight_gradient", [False, True])
@pytest.mark.parametrize("preset", ["tnl-1b", "llama-1b", "mamba2-1b"])
def test_traces_of_fp8_layers_equal_those_of_torch_compile(preset, weight_gradient):
    _assert_equal(_workload(preset, Float8Settings(weight_gradient=weight_gradient)), ParallelConfig(), 2)
