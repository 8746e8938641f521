"""Biases, norms, head widths and scaled positions of softmax attention, over tensor and context parallelism."""

from __future__ import annotations

import pytest
import torch

from megalin.verify.comparison import compare
from megalin.verify.outcome import run_reference
from tests.cases import GLU, NUM_HEADS, Case, model
from tests.ranks import run_ranks
from tests.verify.meshes import verify_all
from tests.verify.test_context_parallel import mesh_case

MIXER = {
    "type": "softmax",
    "num_heads": 2 * NUM_HEADS,
    "num_key_value_heads": NUM_HEADS,
    "head_dim": 10,
    "qkv_bias": True,
    "output_bias": True,
    "qk_norm": True,
    "rope_scaling": {"type": "llama3", "factor": 8.0, "original_length": 16},
}
CASE = Case("softmax with all features", model({"sublayers": [MIXER, GLU], "repeat": 2}))

SINGLE = [
    {"type": "softmax", "num_heads": NUM_HEADS, "window": 1, "qk_norm": True},
    {"type": "softmax", "num_heads": NUM_HEADS, "block_size": 1},
    {"type": "shared_key_attention", "num_heads": NUM_HEADS, "window": 1},
]
"""Tokens that see themselves alone: gradients of queries and keys are zero."""


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_windows_and_blocks_of_one_token_agree_with_one_process(dtype):
    case = Case("windows and blocks of one token", model({"sublayers": [*SINGLE, GLU], "repeat": 2}))
    (errors,) = run_ranks(2, verify_all, [mesh_case(case, tp=2)._replace(dtype=dtype)], timeout=300.0)[0]
    assert any("mixer.q.weight" in error.name for error in errors)
    assert [error for error in errors if not error.passed] == []


def test_error_in_a_gradient_of_zero_is_seen():
    case = mesh_case(Case("windows of one token", model({"sublayers": [SINGLE[0], GLU]})))
    truth = run_reference(case, torch.float64, torch.device("cpu"))
    (name,) = (name for name in truth if name.startswith("gradient:") and name.endswith("mixer.q.weight"))
    total = float(truth["grad_norm"])
    assert truth[name].norm() < 1e-14 * total
    for size, passes in ((1e-12, True), (1e-9, False)):
        wrong = truth[name].clone()
        wrong[0, 0] += size * total
        rows = compare(case, truth | {name: wrong}, truth, None, torch.device("cpu"))
        assert [row.name for row in rows if not row.passed] == ([] if passes else [name])


@pytest.mark.parametrize(
    "axes",
    [
        {"tp": 2},
        pytest.param({"cp": 3}, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "cp": 2, "sequence_parallel": True}, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "pp": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda axes: " ".join(f"{name}={size}" for name, size in axes.items()),
)
def test_mesh_agrees_with_one_process(axes: dict[str, int]):
    world_size = axes.get("tp", 1) * axes.get("cp", 1) * axes.get("pp", 1)
    (errors,) = run_ranks(world_size, verify_all, [mesh_case(CASE, **axes)], timeout=300.0)[0]
    names = {error.name for error in errors}
    assert any("q_norm" in name for name in names)
    assert any("kv.bias" in name for name in names)
    assert [error for error in errors if not error.passed] == []
