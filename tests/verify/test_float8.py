"""`megalin verify --dtype float8`: meshes against one process in fp64 around e4m3 operands, and its planted faults."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from megalin.__main__ import main
from megalin.model.presets import load_preset
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import compute_device
from megalin.verify import faults
from megalin.verify.case import Case, make_case
from megalin.verify.comparison import TensorError, kind
from megalin.verify.float8 import count_planned, count_recorded
from megalin.verify.run import FaultResult, compare_models, print_rows, self_test
from megalin.verify.single_layers import compare_layers
from tests.ranks import run_ranks
from tests.verify.meshes import verify_all

FAST = ("transnormerllm-385m", "hgrn2-160m")
FAMILIES = (
    *FAST,
    "tnl-160m",
    "cosformer2-160m",
    "gla-340m",
    "retnet-340m",
    "mamba1-130m",
    "mamba2-410m",
    "rodimus-125m",
    "rodimus_plus-125m",
    "llama-70m",
    "llama-1b-gqa",
    "transformerpp-125m",
)
MESHES: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True, "recompute": True},
        {"pp": 2, "recompute": True},
        {"pp": 2, "pp_schedule": "interleaved", "pp_stages_per_rank": 2},
        {"dp": 2},
    ],
    3: [{"cp": 3}],
    4: [{"tp": 4}, {"tp": 4, "sequence_parallel": True}, {"tp": 2, "dp": 2, "zero": 1}],
    6: [{"tp": 2, "cp": 3, "sequence_parallel": True}],
}
"""By world size."""


def case(preset: str, *, dp: int = 1, recompute: bool = False, **axes: Any) -> Case:
    options: dict[str, Any] = {"dtype": "float8", "full": False, "length": None, "recompute": recompute}
    return make_case(load_preset(preset).model, ParallelConfig(**axes), data_size=dp, **options)


def check(cases: list[Case], results: list[list[TensorError]]) -> None:
    for each, rows in zip(cases, results, strict=True):
        assert [row for row in rows if not row.passed] == [], each
        count = count_recorded(row.name for row in rows)
        assert count == count_planned(each)
        assert count.matmuls == 2 * count.layers * each.num_micro_batches > 0
        assert {"codes", "scales", "magnitudes", "stepped_logits", "gradient"} <= {kind(row.name) for row in rows}


Part = Callable[[Case, Mesh], list[TensorError]]


def compare_all(cases: list[Case], part: Part) -> list[list[TensorError]]:
    """One part of `verify` of each case; cases with equal axes share a mesh."""
    meshes: dict[ParallelConfig, Mesh] = {}
    for each in cases:
        if each.parallel not in meshes:
            meshes[each.parallel] = Mesh(each.parallel, compute_device())
    return [part(each, meshes[each.parallel]) for each in cases]


def test_fp8_on_a_mesh_is_that_of_one_process():
    cases = [case(FAST[1], tp=2, sequence_parallel=True, recompute=True)]
    check(cases, run_ranks(2, compare_all, cases, compare_models)[0])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", MESHES)
def test_fp8_of_every_decoder_family_on_meshes_is_that_of_one_process(world_size: int):
    cases = [case(name, **mesh) for mesh in MESHES[world_size] for name in FAMILIES]
    check(cases, run_ranks(world_size, compare_all, cases, compare_models, timeout=280.0)[0])


def check_layers(cases: list[Case], results: list[list[TensorError]]) -> None:
    for each, rows in zip(cases, results, strict=True):
        assert [row for row in rows if not row.passed] == [], each
        layers = count_planned(each).layers
        counts = Counter(kind(row.name) for row in rows)
        assert counts == {"single_codes": 4 * layers, "single_scales": 4 * layers} | dict.fromkeys(
            ("single_y", "single_dx", "single_dw"), layers
        )
        assert all(1e-3 < row.bound < 2e-2 for row in rows if kind(row.name) in ("single_y", "single_dx", "single_dw"))


def test_a_layer_by_itself_in_bf16_has_the_codes_of_one_process():
    cases = [case(FAST[1], tp=2, sequence_parallel=True)]
    check_layers(cases, run_ranks(2, compare_all, cases, compare_layers)[0])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_layers_of_every_decoder_family_by_themselves_in_bf16_have_the_codes_of_one_process(world_size: int):
    meshes = [mesh for mesh in MESHES[world_size] if "pp_schedule" not in mesh]
    cases = [case(name, **mesh) for mesh in meshes for name in FAMILIES]
    check_layers(cases, run_ranks(world_size, compare_all, cases, compare_layers, timeout=280.0)[0])


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "mesh"), [(2, {"tp": 2}), (3, {"cp": 3}), (2, {"pp": 2})])
def test_all_parts_pass(world_size: int, mesh: dict[str, Any]):
    cases = [case(name, **mesh) for name in ("transnormerllm-385m", "hgrn2-160m", "llama-70m")]
    for rows in run_ranks(world_size, verify_all, cases, timeout=280.0)[0]:
        assert [row for row in rows if not row.passed] == []
        assert {"logits", "codes", "single_codes", "bf16_logits"} <= {kind(row.name) for row in rows}


def self_test_of_fp8(each: Case) -> list[FaultResult]:
    """The self-test with the faults of FP8 matmuls alone."""
    with patch.object(faults, "FAULTS", tuple(fault for fault in faults.FAULTS if fault.float8)):
        return self_test(each)


def test_every_planted_fault_of_fp8_is_found():
    results = run_ranks(2, self_test_of_fp8, case(FAST[1], tp=2))[0]
    assert [(result.fault, result.seen) for result in results] == [
        ("scale_of_one_rank", True),
        ("neighbours_token_scale", True),
        ("stale_weight_scale", True),
        ("transposed_weight_scale", True),
    ]


@pytest.mark.slow
def test_other_faults_are_found_in_fp8_too():
    results = run_ranks(4, self_test, case(FAST[0], tp=2, dp=2), timeout=240.0)[0]
    assert "skipped_adjoint" in {result.fault for result in results}
    assert len(results) == 9
    assert all(result.seen for result in results), results


def test_layers_that_did_not_run_in_fp8_fail(capsys):
    each = case(FAST[1])
    rows = [TensorError("logits.0", 0.0, 1e-10), TensorError("missing_matmuls", 16.0, 0.0)]
    assert not print_rows(each, rows, as_json=False)
    printed = capsys.readouterr().out
    assert "0 matmuls of 0 linear layers in FP8; 0 codes and 0 scales differ" in printed
    assert "FAILED" in printed


def test_the_number_of_codes_that_differ_is_printed(capsys):
    rows = [TensorError(f"codes:blocks.0.up.{name}.0", 3.0, 0.0) for name in ("x", "dy", "weight")]
    assert not print_rows(case(FAST[1]), rows, as_json=False)
    assert "2 matmuls of 1 linear layers in FP8; 9 codes and 0 scales differ" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_compares_in_fp8(capsys):
    assert main(["verify", FAST[1], "--dtype", "float8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], found["dtype"]) == (True, "float8")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["parallel.pp=2", "parallel.pp_schedule=zero_bubble"], "zero_bubble"),
        (["model.layers.0.sublayers.1.intermediate_size=2040"], "has 768 outputs and 2040 inputs"),
    ],
)
def test_a_full_size_that_train_refuses_is_refused(overrides, problem, capsys):
    assert main(["verify", FAST[1], *overrides, "--dtype", "float8"]) == 2
    assert problem in capsys.readouterr().err
