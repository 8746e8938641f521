"""Copies of weights and moments on two GPUs stay equal in steps of every family, and a flipped bit does not pass."""

import pytest

from tests.gpu.ranks import needs_gpus, on_gpus
from tests.model_runs import write_config

pytestmark = needs_gpus(2)
SMALLEST = {
    "transnormerllm": "transnormerllm-385m",
    "tnl": "tnl-70m",
    "hgrn2": "hgrn2-70m",
    "cosformer2": "cosformer2-70m",
    "rodimus_plus": "rodimus_plus-125m",
    "gla": "gla-340m",
    "retnet": "retnet-340m",
    "mamba2": "mamba2-410m",
    "llama": "llama-70m",
}


@pytest.mark.parametrize("preset", SMALLEST.values(), ids=SMALLEST)
def test_tensors_that_tp_does_not_divide_stay_equal(tmp_path, preset):
    run = _run(tmp_path, preset, {"tp": 2})
    assert run.returncode == 0, run.stderr[-4000:]


@pytest.mark.parametrize("axes", [{"shard": 1}, {"cp": 2, "shard": 1}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_replicas_stay_equal_on_other_axes(tmp_path, axes):
    run = _run(tmp_path, "hgrn2-70m", axes)
    assert run.returncode == 0, run.stderr[-4000:]


def test_a_flipped_bit_ends_the_run(tmp_path):
    run = _run(tmp_path, "tnl-70m", {"shard": 1}, module="tests.gpu.replica_runs")
    assert "exitcode  : 11" in run.stderr
    assert "exitcode  : -6" not in run.stderr
    assert "ReplicaError" in run.stderr
    assert "step 3: copies of " in run.stderr


def _run(tmp_path, preset, axes, module="megalin"):
    """Trains eight steps in bf16, and compares the copies after each."""
    config = write_config(
        tmp_path,
        data={"sequence_length": 512, "validation": []},
        train={
            "steps": 8,
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "dtype": "bfloat16",
            "compare_replicas_every_steps": 1,
        },
        parallel=axes,
        checkpoint={"every_steps": 100},
    )
    return on_gpus(2, module, "train", config, "--folder", tmp_path / "run", f"model.preset={preset}")
