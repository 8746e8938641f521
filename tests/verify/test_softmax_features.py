"""Biases, norms, head widths and scaled positions of softmax attention, over tensor and context parallelism."""

from __future__ import annotations

import pytest

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
