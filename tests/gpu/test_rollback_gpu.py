"""Rollback after a spike on a GPU, in bf16 with the update's kernel: eagerly and as a CUDA graph."""

import pytest
import torch

from megalin.ops.dispatch import backend
from megalin.parallel.process_group import process_group
from tests.model_runs import metrics, train_here, write_config
from tests.train.test_rollback import (
    RESTORED,
    ROLLBACK,
    SPIKE,
    STEPS,
    assert_same,
    messages,
    spikes_in,
    without_the_window,
)


@pytest.mark.parametrize("graphs", ["false", "true"])
def test_a_run_that_rolls_back_ends_as_one_without_the_batches_of_the_window(tmp_path, graphs):
    device = torch.device("cuda", torch.cuda.current_device())
    tables = {"train": {"steps": STEPS, "dtype": "bfloat16"}, "checkpoint": {"every_steps": RESTORED}}
    config = write_config(tmp_path, **tables, data={"validation": []})
    options = (ROLLBACK, f"train.cuda_graphs={graphs}")
    with process_group(device), without_the_window(), spikes_in(device=device):
        train_here(config, tmp_path / "expected", *options, device=device)
    with process_group(device), spikes_in(SPIKE, device=device):
        train_here(config, tmp_path / "rolled", *options, device=device)
    assert backend.used()["adamw_update"].backend == "triton"
    assert_same(tmp_path / "rolled", tmp_path / "expected")
    assert [line["step"] for line in metrics(tmp_path / "rolled")] == [*range(1, STEPS + 1)]
    assert any("rolled back from step" in message for message in messages(tmp_path / "rolled"))
